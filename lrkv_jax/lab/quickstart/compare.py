"""`lrkv quickstart`: MHA and `lrkv_latent` side by side, from raw to decoded text, in minutes."""

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.distributed.stopping import Stopping
from lrkv_jax.evaluation import evaluate
from lrkv_jax.inference import Engine, Sampling
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.restore import load_run

CONFIG = "configs/quickstart.yaml"
VARIANTS = ("mha", "lrkv_latent")
PROMPT = "My fellow Americans, the"
SAMPLE_TOKENS = 96
ROUNDS = 5
SAMPLING = Sampling(temperature=0.7, top_p=0.9)


def run_quickstart(
    overrides: Sequence[str], console: Console, *, stopping: Stopping | None = None
) -> bool:
    """Train, evaluate and decode both variants and print the comparison.

    Runs that are finished are used as they are. False if a signal stopped a training run.
    """
    began = time.monotonic()
    results = []
    for name in VARIANTS:
        config = load_config(CONFIG, [*overrides, f"attention={name}"])
        result = train(config, console=console, stopping=stopping)
        if not result.finished:
            return False
        results.append((config, result.run_dir))
    with console.status("evaluating and decoding ...") if console.is_terminal else nullcontext():
        rows = [_measured(config, run_dir) for config, run_dir in results]
        samples = [_Decoder(config, run_dir) for config, run_dir in results]
        # In turns, so that whatever else this machine does slows both.
        rates = [[sample.rate() for sample in samples] for _ in range(ROUNDS)]
    for row, decoded in zip(rows, zip(*rates, strict=True), strict=True):
        row["decode_rate"] = statistics.median(decoded)
    _print_table(rows, console)
    for row, sample in zip(rows, samples, strict=True):
        title = f"{row['name']}, decoded from its cache"
        console.print(Panel(Text(sample.text), title=title, title_align="left"))
    _print_next(rows, time.monotonic() - began, console)
    return True


def _measured(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """One variant's row of the table, without its decoding speed."""
    result = evaluate(run_dir)
    # The first steps carry compilation.
    steady = read_metrics(run_dir)[config.train.log_every :] or read_metrics(run_dir)
    return {
        "name": config.attention,
        "run_dir": str(run_dir),
        "parameters": result["parameters"],
        "kv_bytes": cache_allocated_bytes_per_token(config.model),
        "cross_entropy": result["bpb"]["cross_entropy"],
        "bits_per_byte": result["bpb"]["bits_per_byte"],
        "error": result["agreement"]["max_relative_error"],
        "train_rate": sum(r["tokens_per_second"] for r in steady) / len(steady),
    }


class _Decoder:
    """A trained variant that continues the prompt; `text` is what it said."""

    def __init__(self, config: RunConfig, run_dir: Path):
        run, tokenizer = load_run(run_dir), load_tokenizer(config.data.tokenizer)
        length = run.config.train.seq_len
        self._engine = Engine(run.config.model, run.params, batch=1, length=length, mesh=run.mesh)
        self._prompt = tokenizer.prompt(PROMPT)
        ids = self._engine.generate([self._prompt], SAMPLE_TOKENS, sampling=SAMPLING, seed=1)[0]
        cut = ids.index(tokenizer.bos) if tokenizer.bos in ids else len(ids)
        self.text = PROMPT + tokenizer.decode(ids[:cut])

    def rate(self) -> float:
        """Tokens per second at batch 1, without the prefill."""
        stream = self._engine.stream([self._prompt], SAMPLE_TOKENS, sampling=SAMPLING, seed=1)
        next(stream)
        began = time.perf_counter()
        tokens = sum(len(new) for (new,) in stream)
        return tokens / (time.perf_counter() - began)


def _print_table(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title="Same data, same steps, same optimiser",
        caption="KV bytes: bfloat16, as allocated. Decode: one sequence at a time, measured in "
        "turns; its error is relative to the whole-sequence forward's largest logit.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    # Narrow enough for an 80-column terminal.
    for column in (
        "", "\nparams", "KV bytes\nper token", "% of\nMHA", "held-out\nCE", "bits per\nbyte",
        "train\ntok/s", "decode\ntok/s", "decode\nerror",
    ):  # fmt: skip
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    mha = rows[0]["kv_bytes"]
    best = min(row["bits_per_byte"] for row in rows)
    for row in rows:
        bpb = f"{row['bits_per_byte']:.3f}"
        table.add_row(
            Text(row["name"], style="bold"),
            f"{row['parameters'] / 1e6:.2f}M",
            f"{row['kv_bytes']:,.0f}",
            f"{row['kv_bytes'] / mha:.1%}",
            f"{row['cross_entropy']:.3f}",
            Text(bpb, style="bold" if row["bits_per_byte"] == best else ""),
            f"{row['train_rate']:,.0f}",
            f"{row['decode_rate']:,.0f}",
            f"{row['error']:.0e}",
        )
    console.print()
    console.print(table)


def _print_next(rows: list[dict[str, Any]], seconds: float, console: Console) -> None:
    gap = rows[1]["bits_per_byte"] - rows[0]["bits_per_byte"]
    console.print(
        f"{seconds:.0f} s. With one seed each, a gap of {abs(gap):.3f} bits per byte is not yet "
        "significant.\n"
        "What to try next:\n"
        "  lrkv train configs/quickstart.yaml attention=mla        another variant\n"
        "  lrkv train configs/quickstart.yaml attention.rank=16 run_dir=runs/rank16\n"
        f'  lrkv generate {rows[1]["run_dir"]} --prompt "The state of our union"\n'
        "  lrkv plan configs/128m.yaml --all                       what the paper's scales cost\n"
        "  lrkv quickstart --chat                                  midtrain it, and talk to it\n"
        "  lrkv train configs/128m.yaml attention=lrkv mesh.fsdp=8 the real thing",
        highlight=False,
        soft_wrap=True,
    )
