"""The cache: a row of a token, in pages of vLLM's, and what vLLM says of them at each step.

What a token leaves in a layer's row:

    LRKV   shared value  K | latents of keys  G R_k | of values  G R_v | shared key, rotated  K
    MLA    common latent  C | private latents  G R

and, with QK-norm, the float32 1/rms of each group's key. Latents are padded to the widths that
lrkv_jax caches; one of them is 1 where keys have biases, which are a row of the factor of keys.
Each part begins at a multiple of 16 bytes. All of G groups of heads are a worker's own.

B requests  T tokens  S slots  N pages of a request  G groups of heads  K head width  R rank
C latent width
"""

from dataclasses import dataclass

import torch
from vllm.v1.attention import backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from lrkv_vllm.config import SLOTS


@dataclass(frozen=True)
class Row:
    """The parts of a row by name: where each begins, and its shape, in elements of the cache."""

    parts: dict[str, tuple[int, tuple[int, ...]]]
    width: int

    @classmethod
    def of(cls, parts: dict[str, list[int]], dtype: torch.dtype) -> "Row":
        placed, at, unit = {}, 0, 16 // dtype.itemsize
        for name, shape in parts.items():
            placed[name] = at, tuple(shape)
            at += -(-torch.Size(shape).numel() // unit) * unit
        return cls(placed, at)

    def pack(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Rows [T, width] of parts [T, ...], which may be narrower than a row has them."""
        some = next(iter(parts.values()))
        rows = some.new_zeros(len(some), self.width)
        for name, part in parts.items():
            self.view(rows, name)[..., : part.shape[-1]].copy_(part)
        return rows

    def view(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """A part of rows [..., width]."""
        at, shape = self.parts[name]
        return rows[..., at : at + torch.Size(shape).numel()].unflatten(-1, shape)


@dataclass
class Batch:
    """Requests of a step, each with its tokens [B, T], padded to the longest's.

    `tokens` are their places among the step's, and −1 where there is none. `table` [B, N] are
    pages, `lengths` [B] count the cached tokens, those of the step included, and `longest` is at
    least the greatest of them.
    """

    tokens: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    longest: int


def gather(cache: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Requests' rows [B, S, width] from their pages; zeros past each one's length."""
    pages = -(-batch.longest // cache.shape[1])
    rows = cache[batch.table[:, :pages].long()].flatten(1, 2)[:, : batch.longest]
    there = torch.arange(batch.longest, device=rows.device) < batch.lengths[:, None]
    return rows.masked_fill_(~there[..., None], 0)  # a page may hold anything


class Builder(backend.AttentionMetadataBuilder):
    """Makes a step's metadata: its tokens' slots in the pool, and batches that decode or fill."""

    def __init__(self, spec, names, config, device):
        super().__init__(spec, names, config, device)
        self._init_reorder_batch_threshold(1)  # decoding requests come first

    def build(self, common_prefix_len, common, fast_build=False):
        n = split_decodes_and_prefills(common)[0]
        parts = [(0, n), (n, common.num_reqs)]
        slots = common.slot_mapping[: common.num_actual_tokens].long()
        return slots, [self._batch(common, *part) for part in parts if part[0] < part[1]]

    def _batch(self, common, first, end):
        starts = common.query_start_loc[first : end + 1].long()
        most = int(common.query_start_loc_cpu[first : end + 1].diff().max())
        tokens = torch.arange(most, device=self.device) + starts[:-1, None]
        tokens = tokens.masked_fill(tokens >= starts[1:, None], -1)
        table, lengths = common.block_table_tensor[first:end], common.seq_lens[first:end]
        return Batch(tokens, table, lengths, common.max_seq_len)


class Backend(backend.AttentionBackend):
    supported_dtypes = [torch.float32, torch.bfloat16]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [backend.MultipleOf(SLOTS)]

    @staticmethod
    def get_name():
        return "LRKV"

    @staticmethod
    def get_impl_cls():
        return backend.AttentionImplBase

    @staticmethod
    def get_builder_cls():
        return Builder
