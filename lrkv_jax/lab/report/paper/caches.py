"""Cached values, and the cost of decoding from them: Figure 1, Tables 10 to 12."""

import jax
import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from lrkv_jax.config import ModelConfig, load_config
from lrkv_jax.lab.report.figures import Picture, panels
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.paper_values import (
    KINDS,
    SCALES,
    of_paper,
    paper_table,
    paper_value,
    verdict,
)
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token, cache_bytes_per_token
from lrkv_jax.models.accounting.serving import attention_flops
from lrkv_jax.models.attention import LRKV, MLA, abstract_layer

FAMILY_SCALE = "128m"
OF_ALL, OF_SOME, NORM = "#0072B2", "#D55E00", "#777777"
NAMES = {
    "k": r"$k_h$", "v": r"$v_h$", "latent": r"$c$", "rope_key": r"$k'$",
    "k_shared": r"$k$", "v_shared": r"$v$", "rk": r"$r^k_h$", "rv": r"$r^v_h$",
    "private": r"$r_h$",
}  # fmt: skip
# The logit at position s of a query q at m, before 1/√W, and the value; P(s) is RoPE's rotation.
GROUPED = r"$q^{m}\cdot P(s)\,k_h$", r"$v_h$"
FORMS = {
    ("mha", ""): GROUPED,
    ("gqa", ""): (r"$q^{m}\cdot P(s)\,k_{g(h)}$", r"$v_{g(h)}$"),
    ("mqa", ""): (r"$q^{m}\cdot P(s)\,k$", r"$v$"),
    ("mla", ""): (r"$(q A_h^T)\cdot c + q'^{m}\cdot P(s)\,k'$", r"$c\,A'_h$"),
    ("mla", "rope full"): (r"$n_h\, q^{m}\cdot P(s)(c\,A_h)$", r"$c\,A'_h$"),
    ("mla", "rope full, rank 46"): (
        r"$n_h\, q^{m}\cdot P(s)(c\,A_h + r_h B_h^T)$", r"$c\,A'_h + r_h B_h'^T$",
    ),
    ("lrkv", ""): (r"$n_h\, q^{m}\cdot P(s)(k + r^k_h B_h^T)$", r"$v + r^v_h B_h'^T$"),
    ("lrkv", "rope shared"): (
        r"$n_h\,(q^{m}\cdot P(s)\,k + (q B_h)\cdot r^k_h)$", r"$v + r^v_h B_h'^T$",
    ),
    ("lrkv", "rope latent"): (
        r"$n_h\,(q^{m}\cdot P(s)\,k + (q B_h)^{m}\cdot P_R(s)\,r^k_h)$", r"$v + r^v_h B_h'^T$",
    ),
    ("lrkv", "rope none"): (r"$n_h\,(q\cdot k + (q B_h)\cdot r^k_h)$", r"$v + r^v_h B_h'^T$"),
    ("lrkv", "rope latent, in 3 groups"): (
        r"$n_g\,(q^{m}\cdot P(s)\,k + (q B_g)^{m}\cdot P_R(s)\,r^k_g)$", r"$v + r^v_g B_g'^T$",
    ),
}  # fmt: skip


LOGIT, VALUE = 120, 210  # where formulas begin, right of the bars' 100 %
FIG01 = "What a token leaves in each variant's cache, and how a query meets it"


@report_item("Figure 1", FIG01, reads="configurations")
def fig01_family(runs):
    """A token's entries in each variant's cache, in proportion to their bytes, and their use."""
    models = _family()
    figure, [[axis]] = panels(panel=(8.2, 0.42 * len(models) + 0.6))
    mha = sum(size for *_, size in _arrays(models[0]))
    for place, model in enumerate(models):
        _draw_cache(axis, place, model, mha)
        entry = model.attention
        for x, formula in zip((LOGIT, VALUE), FORMS[entry.name, entry.form], strict=True):
            axis.text(x, place, formula, va="center")
    axis.text(LOGIT, -0.8, "logit", fontweight="bold")
    axis.text(VALUE, -0.8, "value", fontweight="bold")
    axis.set_xlim(0, 252)
    axis.set_ylim(len(models) - 0.4, -1.2)
    axis.set_xticks([0, 25, 50, 75, 100])
    axis.set_xlabel("bytes per cached token, % of MHA's", loc="left")
    axis.set_yticks(range(len(models)), [model.attention.label for model in models])
    axis.grid(visible=False)
    figure.legend(
        handles=[
            Patch(color=OF_ALL, label="read by all heads"),
            Patch(color=OF_SOME, label="of each head or group"),
            Patch(color=NORM, label="float32 inverse norms, n"),
        ],
        loc="outside lower center", ncols=3,
    )  # fmt: skip
    return Picture(
        FIG01, figure,
        "Arrays of one layer at the 128M shape, padding included. A query rotated at its own "
        "position m is written so, P(s) is RoPE's rotation at the key's, and P_R is the "
        "same in R dimensions. Where n stands, QK-norm divides by the whole key; MHA's, "
        "GQA's and MQA's keys are cached normed. Each variant decodes from this cache what it was "
        "trained to be, exactly.",
    )  # fmt: skip


