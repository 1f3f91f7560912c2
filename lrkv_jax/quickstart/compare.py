"""`lrkv quickstart`: MHA and LRKV side by side, from raw text to decoded text, in minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.decode import Engine, Sampling
from lrkv_jax.evals import evaluate
from lrkv_jax.train.loop import train
from lrkv_jax.train.metrics import read_metrics
from lrkv_jax.train.restore import TrainedRun, load_run

CONFIG = "configs/quickstart.yaml"
VARIANTS = ("mha", "lrkv")
PROMPT = "My fellow Americans, the"
SAMPLE_TOKENS = 96
SAMPLING = Sampling(temperature=0.7, top_p=0.9)


def run_quickstart(overrides: Sequence[str], console: Console) -> bool:
    """Train, evaluate and decode both variants and print the comparison.

    Runs that are finished are used as they are. False if a signal stopped a training run.
    """
    began = time.monotonic()
    rows, texts = [], {}
    for name in VARIANTS:
        config = load_config(CONFIG, [*overrides, f"attention={name}"])
        result = train(config, console=console)
        if not result.finished:
            return False
        row, texts[name] = _measure(config, result.run_dir)
        rows.append(row)
    _print_table(rows, console)
    for name, text in texts.items():
        console.print(Panel(text, title=f"{name}, decoded from its cache", title_align="left"))
    _print_next(rows, time.monotonic() - began, console)
    return True


def _measure(config: RunConfig, run_dir: Path) -> tuple[dict[str, Any], str]:
    """One variant's row of the table, each figure measured, and a sample of its text."""
    result = evaluate(run_dir)
    run = load_run(run_dir)
    tokenizer = load_tokenizer(config.data.tokenizer)
    text, decode_rate = _decode(run, tokenizer)
    # The first steps carry compilation.
    steady = read_metrics(run_dir)[config.train.log_every :] or read_metrics(run_dir)
    row = {
        "name": config.attention,
        "run_dir": str(run_dir),
        "parameters": result["parameters"],
        "kv_bytes": result["kv_cache_bytes_per_token"],
        "cross_entropy": result["bpb"]["cross_entropy"],
        "bits_per_byte": result["bpb"]["bits_per_byte"],
        "error": result["agreement"]["max_relative_error"],
        "decode_rate": decode_rate,
        "train_rate": sum(r["tokens_per_second"] for r in steady) / len(steady),
    }
    return row, text


def _decode(run: TrainedRun, tokenizer: Tokenizer) -> tuple[str, float]:
    """A sample, and steady decoding speed in tokens a second at batch 1."""
    length = run.config.train.context
    engine = Engine(run.config.model, run.params, batch=1, length=length, mesh=run.mesh)
    prompt = [tokenizer.bos, *tokenizer.encode(PROMPT).tolist()]
    how = {"sampling": SAMPLING, "seed": 1}
    ids = engine.generate([prompt], SAMPLE_TOKENS, **how)[0]  # compiles
    stream = engine.stream([prompt], SAMPLE_TOKENS, **how)
    jax.block_until_ready(next(stream))  # the prefill is not decoding
    began = time.perf_counter()
    jax.block_until_ready(list(stream))
    rate = (SAMPLE_TOKENS - 1) / (time.perf_counter() - began)
    cut = ids.index(tokenizer.bos) if tokenizer.bos in ids else len(ids)
    return PROMPT + tokenizer.decode(ids[:cut]), rate


def _print_table(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title="Same data, same steps, same optimiser",
        caption="KV bytes: summed from the live cache. Decode: one sequence at a time, its "
        "error relative to the whole-sequence forward's largest logit.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    # Narrow enough for an 80-column terminal.
    for column in (
        "", "\nparams", "KV bytes\na token", "% of\nMHA", "held-out\nCE", "bits per\nbyte",
        "train\ntok/s", "decode\ntok/s", "decode\nerror",
    ):  # fmt: skip
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    mha = rows[0]["kv_bytes"]
    best = min(row["bits_per_byte"] for row in rows)
    for row in rows:
        bpb = f"{row['bits_per_byte']:.3f}"
        table.add_row(
            f"[bold]{row['name']}[/bold]",
            f"{row['parameters'] / 1e6:.2f}M",
            f"{row['kv_bytes']:,.0f}",
            f"{row['kv_bytes'] / mha:.1%}",
            f"{row['cross_entropy']:.3f}",
            f"[bold]{bpb}[/bold]" if row["bits_per_byte"] == best else bpb,
            f"{row['train_rate']:,.0f}",
            f"{row['decode_rate']:,.0f}",
            f"{row['error']:.0e}",
        )
    console.print()
    console.print(table)


def _print_next(rows: list[dict[str, Any]], seconds: float, console: Console) -> None:
    gap = rows[1]["bits_per_byte"] - rows[0]["bits_per_byte"]
    console.print(
        f"{seconds:.0f} s. One seed each: a gap of {abs(gap):.3f} bits per byte says little yet.\n"
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
