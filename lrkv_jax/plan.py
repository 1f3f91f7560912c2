"""`lrkv plan`: what a run will cost, before it is paid for, as a table or as JSON.

All is counted from the configuration, except the cache's live bytes: those are summed from the
buffers of a small cache that is really allocated. Loading JAX for it takes a second and a half.
"""

from __future__ import annotations

import json
from typing import Any

from lrkv_jax.accounting import CACHE_DTYPE, plan, with_mha
from lrkv_jax.config import ModelConfig, RunConfig

CAPTION = (
    "Parameters with embedding and head; attention (queries, K/V, output) and K/V over all layers. "
    "GFLOPs are training's, forward and backward, attention counted in full, not its causal half. "
    "KV bytes: all layers, {dtype} values and float32 inverse norms, by the formula; live, summed "
    "from the buffers of an allocated cache, padding included; and those as a share of MHA's. "
    "The paper counts values alone, and MLA's without the rope key."
)
LIVE_SLOTS = 64  # enough that a cache padded in slots would show


def print_plan(config: RunConfig, *, all_variants: bool, as_json: bool) -> None:
    """Print the plan of the chosen variant, or of every line of `variants`, to stdout."""
    planned = plan(config, list(config.variants) if all_variants else [config.attention])
    mha_bytes = live_cache_bytes_per_token(with_mha(config.model))
    for name, costs in planned["variants"].items():
        live = live_cache_bytes_per_token(config.variant(name).model)
        costs["kv_cache_live_bytes_per_token"] = live
        costs["kv_cache_live_fraction_of_mha"] = live / mha_bytes
    if as_json:
        print(json.dumps(planned, indent=2))
    else:
        _print_table(planned)


def live_cache_bytes_per_token(model: ModelConfig, dtype: str = CACHE_DTYPE) -> float:
    """Bytes of a layer's live buffers over the tokens they hold, times layers, from a small cache.

    The layer is abstract: its cache is allocated, its weights are not.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from lrkv_jax.attention import make_attention

    layer = nnx.eval_shape(lambda: make_attention(model, rngs=nnx.Rngs(0)))
    cache = layer.init_cache(1, LIVE_SLOTS, jnp.dtype(dtype))
    return model.layers * sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) / LIVE_SLOTS


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
    # Narrow enough for nine columns on an 80-column terminal.
    table = Table(
        title=escape(title),
        caption=caption,
        box=box.SIMPLE_HEAD,
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("variant", no_wrap=True)
    for header in (
        "params",
        "attention",
        "K/V",
        "GFLOPs\n/token",
        "KV bytes\n/token",
        "live\n/token",
        "% MHA,\nlive",
        "% in\npaper",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for name, costs in planned["variants"].items():
        table.add_row(
            escape(name),
            _human(costs["parameters"]),
            _human(costs["attention_parameters"]),
            _human(costs["kv_parameters"]),
            f"{costs['flops_per_token'] / 1e9:.3f}",
            f"{costs['kv_cache_bytes_per_token']:,}",
            f"{costs['kv_cache_live_bytes_per_token']:,.0f}",
            f"{100 * costs['kv_cache_live_fraction_of_mha']:.1f}",
            f"{100 * costs['kv_cache_fraction_published']:.1f}",
        )
    Console().print(table)


def _human(count: int) -> str:
    """162.2M, 6.85B."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.1f}K"
