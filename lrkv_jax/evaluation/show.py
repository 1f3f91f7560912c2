"""An evaluation as a table."""

import math
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
    for name, value in measures(result):
        table.add_row(name, value)
    console.print(table)
    benchmarks = [name for name in BENCHMARKS if name in result]
    if benchmarks:
        console.print(_benchmarks(result, benchmarks))


def measures(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of an evaluation without its benchmarks."""
    cache, measured = "KV-cache bytes per token", result.get("kv_cache_dtype")
    numbers = (
        ("parameters", "parameters", ","),
        ("kv_cache_bytes_per_token_bfloat16", f"{cache}, bfloat16", ",.0f"),
        ("kv_cache_bytes_per_token", f"{cache}, {measured}, measured", ",.0f"),
    )
    found = [(text, f"{result[key]:{form}}") for key, text, form in numbers if key in result]
    for task, text in (("bpb", "held-out"), ("docstrings", "docstrings")):
        if loss := _numbers(result.get(task, {})):
            found += [
                (f"{text} cross-entropy, nats per token", f"{loss['cross_entropy']:.4f}"),
                (f"{text} bits per byte", f"{loss['bits_per_byte']:.4f}"),
            ]
    if same := _numbers(result.get("agreement", {})):
        error, bound = same["max_relative_error"], same.get("bound", math.inf)
        mark = "" if error <= bound else f" WRONG, above {bound:.0e}"
        found += [
            ("decoding against forward, relative error", f"{error:.1e}{mark}"),
            (f"same greedy token, of {same['positions']}", f"{same['same_greedy_token']:.2%}"),
            ("nats per token, decoded", f"{same['loss']:.4f}"),
            ("nats per token, forward", f"{same['forward_loss']:.4f}"),
        ]
    return found


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a task, NaN where a file has null for it."""
    return {key: math.nan if value is None else value for key, value in found.items()}


def _benchmarks(result: dict[str, Any], benchmarks: list[str]) -> Table:
    demonstration = any(result[name]["dataset"]["demonstration"] for name in benchmarks)
    title = "DEMONSTRATION SETS: no benchmark's scores" if demonstration else "benchmarks, %"
    columns = "", "measure", "score", "standard error", "examples", "cut"
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in benchmarks:
        row = result[name]
        error = row["more"][f"{row['measure']}_stderr"]
        table.add_row(
            name, row["measure"], f"{100 * row['score']:.1f}", f"{100 * error:.1f}",
            f"{row['examples']:,}", str(row["truncated_prompts"]),
        )  # fmt: skip
    if "combined" in result:
        table.add_row("combined", "mean", f"{100 * result['combined']:.1f}")
    return table
