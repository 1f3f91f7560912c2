"""`lrkv quickstart`: from nothing to two variants compared, or one that chats, in minutes."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.distributed.stopping import Stopping
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation import evaluate
from lrkv_jax.evaluation.benchmark import BenchmarkSettings
from lrkv_jax.evaluation.evaluate import BENCHMARKS
from lrkv_jax.evaluation.show import print_evaluation
from lrkv_jax.inference import Engine, Sampling
from lrkv_jax.inference.chat import Chat
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.run_dir import check_same
from lrkv_jax.training.state import resolve

PRETRAIN = "configs/quickstart.yaml"
MIDTRAIN = "configs/quickstart_midtrain.yaml"
VARIANTS = ("mha", "lrkv_latent")
PROMPT = "My fellow Americans, the"
SAMPLE_TOKENS, CHAT_TOKENS = 96, 64
ROUNDS = 5
SAMPLING = Sampling(temperature=0.7, top_p=0.9)
TURNS = ("What is 27 * 14?", "Who lives in the White House?", "How many states are there?")

# Narrow enough for an 80-column terminal.
HEADERS = (
    "", "params", "KV B\n/token", "% of\nMHA", "held-\nout CE", "bits\n/byte", "train\ntok/s",
    "decode\ntok/s", "error",
)  # fmt: skip
NEXT = """What to try next:
  lrkv train configs/quickstart.yaml attention=mla        another variant
  lrkv generate {run} --prompt "The state of our union"
  lrkv report                                             both on one page, with curves
  lrkv plan configs/128m.yaml --all                       what the paper's scales cost
  lrkv quickstart --chat                                  midtrain it, and talk to it
  lrkv train configs/128m.yaml attention=lrkv mesh.fsdp=8 the real thing"""
NEXT_AFTER_CHAT = """What to try next:
  lrkv chat {run}
  lrkv data build configs/128m.yaml                       FineWeb-Edu, the real path:
  lrkv train configs/128m.yaml attention=lrkv mesh.fsdp=8
  lrkv data fetch && lrkv train configs/midtrain.yaml init_from=runs/128m-lrkv
  lrkv evaluate runs/128m-midtrain-lrkv --tasks arc_easy,arc_challenge,mmlu,gsm8k"""


def compare(
    overrides: Sequence[str], console: Console, *, stopping: Stopping | None = None
) -> bool:
    """Train, evaluate and decode both variants and print the comparison.

    Runs that are finished are used as they are. False if a signal stopped a training run.
    Raises `LrkvError` for settings that both runs cannot have.
    """
    for given in overrides:
        if given.startswith(("attention=", "run_dir=")):
            raise LrkvError(
                f"{given}: the comparison trains {' and '.join(VARIANTS)}, in two directories; "
                f"use lrkv train {PRETRAIN} {given}"
            )
    began = time.monotonic()
    results = []
    configs = [load_config(PRETRAIN, [*overrides, f"attention={name}"]) for name in VARIANTS]
    for config in configs:
        _check_same(config, "name=NAME")
    for config in configs:
        result = train(config, console=console, stopping=stopping)
        if not result.finished:
            return False
        results.append((config, result.run_dir))
    rows = [_measured(config, run_dir) for config, run_dir in results]
    samples = [_Decoder(config, run_dir) for config, run_dir in results]
    # In turns, so that whatever else this machine does slows both.
    rates = [[sample.rate() for sample in samples] for _ in range(ROUNDS)]
    for row, decoded in zip(rows, zip(*rates, strict=True), strict=True):
        row["decode_rate"] = statistics.median(decoded)
    console.print("\nSame data, same steps, same optimizer:\n")
    table = tabulated(HEADERS, [_cells(row, rows[0]) for row in rows], form="simple")
    console.print(table, highlight=False, soft_wrap=True)
    console.print(
        "\nKV bytes are bfloat16, as allocated. Each variant decodes one sequence at a time, in "
        "turns; its error is relative to the whole-sequence forward's largest logit.\n"
    )
    for row, sample in zip(rows, samples, strict=True):
        title = f"{row['name']}, decoded from its cache"
        console.print(Panel(Text(sample.text), title=title, title_align="left"))
    gap = abs(rows[1]["bits_per_byte"] - rows[0]["bits_per_byte"])
    console.print(
        f"{time.monotonic() - began:.0f} s. With one seed each, a gap of {gap:.3f} bits per byte "
        f"is not yet significant.\n{NEXT.format(run=results[1][1])}",
        highlight=False,
        soft_wrap=True,
    )
    return True


def _check_same(config: RunConfig, fix: str) -> None:
    """Raise `LrkvError` where a run of other settings is in the run's place."""
    place = Path(config.directory)
    if (place / "config.yaml").is_file():
        check_same(place, resolve(config), fix=f"leave it as it was, or give another {fix}")


