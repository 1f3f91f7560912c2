"""Attention over whole sequences in a training step, wherever their positions and heads are.

Heads are split over `tensor` (`lrkv_jax.models.layers`). Under context parallelism a device holds
some positions of those heads; it exchanges them for all positions of some heads (DeepSpeed Ulysses,
https://arxiv.org/abs/2309.14509), attends, and exchanges back. Each device then does the same work
under the causal mask. Keys and values of fewer heads than devices are gathered instead.

B batch  T positions here  H query heads  S all positions  G key/value heads  h heads here
W logit width  K head width
"""

from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lrkv_jax.distributed import manual_sharding
from lrkv_jax.distributed.rules import CONTEXT, TENSOR
from lrkv_jax.kernels.flash import causal_attention


def attend_sequences(q_BTHW, k_BTGW, v_BTGK, *, key_heads, segments_BT=None, **how):
    """`causal_attention` of sequences whose positions the training step's mesh may have split.

    `key_heads` counts the model's key/value heads; `how` is passed on.
    """
    if not manual_sharding.in_train_step():
        return causal_attention(q_BTHW, k_BTGW, v_BTGK, segments_BT=segments_BT, **how)
    k_BSgW, v_BSgK = (_serving(x, q_BTHW.shape[2], key_heads) for x in (k_BTGW, v_BTGK))
    out_BShK = causal_attention(
        checkpoint_name(_to_heads(q_BTHW), "query"),
        checkpoint_name(k_BSgW, "key"),
        checkpoint_name(v_BSgK, "value"),
        segments_BT=None if segments_BT is None else _all_positions(segments_BT),
        **how,
    )
    return _to_positions(out_BShK)


def _serving(x_BTGK, H, key_heads):
    """The key or value heads that serve this device's share of its tensor shard's H query heads.

    Where `tensor` does not divide the model's key/value heads, each shard holds them all.
    """
    tensor, context = manual_sharding.size(TENSOR), manual_sharding.size(CONTEXT)
    G = x_BTGK.shape[2]
    share = H * tensor // key_heads  # query heads that one key head serves
    h = H // context
    here = max(1, h // share)
    split = key_heads % tensor == 0
    if split and here * context == G:
        return _to_heads(x_BTGK)
    x_BSGK = _all_positions(x_BTGK)
    if here == G:
        return x_BSGK
    first = manual_sharding.index(CONTEXT) * h + (0 if split else manual_sharding.index(TENSOR) * H)
    if h % share == 0 or share % h == 0:
        return lax.dynamic_slice_in_dim(x_BSGK, first // share, here, axis=2)
    # Query heads here share key heads unevenly: each takes a copy of its key head.
    return x_BSGK[:, :, (first + lax.iota("int32", h)) // share]


def _to_heads(x_BTHK):
    """All positions of this device's share of the heads."""
    if manual_sharding.size(CONTEXT) == 1:
        return x_BTHK
    return lax.all_to_all(x_BTHK, CONTEXT, 2, 1, tiled=True)


def _to_positions(x_BShK):
    if manual_sharding.size(CONTEXT) == 1:
        return x_BShK
    return lax.all_to_all(x_BShK, CONTEXT, 1, 2, tiled=True)


def _all_positions(x_BT):
    if manual_sharding.size(CONTEXT) == 1:
        return x_BT
    return lax.all_gather(x_BT, CONTEXT, axis=1, tiled=True)
