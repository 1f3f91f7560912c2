"""`lrkv plan`: what a run will cost, before it is paid for, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Any

from lrkv_jax.accounting import plan
from lrkv_jax.config import RunConfig

CAPTION = (
    "Parameters with embedding and head; attention (queries, K/V, output) and K/V over all layers. "
    "GFLOPs are training's, forward and backward, attention counted in full, not its causal half. "
    "KV bytes: all layers, {dtype} values and float32 inverse norms; the paper counts values "
    "alone, and MLA's without the rope key."
)


def print_plan(config: RunConfig, *, all_variants: bool, as_json: bool) -> None:
    """Print the plan of the chosen variant, or of every line of `variants`, to stdout."""
    planned = plan(config, list(config.variants) if all_variants else [config.attention])
    if as_json:
        print(json.dumps(planned, indent=2))
    else:
        _print_table(planned)


def _print_table(planned: dict[str, Any]) -> None:
    # Imported here: JSON needs no terminal.
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    title = (
        "{name}: {layers} layers of {width}, {heads} heads of {head_width}, "
        "{tokens:,} tokens at context {context:,}"
    ).format(**planned)
    caption = CAPTION.format(dtype=planned["cache_dtype"])
    # Narrow enough for eight columns on an 80-column terminal.
    table = Table(
        title=escape(title),
        caption=caption,
        box=box.SIMPLE_HEAD,
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("variant")
    for header in (
        "parameters",
        "attention",
        "K/V",
        "GFLOPs /token",
        "KV bytes /token",
        "% of MHA (bytes)",
        "% as the paper counts",
    ):
        table.add_column(header, justify="right", no_wrap=" " not in header)
    for name, costs in planned["variants"].items():
        table.add_row(
            escape(name),
            _human(costs["parameters"]),
            _human(costs["attention_parameters"]),
            _human(costs["kv_parameters"]),
            f"{costs['flops_per_token'] / 1e9:.3f}",
            f"{costs['kv_cache_bytes_per_token']:,}",
            f"{100 * costs['kv_cache_bytes_fraction_of_mha']:.1f}",
            f"{100 * costs['kv_cache_fraction_published']:.1f}",
        )
    Console().print(table)


def _human(count: int) -> str:
    """162.2M, 6.85B."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.1f}K"
