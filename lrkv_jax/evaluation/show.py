"""An evaluation as a table."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lrkv_jax.evaluation.evaluate import BENCHMARKS


def print_evaluation(result: dict[str, Any], console: Console) -> None:
    """Print the result as tables; MMLU's subjects and every example are in `evaluations/`."""
    title = f"{result['run']}  {result['attention']}  step {result['step']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in _measures(result):
        table.add_row(name, value)
    console.print(table)
    asked = [name for name in BENCHMARKS if name in result]
    if asked:
        _print_benchmarks(result, asked, console)


def _measures(result: dict[str, Any]) -> list[tuple[str, str]]:
    dtype, cache = result["kv_cache_dtype"], "KV-cache bytes per token"
    found = [
        ("parameters", f"{result['parameters']:,}"),
        (f"{cache}, bfloat16, as allocated", f"{result['kv_cache_bytes_per_token_bfloat16']:,.0f}"),
        (f"{cache}, {dtype}, measured in this cache", f"{result['kv_cache_bytes_per_token']:,.0f}"),
        (f"{cache}, {dtype}, formula", f"{result['kv_cache_bytes_per_token_formula']:,.0f}"),
    ]
    for task, text in (("bpb", "held-out"), ("docstrings", "docstrings")):
        if task in result:
            loss = result[task]
            found += [
                (f"{text} cross-entropy, nats per token", f"{loss['cross_entropy']:.4f}"),
                (f"{text} bits per byte", f"{loss['bits_per_byte']:.4f}"),
                (f"{text} tokens, bytes", f"{loss['tokens']:,}, {loss['bytes']:,}"),
            ]
    if "agreement" in result:
        same = result["agreement"]
        found += [
            ("decoding against forward, relative error", f"{same['max_relative_error']:.1e}"),
            (f"same greedy token, of {same['positions']}", f"{same['same_greedy_token']:.2%}"),
            ("nats per token, decoded", f"{same['loss']:.4f}"),
            ("nats per token, forward", f"{same['forward_loss']:.4f}"),
        ]
    return found


def _print_benchmarks(result: dict[str, Any], asked: list[str], console: Console) -> None:
    demonstration = any(result[name]["dataset"]["demonstration"] for name in asked)
    table = Table(
        "", "measure", "score", "±", "examples", "cut", "seconds",
        title="DEMONSTRATION SETS: no benchmark's scores" if demonstration else "benchmarks, %",
        caption="± is the standard error; each example's record is in evaluations/",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for name in asked:
        row = result[name]
        error = row["more"][f"{row['measure']}_stderr"]
        table.add_row(
            name, row["measure"], f"{100 * row['score']:.1f}", f"{100 * error:.1f}",
            f"{row['examples']:,}", str(row["truncated_prompts"]), f"{row['seconds']:.1f}",
        )  # fmt: skip
    if "combined" in result:
        table.add_section()
        table.add_row("combined", "mean", f"{100 * result['combined']:.1f}")
    console.print(table)