def _draw_cache(axis: Axes, place: int, model: ModelConfig, mha: int) -> None:
    """Draw a box for each array of a layer's cache, side by side, 100 wide for MHA's."""
    left = 0.0
    for name, color, size in _arrays(model):
        width = 100 * size / mha
        wide = width > 2.5  # a white edge would hide the norms, and a name has no room there
        axis.add_patch(
            Rectangle((left, place - 0.36), width, 0.72, fc=color, ec="white", lw=0.8 * wide)
        )
        if wide:
            axis.text(
                left + width / 2, place, name, ha="center", va="center", color="white",
                fontsize=9 if width > 5 else 7,
            )  # fmt: skip
        left += width
    axis.text(left + 1, place, f"{left:.0f} %", va="center", fontsize=8)


def _family() -> list[ModelConfig]:
    """The model of each variant, at the scale's sizes; MHA's first."""
    config = load_config(FAMILY_SCALE)
    mha, gqa, mqa, mla, lrkv = (config.variant(kind).model for kind in KINDS)
    C, R = mla.attention.kv_lora_rank, lrkv.attention.rank
    entries = [
        *(model.attention for model in (mha, gqa, mqa, mla)),
        MLA(kv_lora_rank=C, rope="full"),
        MLA(kv_lora_rank=C, rope="full", rank=R),
        *(LRKV(rank=R, rope=rope) for rope in LRKV.modes()),
        LRKV(rank=R, rope="latent", kv_heads=gqa.attention.kv_heads),
    ]
    return [mha.model_copy(update={"attention": entry}) for entry in entries]


def _arrays(model: ModelConfig) -> list[tuple[str, str, int]]:
    """(name, color, bytes) of each array of a layer's cache of one token."""
    layer = abstract_layer(model)
    found = []
    for field, array in vars(layer.cache_shapes(1, 1, jnp.bfloat16)).items():
        if array is None or not array.size:
            continue
        name, _, letters = field.rpartition("_")
        if array.dtype == jnp.float32:
            found.append(("", NORM, array.size * 4))
        else:
            heads = array.shape[2] if {"G", "H"} & set(letters) else 1
            of = {1: "", model.heads: "_h"}.get(heads, "_g")
            color = OF_SOME if heads > 1 else OF_ALL
            found.append((NAMES[name].replace("_h", of), color, array.size * 2))
    return found


DECODE_SCALES = ("128m", "1.2b", "2.5b", "6.3b")
LENGTH = 2048
VARIANTS = (
    ("mha", None), ("mqa", None), ("gqa", None), ("mla", None), ("lrkv", "full"),
    ("lrkv", "shared"),
)  # fmt: skip


@report_item("Table 10", "Memory and latency of decoding", reads="configurations")
def table10_memory_latency(runs):
    """Cache and attention FLOPs of one decoded token; `lrkv bench decode` measures times."""
    columns = [
        Column("variant"), Column("cache per token", "KiB", digits=1),
        Column("each cached token", "kFLOP", digits=1, group="attention:"),
        Column(f"at {LENGTH:,}", "MFLOP", digits=1, group="attention:"),
        Column("over MHA", "×", digits=2, group="attention:"),
        Column("extra cost", group="paper:"), Column("grows with T", group="paper:"),
    ]  # fmt: skip
    rows = []
    for scale in DECODE_SCALES:
        mha = attention_flops(of_paper(scale, "mha").model).at(LENGTH)
        for variant, rope in VARIANTS:
            model = of_paper(scale, variant).model
            if rope:
                entry = model.attention.model_copy(update={"rope": rope})
                model = model.model_copy(update={"attention": entry})
            flops, paper = attention_flops(model), paper_table("table10")[variant]
            rows.append(
                TableRow.of(
                    model.attention.label, cache_allocated_bytes_per_token(model) / 1024,
                    flops.per_cached_token / 1e3, flops.at(LENGTH) / 1e6, flops.at(LENGTH) / mha,
                    paper["extra"], Cell(paper["dependence"], note=verdict("table10", variant)),
                    block=f"{scale}, {model.layers} layers",
                )
            )  # fmt: skip
    return Table(
        "Cache and attention of one decoded token", columns, rows,
        caption="All layers; the cache bfloat16, as allocated; two FLOPs per multiplication. "
        "MLA is absorbed; LRKV reads its factors, with the whole key rotated or its shared part.",
    )  # fmt: skip