def _measured(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """One variant's row of the table, without its decoding speed."""
    result = evaluate(run_dir)
    # The first steps carry compilation.
    steady = read_metrics(run_dir)[config.train.log_every :] or read_metrics(run_dir)
    return {
        "name": config.attention,
        "parameters": result["parameters"],
        "kv_bytes": cache_allocated_bytes_per_token(config.model),
        "cross_entropy": result["bpb"]["cross_entropy"],
        "bits_per_byte": result["bpb"]["bits_per_byte"],
        "error": result["agreement"]["max_relative_error"],
        "train_rate": statistics.fmean(row["tokens_per_second"] for row in steady),
    }


def _cells(row: dict[str, Any], mha: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['parameters'] / 1e6:.2f}M",
        f"{row['kv_bytes']:,.0f}",
        f"{row['kv_bytes'] / mha['kv_bytes']:.1%}",
        f"{row['cross_entropy']:.3f}",
        f"{row['bits_per_byte']:.3f}",
        f"{row['train_rate']:,.0f}",
        f"{row['decode_rate']:,.0f}",
        f"{row['error']:.0e}",
    ]


class _Decoder:
    """A trained variant that continues the prompt; `text` is the continued prompt."""

    def __init__(self, config: RunConfig, run_dir: Path):
        run, tokenizer = load_run(run_dir), load_tokenizer(config.data.tokenizer)
        length = run.config.train.seq_len
        self._engine = Engine(run, batch=1)
        self._prompt = tokenizer.prompt(PROMPT)
        self._new = min(SAMPLE_TOKENS, length - len(self._prompt))
        ids = self._engine.generate([self._prompt], self._new, sampling=SAMPLING, seed=1)[0]
        cut = ids.index(tokenizer.bos) if tokenizer.bos in ids else len(ids)
        self.text = PROMPT + tokenizer.decode(ids[:cut])

    def rate(self) -> float:
        """Tokens per second at batch 1, without the prefill."""
        stream = self._engine.stream([self._prompt], self._new, sampling=SAMPLING, seed=1)
        next(stream)
        began = time.perf_counter()
        tokens = sum(len(new) for (new,) in stream)
        return tokens / (time.perf_counter() - began)


def chat(
    overrides: Sequence[str],
    console: Console,
    *,
    run_model_code: bool = False,
    stopping: Stopping | None = None,
) -> bool:
    """Pretrain the quickstart's model, midtrain it on the demonstration sets, evaluate it on the
    five benchmarks in their demonstration form, and talk to it; False if a signal stopped a run.

    overrides: of the pretraining run, `attention=NAME` for another variant. Runs that are finished
    are used as they are. Without `run_model_code` no program that the model writes is run.
    """
    began = time.monotonic()
    config = load_config(PRETRAIN, overrides)
    _check_same(config, "run_dir=PATH")
    pretrained = train(config, console=console, stopping=stopping)
    if not pretrained.finished:
        return False
    start = [f"init_from={pretrained.run_dir}"]
    if any(override.startswith("run_dir=") for override in overrides):
        start.append(f"run_dir={pretrained.run_dir}-midtrained")
    midtrained = train(load_config(MIDTRAIN, start), console=console, stopping=stopping)
    if not midtrained.finished:
        return False
    tasks = [name for name in BENCHMARKS if name != "humaneval" or run_model_code]
    settings = BenchmarkSettings(
        folder="demo", max_new_tokens=CHAT_TOKENS, run_model_code=run_model_code
    )
    result = evaluate(midtrained.run_dir, tasks=["bpb", "agreement", *tasks], settings=settings)
    print_evaluation(result, console)
    if not run_model_code:
        console.print("humaneval was left out: --run-model-code runs what the model wrote")
    conversation = Chat(
        load_run(midtrained.run_dir), sampling=Sampling(), max_new_tokens=CHAT_TOKENS
    )
    for turn in TURNS:
        cached = conversation.used
        console.print(Text("asked by this command: ", style="bold") + Text(turn))
        console.print(Text("".join(conversation.say(turn))))
        new = conversation.used - cached
        console.print(f"({cached} tokens were in the cache, {new} came with this turn)")
    console.print(
        f"{time.monotonic() - began:.0f} s. A model this small, of 400,000 tokens, knows the form "
        f"of an answer and no more.\n{NEXT_AFTER_CHAT.format(run=midtrained.run_dir)}",
        highlight=False,
        soft_wrap=True,
    )
    return True
