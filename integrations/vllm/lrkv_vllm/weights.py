"""Parameters as the export has them, each worker with its part."""

import torch
from torch import nn
from vllm import distributed


def weight(*shape: int, axis: int | None = None) -> nn.Parameter:
    """A parameter of this shape, split over the workers along `axis`."""
    own = list(shape)
    if axis is not None:
        own[axis] = -(-own[axis] // distributed.get_tensor_model_parallel_world_size())
    made = nn.Parameter(torch.zeros(own), requires_grad=False)
    made.whole, made.axis = shape, axis
    return made


def load(name: str, parameter: nn.Parameter, found: torch.Tensor) -> None:
    """Copy this worker's part of a tensor of the export; zeros where its last part is short."""
    if tuple(found.shape) != parameter.whole:
        raise ValueError(
            f"{name} is {list(found.shape)} in the weights and {list(parameter.whole)} by "
            "config.json: export the run again"
        )
    there = parameter.data
    if parameter.axis is not None:
        axis, size = parameter.axis, there.shape[parameter.axis]
        start = min(distributed.get_tensor_model_parallel_rank() * size, found.shape[axis])
        found = found.narrow(axis, start, min(size, found.shape[axis] - start))
        there = there.narrow(axis, 0, found.shape[axis])
    there.copy_(found)


def padded(width: int) -> int:
    """The columns that latents of this width have in lrkv_jax's cache."""
    multiple = 8 if width <= 64 else 64
    return -(-width // multiple) * multiple
