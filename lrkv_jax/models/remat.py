"""Rematerialization: what a backward pass keeps from its forward pass, and what it recomputes.

| policy  | kept a layer, a token                                  | computed again               |
|---------|--------------------------------------------------------|------------------------------|
| none    | everything the gradient reads                          | nothing                      |
| minimal | the layer's input, `NAMED`                             | norms, rotation, activation, |
|         |                                                        | value and output products    |
| full    | the layer's input                                      | the whole layer              |
| offload | the layer's input; `NAMED` in the host's memory        | as minimal                   |

In every policy weights are gathered again (`lrkv_jax.distributed.manual_sharding.fsdp_layer`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import checkpoint_policies as policies
from jax.extend.core.primitives import name_p

Remat = Literal["none", "minimal", "full", "offload"]

# Given by `checkpoint_name` where they are computed: inputs and results of attention (with its
# log-sum-exp), and the feed-forward layer's first products.
NAMED = ("query", "key", "value", "attended", "logsumexp", "mlp")
# cuDNN's forward pass has no place for names; its results are the last two of attention's.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"


def rematerialized(f: Callable, remat: Remat, *, unrolled: bool) -> Callable:
    """`f`, one layer of a scan, whose gradient keeps what `remat` names."""
    if remat == "none":
        return f
    policy = {
        "minimal": policies.save_only_these_names(*NAMED),
        "full": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(NAMED),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]

    def with_cudnn(primitive: Any, *avals: Any, **params: Any) -> Any:
        """`policy`, for which cuDNN's attention is what is named `attended` elsewhere."""
        if primitive.name == CUDNN_FORWARD:
            return policy(name_p, *avals, name="attended")
        return policy(primitive, *avals, **params)

    # A scan's loops separate forward from backward; unrolled, the compiler would find the first
    # computation again and keep it.
    return jax.checkpoint(f, policy=with_cudnn, prevent_cse=unrolled)
