"""Table 11: what a cache is made of.

The arrays of a layer's cache as they are allocated, at the 128M shape with one sequence of 2,048
tokens, and each variant's bytes per token beside the paper's formula.
"""

from lrkv_jax.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.printed import of_paper
from lrkv_jax.artefacts.table import Column, Row, Table
from lrkv_jax.attention.cache import slot_axes
from lrkv_jax.plan.live_cache import live_cache_bytes_per_token, measure_cache

SCALE, TOKENS = "128m", 2048
SCALES = ("128m", "1.2b", "2.5b", "6.3b")
# Bytes per token and layer in bfloat16: H heads, G key/value heads, K head width, C latent, P rope
# key, R rank, R' the rank padded to whole rows. The paper's counts come first.
FORMULAS = {
    "mha": ("2·2·H·K", "2·2·H·K"),
    "mqa": ("2·2·K", "2·2·K"),
    "gqa": ("2·2·G·K", "2·2·G·K"),
    "mla": ("2·C", "2·(C + P)"),
    "lrkv": ("2·2·(K + H·R)", "2·2·(K + H·R') + 4·H"),
}


@artefact("Table 11", "KV cache structure", reads="configurations")
def table11_cache_shapes(runs):
    return [arrays(), formulas()]


def arrays() -> Table:
    """The arrays that one layer allocates."""
    columns = [
        Column("variant"), Column("array"), Column("axes"), Column("shape"), Column("dtype"),
    ]  # fmt: skip
    rows = []
    for variant in FORMULAS:
        model = of_paper(SCALE, variant).model.model_copy(update={"layers": 1})
        shapes = measure_cache(model, 1, TOKENS).shapes
        for name in slot_axes(shapes):
            array, axes = getattr(shapes, name), ", ".join(shapes.AXES[name].split())
            shape = " × ".join(f"{size:,}" for size in array.shape)
            name = name.rpartition("_")[0]  # without the shape's letters
            rows.append(Row.of(name_of(variant), name, axes, shape, str(array.dtype)))
    return Table(
        f"Arrays of a layer's cache, {SCALE}, one sequence of {TOKENS:,} tokens", columns, rows,
        caption="A layer has arrays of its own: there is no axis of layers. LRKV's latents are "
        "padded to rows of 16 bytes, and its inverse norms stay float32.",
        notes=[
            "The paper's Table 11 writes H/G for the key/value heads of GQA, its Table 10 G: here "
            "G is their number.",
            "The paper's caches have neither rope keys nor norms: without a rope key MLA's keys "
            "have no positions, without norms LRKV's factored logits are not of normed keys.",
        ],
    )  # fmt: skip


def formulas() -> Table:
    """Bytes per token and layer, by formula and by number."""
    columns = [
        Column("variant"), Column("the paper's formula"), Column("gives", "B"),
        Column("as allocated"), Column("gives", "B"), Column("measured", "B", digits=0),
    ]  # fmt: skip
    rows = []
    for scale in SCALES:
        for variant in FORMULAS:
            model = of_paper(scale, variant).model
            paper, ours = FORMULAS[variant]
            rows.append(
                Row.of(
                    name_of(variant),
                    paper, 2 * model.attention.cache_values_published(model),
                    ours, cache_allocated_bytes_per_token(model) // model.layers,
                    live_cache_bytes_per_token(model) / model.layers,
                    block=scale,
                )
            )  # fmt: skip
    return Table(
        "Bytes that a token leaves in a layer's cache", columns, rows, name="formulas",
        caption="bfloat16. H heads, G key/value heads, K head width, C latent, P rope key, R rank, "
        "R' the rank padded to a multiple of 8.",
    )  # fmt: skip
