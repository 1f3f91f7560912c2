"""From rows of a batch on this host to one array over the mesh's devices.

B rows of the whole batch  b rows of this process  U tokens of a row
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from lrkv_jax.errors import LrkvError


def local_rows(rows: NamedSharding, batch: int) -> range:
    """The rows of a batch of `batch` that this process's devices hold under the sharding `rows`.

    Processes that share a sequence (a `tensor` or `context` axis across hosts) have the same rows.

    Raises `LrkvError` where they are not one run of rows, so that a host would read scattered ones.
    """
    ours: set[int] = set()
    for index in rows.addressable_devices_indices_map((batch,)).values():
        ours.update(range(*index[0].indices(batch)))
    first, last = min(ours), max(ours)
    if len(ours) != last - first + 1:
        raise LrkvError(
            f"the mesh gives process {jax.process_index()} {len(ours)} scattered rows of the batch "
            f"from {first} to {last}: order the devices by process"
        )
    return range(first, last + 1)


def as_argument(
    rows: NamedSharding, batch: int, tokens_bU: np.ndarray
) -> Int[Array, "B U"] | Int[np.ndarray, "B U"]:
    """The whole batch as a compiled program takes it, from this process's `local_rows` of it."""
    if rows.is_fully_addressable:
        # One process has all of it, and the program's call places it in a tenth of the time that
        # `jax.device_put` takes before the call.
        return tokens_bU
    shape = batch, tokens_bU.shape[1]
    return jax.make_array_from_process_local_data(rows, tokens_bU, shape)


def global_batch(rows: NamedSharding, tokens_BU: np.ndarray) -> Int[Array, "B U"]:
    """The same for a batch that every process has read whole; each gives its devices their part."""
    return jax.make_array_from_callback(tokens_BU.shape, rows, lambda index: tokens_BU[index])
