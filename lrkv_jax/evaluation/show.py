"""An evaluation as a table."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lrkv_jax.evaluation.evaluate import BENCHMARKS

PERCENT = 100


def print_evaluation(result: dict[str, Any], console: Console) -> None:
    """Print the result as tables; MMLU's subjects and every example are in `evaluations/`."""
    table = Table(
        title=f"{result['run']}  {result['attention']}  step {result['step']}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("parameters", f"{result['parameters']:,}")
    dtype, bytes_per_token = result["kv_cache_dtype"], "KV-cache bytes per token"
    for name, size in (
        ("bfloat16, as allocated", result["kv_cache_bytes_per_token_bfloat16"]),
        (f"{dtype}, measured in this cache", result["kv_cache_bytes_per_token"]),
        (f"{dtype}, formula", result["kv_cache_bytes_per_token_formula"]),
    ):
        table.add_row(f"{bytes_per_token}, {name}", f"{size:,.0f}")
    for task, text in (("bpb", "held-out"), ("docstrings", "docstrings")):
        if task in result:
            loss = result[task]
            table.add_row(f"{text} cross-entropy, nats per token", f"{loss['cross_entropy']:.4f}")
            table.add_row(f"{text} bits per byte", f"{loss['bits_per_byte']:.4f}")
            table.add_row(f"{text} tokens", f"{loss['tokens']:,}")
            table.add_row(f"{text} bytes", f"{loss['bytes']:,}")
    if "agreement" in result:
        agreement = result["agreement"]
        table.add_row(
            "cached decode against forward, largest relative difference",
            f"{agreement['max_relative_error']:.1e}",
        )
        table.add_row(
            f"same greedy token, of {agreement['positions']}",
            f"{agreement['same_greedy_token']:.2%}",
        )
        table.add_row("nats per token there, decoded", f"{agreement['loss']:.4f}")
        table.add_row("nats per token there, forward", f"{agreement['forward_loss']:.4f}")
    console.print(table)
    asked = [name for name in BENCHMARKS if name in result]
    if asked:
        _print_benchmarks(result, asked, console)


def _print_benchmarks(result: dict[str, Any], asked: list[str], console: Console) -> None:
    demonstration = any(result[name]["dataset"]["demonstration"] for name in asked)
    table = Table(
        title="DEMONSTRATION SETS: no benchmark's scores" if demonstration else "benchmarks, %",
        caption="± is the standard error; each example's record is in evaluations/",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("", "measure", "score", "±", "examples", "cut", "seconds"):
        left = column in ("", "measure")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for name in asked:
        row = result[name]
        error = row["more"][f"{row['measure']}_stderr"]
        table.add_row(
            name, row["measure"], f"{PERCENT * row['score']:.1f}",
            f"{PERCENT * error:.1f}", f"{row['examples']:,}", str(row["truncated_prompts"]),
            f"{row['seconds']:.1f}",
        )  # fmt: skip
    if "combined" in result:
        table.add_section()
        table.add_row("combined", "mean", f"{PERCENT * result['combined']:.1f}")
    console.print(table)
