"""Causal attention by cuDNN on NVIDIA GPUs: its limits, and how arrays are padded to meet them.

The limits are those of `jax.nn.dot_product_attention` and of cuDNN's frontend, from its support
matrix and its checks (https://github.com/NVIDIA/cudnn-frontend: docs/operations/Attention.md,
include/cudnn_frontend/node/sdpa_support_surface.h; backend 9.18). Both directions have to run:

- bfloat16 or float16, compute capability 8.0 or later, widths that are multiples of 8;
- keys and values of one width, up to 128, or up to 256 on a Hopper;
- keys 192 and values 128 wide on a Hopper or a B200 (MLA's; LRKV's K + R in its modes `shared` and
  `latent` is padded up to it). JAX's public function requires equal widths, so that this one pair
  goes through the function beneath it;
- documents as an additive mask [B, 1, T, T] in the inputs' dtype, for widths up to 128 and an
  even T: 2·B·T² bytes per layer, and no block is skipped. JAX's other way, packed segments,
  needs a fixed limit to their number, and more would be seen wrongly; it is not used;
- windows by cuDNN's sliding window, which skips blocks; with documents they are in the mask.

Narrower keys or values are padded with zeros, which add nothing to a logit; the padded columns of
the output are dropped. The backward pass is deterministic under `--xla_gpu_deterministic_ops=true`:
XLA then chooses cuDNN's deterministic algorithm.

B batch  T positions  H heads  G key/value heads  W logit width  K head width
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

try:  # no public name: without it, unequal widths are padded to equal ones
    from jax._src.cudnn import fused_attention_stablehlo as _beneath
except ImportError:
    _beneath = None

DTYPES = ("bfloat16", "float16")
MLA_WIDTHS = (192, 128)
OLDEST = 91100  # cuDNN 9.11: the first to train MLA's widths


class Gpu(NamedTuple):
    """A CUDA GPU's compute capability, and the version of its cuDNN (9.15.0 is 91500)."""

    capability: tuple[int, int]
    cudnn: int


def causal_attention(q_BTHW, k_BTGW, v_BTGK, *, scale, segments_BT=None, window=None):
    """`lrkv_jax.kernels.flash.causal_attention`, where `unsupported_reason` is None."""
    key_width, width = k_BTGW.shape[-1], v_BTGK.shape[-1]
    padded = widths(key_width, width, gpu(), documents=segments_BT is not None)
    q_BTHW, k_BTGW = _widened(q_BTHW, padded[0]), _widened(k_BTGW, padded[0])
    v_BTGK = _widened(v_BTGK, padded[1])
    if padded == MLA_WIDTHS:
        out_BTHK = _beneath.dot_product_attention(
            q_BTHW, k_BTGW, v_BTGK, scale=scale, mask_type=_beneath.MaskType.CAUSAL,
            sliding_window_length=window,
        )  # fmt: skip
    else:
        seen_B1TT = None
        if segments_BT is not None:
            seen_B1TT = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
            if window is not None:
                place_T = jnp.arange(segments_BT.shape[1])
                seen_B1TT &= place_T[:, None] - place_T < window
                window = None
        out_BTHK = jax.nn.dot_product_attention(
            q_BTHW, k_BTGW, v_BTGK, mask=seen_B1TT, scale=scale, is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )  # fmt: skip
    return out_BTHK[..., :width]


def unsupported_reason(q_BTHW, k_BTGW, v_BTGK, segments_BT=None) -> str | None:
    """The reason why cuDNN cannot take these arrays on this machine, or None."""
    here = gpu()
    if isinstance(here, str):
        return here
    if here.capability < (8, 0):
        return f"the GPU's compute capability is {_dotted(here)}, and cuDNN asks for 8.0"
    if here.cudnn < OLDEST:
        return f"cuDNN's version is {here.cudnn}, and attention is used from {OLDEST} on"
    dtypes = {x.dtype.name for x in (q_BTHW, k_BTGW, v_BTGK)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return (
            f"the arrays are {' and '.join(sorted(dtypes))}, and cuDNN takes {' or '.join(DTYPES)}"
        )
    T, key_width, width = q_BTHW.shape[1], k_BTGW.shape[-1], v_BTGK.shape[-1]
    if T == 1:
        return "the sequences are of one position, which cuDNN does not train"
    if segments_BT is not None and T % 2:
        return f"documents in sequences of {T} positions: cuDNN takes a mask of an even number"
    if widths(key_width, width, here, documents=segments_BT is not None) is None:
        documents = " and documents" if segments_BT is not None else ""
        return (
            f"keys are {key_width} wide and values {width}: with compute capability "
            f"{_dotted(here)}{documents} cuDNN does not take them"
        )
    return None


def widths(key: int, value: int, here: Gpu, *, documents: bool) -> tuple[int, int] | None:
    """The key and value width that cuDNN is called with, or None if it supports none."""
    equal, major = -(-max(key, value) // 8) * 8, here.capability[0]
    if equal <= 128:
        return equal, equal
    if documents:
        return None
    if major in (9, 10) and _beneath and key <= MLA_WIDTHS[0] and value <= MLA_WIDTHS[1]:
        return MLA_WIDTHS
    return (equal, equal) if major == 9 and equal <= 256 else None


@functools.cache
def gpu() -> Gpu | str:
    """The GPU of this process, or the reason why cuDNN cannot use it."""
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not a GPU"
    device = jax.devices()[0]
    if "cuda" not in device.client.platform_version:
        return f"the GPU is a {device.device_kind}, not one of NVIDIA's"
    major, minor = map(int, device.compute_capability.split("."))
    try:
        version = _beneath.check_cudnn_version() if _beneath else OLDEST
    except RuntimeError as error:
        return f"cuDNN does not load ({error})"
    return Gpu((major, minor), version)


def _dotted(here):
    return ".".join(map(str, here.capability))


def _widened(x_BTHW, width):
    return jnp.pad(x_BTHW, ((0, 0), (0, 0), (0, 0), (0, width - x_BTHW.shape[-1])))
