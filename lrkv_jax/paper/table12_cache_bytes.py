"""Table 12: caches as they are allocated.

For every variant of every scale (batch 1, bfloat16, the context it is trained with) the whole cache
is allocated on this machine, layer by layer as a decoder does, weighed by its device buffers, and
freed. No weight is made, so 1.2 GB of memory suffice.

The paper's figures stand beside what they would need: its megabytes are those of rank 64 (and, at
6.3B, of 36 layers), its percentages those of ranks 46 to 55.
"""

from lrkv_jax.accounting.counts import cache_allocated_bytes_per_token, cache_bytes_per_token
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.printed import KINDS, SCALES, of_paper, printed, printed_table
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.plan.live_cache import measure_cache

MIB = 2**20


@artefact("Table 12", "KV cache as it is allocated", reads="configurations")
def table12_cache_bytes(runs):
    return [measured(), explained()]


def measured() -> Table:
    """Formulas beside live buffers."""
    columns = [
        Column("variant"), Column("layers"), Column("setting"),
        Column("by the paper's formula", "MiB", digits=1),
        Column("all that is cached", "MiB", digits=1),
        Column("as allocated", "MiB", digits=1),
        Column("measured", "MiB", digits=1),
        Column("measured, of MHA", "%", digits=1),
    ]  # fmt: skip
    rows = []
    for scale in SCALES:
        mha = None
        for variant in KINDS:
            config = of_paper(scale, variant)
            model, tokens = config.model, config.train.context
            cache = measure_cache(model, 1, tokens)
            mha = mha or cache.nbytes
            odd = "" if cache.live == cache.nbytes else f"all live arrays grew by {cache.live:,} B"
            paper_mb = printed("table12", scale, variant, "megabytes")
            paper_share = printed("table12", scale, variant, "share")
            rows.append(
                Row.of(
                    name_of(variant), model.layers, _setting(config),
                    _published_bytes(model, tokens) / MIB,
                    cache_bytes_per_token(model) * tokens / MIB,
                    cache_allocated_bytes_per_token(model) * tokens / MIB,
                    Cell(cache.nbytes / MIB, note=odd, printed=paper_mb),
                    Cell(100 * cache.nbytes / mha, printed=paper_share),
                    block=f"{scale}, {tokens:,} tokens",
                )
            )  # fmt: skip
    return Table(
        "KV cache of one sequence", columns, rows,
        caption="Batch 1, bfloat16. The paper's formula has neither MLA's rope key nor LRKV's "
        "float32 inverse norms, which exact decoding needs; as allocated adds the padding of "
        "LRKV's latents to rows of 8 values. Measured are the device buffers of allocated caches.",
    )  # fmt: skip


def explained() -> Table:
    """What each printed figure of the paper would need, solved for the setting."""
    columns = [
        Column("variant"),
        Column("printed", "MB", digits=1), Column("needs layers"), Column("and"),
        Column("printed", "%", digits=1), Column("needs"),
        Column("stated"), Column("which is", "MiB", digits=1), Column("and", "%", digits=1),
    ]  # fmt: skip
    rows = []
    for scale, row in printed_table("table12").items():
        mha = of_paper(scale, "mha")
        mha_values = mha.model.attention.cache_values(mha.model)  # per token and layer
        layers = float(row["mha"]["megabytes"]) * MIB / (2 * mha.train.context * mha_values)
        for variant in row:
            config = of_paper(scale, variant)
            model, tokens = config.model, config.train.context
            megabytes = float(row[variant]["megabytes"])
            share = printed("table12", scale, variant, "share")
            rows.append(
                Row.of(
                    name_of(variant), megabytes, round(layers),
                    _implied(model, megabytes * MIB / (2 * tokens * layers)),
                    share.value if share else None,
                    _implied(model, mha_values * share.value / 100) if share else None,
                    f"{model.layers} layers, {_setting(config)}",
                    _published_bytes(model, tokens) / MIB,
                    100 * model.attention.cache_values_published(model) / mha_values,
                    block=scale,
                )
            )  # fmt: skip
    return Table(
        "What the printed caches would need", columns, rows, name="explained",
        caption="Solved from the paper's own formulas; layers from the printed cache of MHA. "
        "The paper's caption states rank 64 and its latents \"as specified in main paper\".",
    )  # fmt: skip


def _implied(model: ModelConfig, values: float) -> str:
    """The setting with which a token leaves `values` values in a layer's cache."""
    K = model.head_width
    match model.attention.kind:
        case "mla":
            return f"latent {values:.0f}"
        case "lrkv":
            return f"rank {(values / 2 - K) / model.heads:.1f}"
    return f"{values / (2 * K):.2g} heads"


def _published_bytes(model: ModelConfig, tokens: int) -> int:
    """The paper's Table 11 in bytes: bfloat16 values, without rope key and norms."""
    return 2 * tokens * model.layers * model.attention.cache_values_published(model)


def _setting(config: RunConfig) -> str:
    """The variant's own size: key/value heads, latent and rope key, or rank."""
    entry = config.model.attention
    match entry.kind:
        case "mla":
            return f"latent {entry.latent}, rope key {entry.rope_width}"
        case "lrkv":
            return f"rank {entry.rank}, rope {entry.rope}"
    return f"{entry.groups(config.model)} of {config.model.heads} heads"