# Bytes per token and layer in bfloat16: H heads, G key/value heads, K head width, C latent, P rope
# key, R rank, R' the rank padded to whole rows. The paper's counts come first.
FORMULAS = {
    "mha": ("2·2·H·K", "2·2·H·K"),
    "mqa": ("2·2·K", "2·2·K"),
    "gqa": ("2·2·G·K", "2·2·G·K"),
    "mla": ("2·C", "2·(C + P)"),
    "lrkv": ("2·2·(K + H·R)", "2·2·(K + H·R') + 4·H"),
}


@report_item("Table 11", "KV cache structure", reads="configurations")
def table11_cache_shapes(runs):
    """Bytes that a token leaves in a layer's cache, by formula and by number."""
    columns = [
        Column("variant"), Column("the paper's formula"), Column("gives", "B"),
        Column("as allocated"), Column("gives", "B"),
    ]  # fmt: skip
    rows = []
    for scale in DECODE_SCALES:
        for variant, (paper, ours) in FORMULAS.items():
            model = of_paper(scale, variant).model
            rows.append(
                TableRow.of(
                    variant.upper(),
                    paper, 2 * model.attention.cache_values_published(model),
                    ours, cache_allocated_bytes_per_token(model) // model.layers, block=scale,
                )
            )  # fmt: skip
    note = (
        "The paper's Table 11 writes H/G for the key/value heads of GQA, its Table 10 G: here G is "
        "their number. Its caches have neither rope keys nor norms: without a rope key MLA's keys "
        "have no positions, without norms LRKV's factored logits are not of normed keys."
    )
    return Table(
        "Bytes that a token leaves in a layer's cache", columns, rows, [note],
        caption="bfloat16. H heads, G key/value heads, K head width, C latent, P rope key, R rank, "
        "R' the rank padded to a multiple of 8.",
    )  # fmt: skip


MIB = 2**20


@report_item("Table 12", "KV cache as it is allocated", reads="configurations")
def table12_cache_bytes(runs):
    """Caches of every variant and scale, allocated and weighed; 1.2 GB of memory suffice."""
    columns = [
        Column("variant"), Column("layers"), Column("by the paper's formula", "MiB", digits=1),
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
            model, tokens = config.model, config.train.seq_len
            published = 2 * model.layers * model.attention.cache_values_published(model)
            measured = _live_bytes(model, tokens)
            mha = mha or measured
            paper_mb = paper_value("table12", scale, variant, "megabytes")
            paper_share = paper_value("table12", scale, variant, "share")
            rows.append(
                TableRow.of(
                    model.attention.label, model.layers,
                    tokens * published / MIB,
                    cache_bytes_per_token(model) * tokens / MIB,
                    cache_allocated_bytes_per_token(model) * tokens / MIB,
                    Cell(measured / MIB, paper=paper_mb),
                    Cell(100 * measured / mha, paper=paper_share),
                    block=f"{scale}, {tokens:,} tokens",
                )
            )  # fmt: skip
    return Table(
        "KV cache of one sequence", columns, rows,
        caption="Batch 1, bfloat16. The paper's formula has neither MLA's rope key nor LRKV's "
        "float32 inverse norms, which exact decoding needs; as allocated adds the padding of "
        "LRKV's latents to rows of 8 values. Measured are the device buffers of allocated caches.",
    )  # fmt: skip


def _live_bytes(model: ModelConfig, tokens: int) -> int:
    """Bytes of the caches of all layers, allocated for one sequence, and freed."""
    layer = abstract_layer(model)
    caches = [layer.init_cache(1, tokens, jnp.dtype("bfloat16")) for _ in range(model.layers)]
    return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(caches)))
