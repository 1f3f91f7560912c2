"""Figure 1's counterpart: what a token leaves in each line's cache, and how a query meets it.

The boxes are the arrays that one layer allocates at the 128M shape, in proportion to their bytes in
bfloat16; inverse norms are float32.
"""

import jax
import jax.numpy as jnp
from matplotlib.patches import Patch, Rectangle

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, panels
from lrkv_jax.attention import make_attention
from lrkv_jax.config import LRKV, MLA, load_config

SCALE = "128m"
OF_ALL, OF_SOME, NORM = "#0072B2", "#D55E00", "#777777"
NAMES = {
    "k": r"$k_h$", "v": r"$v_h$", "latent": r"$c$", "rope_key": r"$k'$",
    "k_shared": r"$k$", "v_shared": r"$v$", "rk": r"$r^k_h$", "rv": r"$r^v_h$",
    "private": r"$r_h$",
}  # fmt: skip
# What tied lines cache serves keys and values.
TIED = {"k_shared": r"$c$", "rk": r"$r_h$"}
# The logit at position s of a query q at m, before 1/√W, and the value; P(s) is RoPE's rotation.
GROUPED = r"$q^{m}\cdot P(s)\,k_h$", r"$v_h$"
FORMS = {
    ("mha", ""): GROUPED,
    ("gqa", ""): (r"$q^{m}\cdot P(s)\,k_{g(h)}$", r"$v_{g(h)}$"),
    ("mqa", ""): (r"$q^{m}\cdot P(s)\,k$", r"$v$"),
    ("mla", ""): (r"$(q A_h^T)\cdot c + q'^{m}\cdot P(s)\,k'$", r"$c\,A'_h$"),
    ("mla", "rope full"): (r"$n_h\, q^{m}\cdot P(s)(c\,A_h)$", r"$c\,A'_h$"),
    ("mla", "rope latent"): (r"$(q A_h^T)^{m}\cdot P_C(s)\,c$", r"$c\,A'_h$"),
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
    ("lrkv", "rope latent, in 3 groups"): (
        r"$n_g\,(q^{m}\cdot P(s)\,k + (q B_g)^{m}\cdot P_R(s)\,r^k_g)$", r"$v + r^v_g B_g'^T$",
    ),
    ("lrkv", "tied"): (r"$n_h\, q^{m}\cdot P(s)(c + r_h B_h^T)$", r"$c + r_h B_h'^T$"),
    ("lrkv", "rope latent, tied"): (
        r"$n_h\,(q^{m}\cdot P(s)\,c + (q B_h)^{m}\cdot P_R(s)\,r_h)$", r"$c + r_h B_h'^T$",
    ),
}  # fmt: skip


LOGIT, VALUE = 120, 210  # where formulas begin, right of the bars' 100 %


@artefact(
    "Figure 1", "The family: what is cached, and how a query meets it", reads="configurations"
)
def fig01_family(runs):
    lines = _lines()
    figure, [[axis]] = panels(panel=(8.2, 0.42 * len(lines) + 0.6))
    whole = None
    for place, (model, entry) in enumerate(lines):
        arrays = _arrays(model, entry)
        total = sum(size for *_, size in arrays)
        whole = whole or total  # MHA's, the first
        left = 0.0
        for name, colour, size in arrays:
            width = 100 * size / whole
            edge = 0.8 if width > 2.5 else 0  # a white edge would hide the norms
            bar = (left, place - 0.36), width, 0.72
            axis.add_patch(Rectangle(*bar, fc=colour, ec="white", lw=edge))
            if width > 2.5:
                axis.text(
                    left + width / 2, place, name, ha="center", va="center", color="white",
                    fontsize=9 if width > 5 else 7,
                )  # fmt: skip
            left += width
        axis.text(left + 1, place, f"{100 * total / whole:.0f} %", va="center", fontsize=8)
        logit, value = FORMS[entry.name, entry.form]
        axis.text(LOGIT, place, logit, va="center")
        axis.text(VALUE, place, value, va="center")
    axis.text(LOGIT, -0.8, "logit", fontweight="bold")
    axis.text(VALUE, -0.8, "value", fontweight="bold")
    axis.set_xlim(0, 252)
    axis.set_ylim(len(lines) - 0.4, -1.2)
    axis.set_xticks([0, 25, 50, 75, 100])
    axis.set_xlabel("bytes per cached token, % of MHA's", loc="left")
    axis.set_yticks(range(len(lines)), [entry.label for _, entry in lines])
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
        "What a token leaves in each line's cache, and how a query meets it", figure,
        "Arrays of one layer at the 128M shape, padding included. A query rotated at its own "
        "position m is written so, P(s) is RoPE's rotation at the key's, and P_R and P_C are the "
        "same in R and C dimensions. Where n stands, QK-norm divides by the whole key; MHA's, "
        "GQA's and MQA's keys are cached normed. Each line decodes from this cache what it was "
        "trained to be, exactly.",
    )  # fmt: skip


def _lines():
    """(model, entry) of each line, at the scale's own sizes."""
    found = []
    of = {name: load_config(SCALE, [f"attention={name}"]).model for name in ("mha", "gqa", "mqa")}
    mla, lrkv = (load_config(SCALE, [f"attention={name}"]).model for name in ("mla", "lrkv"))
    C, R, groups = mla.attention.latent, lrkv.attention.rank, of["gqa"].attention.kv_heads
    entries = [
        *(model.attention for model in of.values()),
        mla.attention,
        *(MLA(latent=C, rope=rope) for rope in ("full", "latent")),
        MLA(latent=C, rope="full", rank=R),
        *(LRKV(rank=R, rope=rope) for rope in LRKV.modes()),
        LRKV(rank=R, rope="latent", kv_heads=groups),
        *(LRKV(rank=R, rope=rope, tied=True) for rope in ("full", "latent")),
    ]
    for entry in entries:
        found.append((of["mha"].model_copy(update={"attention": entry}), entry))
    return found


def _arrays(model, entry):
    """(name, colour, bytes) of each array of a layer's cache of one token."""
    layer = jax.eval_shape(lambda: make_attention(model))
    shapes = layer.cache_shapes(1, 1, jnp.bfloat16)
    names = NAMES | TIED if getattr(entry, "tied", False) else NAMES
    found = []
    for field, array in vars(shapes).items():
        if array is None or not array.size:
            continue
        name, _, letters = field.rpartition("_")
        if array.dtype == jnp.float32:
            found.append(("", NORM, array.size * 4))
        else:
            heads = array.shape[2] if {"G", "H"} & set(letters) else 1
            of = {1: "", model.heads: "_h"}.get(heads, "_g")
            colour = OF_SOME if heads > 1 else OF_ALL
            found.append((names[name].replace("_h", of), colour, array.size * 2))
    return found
