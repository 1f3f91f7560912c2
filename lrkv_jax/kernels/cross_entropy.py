"""Cross-entropy of soft-capped logits that never holds all of them.

B batch  T positions  D width  V vocabulary  N chunks  t positions a chunk
"""

import jax
import jax.numpy as jnp


def chunked_cross_entropy(x_BTD, kernel_DV, targets_BT, *, softcap, chunk):
    """−log p(target) in nats, float32 [B, T], for logits softcap · tanh(x · kernel / softcap).

    Logits exist for about `chunk` tokens at a time and are made again in the backward pass. The
    chunks cut T and leave the batch axis whole, so a sharded batch stays where it is.
    """
    B, T, D = x_BTD.shape
    N = next(n for n in range(min(T, max(1, B * T // chunk)), T + 1) if T % n == 0)
    kernel_DV = kernel_DV.astype(x_BTD.dtype)

    @jax.checkpoint
    def some(x_BtD, targets_Bt):
        logits_BtV = jnp.matmul(x_BtD, kernel_DV, preferred_element_type=jnp.float32)
        if softcap is not None:
            logits_BtV = softcap * jnp.tanh(logits_BtV / softcap)
        target_Bt = jnp.take_along_axis(logits_BtV, targets_Bt[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits_BtV, axis=-1) - target_Bt

    if N == 1:
        return some(x_BTD, targets_BT)
    x_NBtD = x_BTD.reshape(B, N, T // N, D).swapaxes(0, 1)
    targets_NBt = targets_BT.reshape(B, N, T // N).swapaxes(0, 1)
    nll_NBt = jax.lax.map(lambda xs: some(*xs), (x_NBtD, targets_NBt))
    return nll_NBt.swapaxes(0, 1).reshape(B, T)
