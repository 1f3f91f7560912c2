"""Table 4: how each variant makes keys and values, and the ranks that follow, measured.

The ranks are of the variants' own layers at random weights, at a width that limits none of them.
"""

import numpy as np
from flax import nnx

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.config import GQA, LRKV, MHA, MLA, MQA, ModelConfig
from lrkv_jax.model import Block

D, H, K, G, C, R = 96, 4, 8, 2, 12, 3
ENTRIES = {
    "mha": MHA(), "gqa": GQA(kv_heads=G), "mqa": MQA(), "mla": MLA(latent=C, rope_width=0),
    "lrkv": LRKV(rank=R, rope="full"),
}  # fmt: skip
# kind: (W_h, axis that is compressed, ranks of W_h, of all W_h, of keys and values, of W_i − W_j)
STATED = {
    "mha": ("independent", "none", ("K", K), ("H·K", H * K), ("2·H·K", 2 * H * K), ("K", K)),
    "gqa": ("W_g(h)", "heads", ("K", K), ("G·K", G * K), ("2·G·K", 2 * G * K), ("in a group", 0)),
    "mqa": ("W_shared", "heads", ("K", K), ("K", K), ("2·K", 2 * K), ("none", 0)),
    "mla": ("W_down W_up,h", "features", ("min(K, C)", min(K, C)), ("C", C), ("C", C), ("K", K)),
    "lrkv": ("W_shared + U_h B_hᵀ", "heads", ("K", K), ("K + H·R", K + H * R),
             ("2·(K + H·R)", 2 * (K + H * R)), ("min(K, 2·R)", min(K, 2 * R))),
}  # fmt: skip
COLUMNS = [Column("variant"), Column("W_h of keys"), Column("compresses")] + [
    Column(f"rank of {what}") for what in ("W_h", "all W_h", "all keys and values", "W_1 − W_2")
]
MLA_NOTE = (
    "The paper's table: rank ≤ C, across tokens. At its sizes C ≥ K, so no head is bounded; the "
    "heads together are, and it is features that are compressed, of each token alone."
)


@artefact("Table 4", "Attention mechanisms", reads="configurations")
def table04_mechanisms(runs):
    rows = []
    for kind, (form, axis, *stated) in STATED.items():
        cells = [
            f"{symbol}: {found}" if found == rank else f"{symbol}: {rank} stated, {found} found"
            for (symbol, rank), found in zip(stated, _ranks(kind), strict=True)
        ]
        note = MLA_NOTE if kind == "mla" else ""
        rows.append(Row.of(name_of(kind), form, Cell(axis, note=note), *cells))
    sizes = f"D = {D}, H = {H}, K = {K}, G = {G}, C = {C}, R = {R}"
    note = (
        f"Measured on random weights of the layers themselves, {sizes}. Keys and values of all "
        "heads together span what a token must leave in the cache."
    )
    return Table("Mechanisms", COLUMNS, rows, notes=[note])


def _ranks(kind):
    """Ranks of one head's key weights, all heads' keys, all keys and values, and a difference."""
    keys, values = _head_weights(kind, "key"), _head_weights(kind, "value")
    together = [np.concatenate(list(some), axis=1) for some in (keys, [*keys, *values])]
    return [np.linalg.matrix_rank(w) for w in (keys[0], *together, keys[0] - keys[1])]


def _head_weights(kind, what):
    """W_h of each head, float64 [H, D, K], of the variant's own parameters, drawn anew."""
    model = ModelConfig(
        layers=1, width=D, heads=H, head_width=K, vocabulary=8, attention=ENTRIES[kind]
    )
    layer = nnx.eval_shape(lambda: Block(model)).attention  # shapes alone

    def of(name):
        seed = [*name.encode()]  # a part that keys and values share is one part
        return np.random.default_rng(seed).standard_normal(getattr(layer, name).shape)

    if kind == "mla":
        return np.einsum("DC,CHK->HDK", of("down"), of(f"up_{what}"))
    if kind == "lrkv":
        return of(what) + of(f"{what}_down") @ of(f"{what}_up")
    return np.repeat(of(what).transpose(1, 0, 2), H // of(what).shape[1], axis=0)
