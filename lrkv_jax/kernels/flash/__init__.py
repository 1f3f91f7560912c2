"""Causal attention of whole sequences over themselves, for training and prefill.

Three implementations behind one function:

| name          | what it is                                     | memory beyond input, output |
|---------------|------------------------------------------------|-----------------------------|
| `dot_product` | plain XLA, strips of queries over their prefix | B·H·T²/2 weights            |
| `chunked`     | plain XLA, a loop over tiles, custom backward  | O(B·H·T)                    |
| `cudnn`       | cuDNN's flash attention, on an NVIDIA GPU      | O(B·H·T)                    |

`auto` takes cuDNN wherever it supports the arrays (`lrkv_jax.kernels.flash.cudnn` has its limits);
elsewhere `dot_product` below `dot_product_below()` positions and `chunked` from there on. The
choice and its reason are logged once, as a warning where a GPU goes without cuDNN. The other names
force one; `cudnn` raises where it cannot run.

All three respect documents: tokens of different segments never see each other.

B batch  T positions  H heads  G key/value heads  W logit width  K head width
"""

import jax
from jaxtyping import Array, Float, Int

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch
from lrkv_jax.kernels.flash import chunked, cudnn, dot_product

_RUN = {
    "dot_product": dot_product.causal_attention,
    "chunked": chunked.causal_attention,
    "cudnn": cudnn.causal_attention,
}
IMPLEMENTATIONS = ("auto", *_RUN)


def dot_product_below() -> int:
    """From so many positions on, `chunked`.

    On two CPU cores a step of the quickstart's model is 1.12 times as fast with strips at 512
    positions, and 1.36 at 1,024; there it takes half as much memory again.
    """
    return 2048 if jax.default_backend() == "cpu" else 512


def causal_attention(
    q_BTHW: Float[Array, "B T H W"],
    k_BTGW: Float[Array, "B T G W"],
    v_BTGK: Float[Array, "B T G K"],
    *,
    scale: float,
    segments_BT: Int[Array, "B T"] | None = None,
    window: int | None = None,
    impl: str = "auto",
) -> Float[Array, "B T H K"]:
    """softmax(scale · q kᵀ) v over positions s ≤ t (and of the same segment, if given).

    With a `window` W a query sees W positions, itself among them: t − W < s ≤ t (arXiv 2004.05150).
    H query heads share G key/value heads in order (GQA, arXiv 2305.13245): head h reads group
    h // (H / G). Logits and softmax are float32; the output has v's dtype. `impl` is one of
    `IMPLEMENTATIONS`; raises `LrkvError` for another, for `cudnn` where it cannot run, and for a
    window below 1.
    """
    if window is not None and window < 1:
        raise LrkvError(f"a window of {window} positions: use 1 or more, or None")
    run = _RUN[choose(q_BTHW, k_BTGW, v_BTGK, segments_BT, impl)]
    return run(q_BTHW, k_BTGW, v_BTGK, scale=scale, segments_BT=segments_BT, window=window)


def choose(q_BTHW, k_BTGW, v_BTGK, segments_BT=None, impl="auto"):
    """The name of the implementation that runs, by shapes and dtypes."""
    if impl not in IMPLEMENTATIONS:
        raise LrkvError(f"train kernel {impl!r} is unknown: use {', '.join(IMPLEMENTATIONS)}")
    name = "causal_attention"
    if impl in ("dot_product", "chunked"):
        return dispatch.settle(name, impl, "asked for")
    unsupported_reason = cudnn.unsupported_reason(q_BTHW, k_BTGW, v_BTGK, segments_BT)
    if impl == "cudnn":
        if unsupported_reason:
            raise LrkvError(f"{name} cannot run as cudnn: {unsupported_reason}; use auto")
        return dispatch.settle(name, impl, "asked for")
    without = "dot_product" if q_BTHW.shape[1] < dot_product_below() else "chunked"
    chosen = without if unsupported_reason else "cudnn"
    reason = unsupported_reason or "a GPU with cuDNN is available"
    return dispatch.settle(name, chosen, reason, best="cudnn")
