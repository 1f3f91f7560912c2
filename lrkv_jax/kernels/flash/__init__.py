"""Causal attention of whole sequences over themselves, for training and prefill.

Two implementations behind one function, whose memory beyond input and output is O(B·H·T):

| name      | what it is                                    |
|-----------|-----------------------------------------------|
| `chunked` | plain XLA, a loop over tiles, custom backward |
| `cudnn`   | cuDNN's flash attention, on an NVIDIA GPU     |

`auto` takes cuDNN wherever it supports the arrays (`lrkv_jax.kernels.flash.cudnn` has its limits),
elsewhere `chunked`. The choice and its reason are logged once, as a warning where a GPU goes
without cuDNN. The other names force one; `cudnn` raises where it cannot run.

Both respect documents: tokens of different segments never see each other.

B batch  T positions  H heads  G key/value heads  W logit width  K head width
"""

from jaxtyping import Array, Float, Int

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch
from lrkv_jax.kernels.flash import chunked, cudnn

_RUN = {"chunked": chunked.causal_attention, "cudnn": cudnn.causal_attention}
IMPLEMENTATIONS = ("auto", *_RUN)


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
    if impl == "chunked":
        return dispatch.settle(name, impl, "asked for")
    unsupported_reason = cudnn.unsupported_reason(q_BTHW, k_BTGW, v_BTGK, segments_BT)
    if impl == "cudnn":
        if unsupported_reason:
            raise LrkvError(f"{name} cannot run as cudnn: {unsupported_reason}; use auto")
        return dispatch.settle(name, impl, "asked for")
    chosen = "chunked" if unsupported_reason else "cudnn"
    reason = unsupported_reason or "a GPU with cuDNN is available"
    return dispatch.settle(name, chosen, reason, best="cudnn")
