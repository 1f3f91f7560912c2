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
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from lrkv_vllm.config import SLOTS


@dataclass(frozen=True)
class Row:
    """The parts of a row by name: where each begins, and its shape, in elements of the cache."""

    parts: dict[str, tuple[int, tuple[int, ...]]]
    norms: int  # groups whose key's norm is in the row, or 0
    width: int

    @classmethod
    def of(cls, parts: dict[str, list[int]], norms: int, dtype: torch.dtype) -> "Row":
        placed, at, unit = {}, 0, 16 // dtype.itemsize
        for name, shape in (parts | {"norms": [norms * 4 // dtype.itemsize]}).items():
            placed[name] = at, tuple(shape)
            at += -(-torch.Size(shape).numel() // unit) * unit
        return cls(placed, norms, at)

    def pack(self, parts: dict[str, torch.Tensor], norms: torch.Tensor | None) -> torch.Tensor:
        """Rows [T, width] of parts [T, ...] and norms [T, G]."""
        some = next(iter(parts.values()))
        rows = some.new_zeros(len(some), self.width)
        for name, part in parts.items():
            self.read(rows, name)[..., : part.shape[-1]].copy_(part)
        if norms is not None:
            self.read(rows, "norms").copy_(norms.float().contiguous().view(rows.dtype))
        return rows

    def read(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """A part of rows [..., width], as a view."""
        at, shape = self.parts[name]
        size = torch.Size(shape).numel()
        return rows[..., at : at + size].unflatten(-1, shape)

    def read_norms(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The float32 norms [..., G] of rows."""
        if not self.norms:
            return None
        return self.read(rows, "norms").contiguous().view(torch.float32)


def write(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Put rows [T, width] into the pages [pages, slots, width] at the slots that vLLM names."""
    per_page = cache.shape[1]
    cache[slots // per_page, slots % per_page] = rows


def gather(
    cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, longest: int
) -> torch.Tensor:
    """Requests' rows [B, S, width] from their pages [B, N]; zeros past each one's length."""
    per_page = cache.shape[1]
    pages = -(-longest // per_page)
    rows = cache[table[:, :pages].long()].flatten(1, 2)[:, :longest]
    there = torch.arange(longest, device=rows.device) < lengths[:, None]
    return rows.masked_fill(~there[..., None], 0)  # a page may hold anything


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


@dataclass
class Step:
    """The slot of the pool that each token is written to; requests that decode, and prompts."""

    slots: torch.Tensor
    decode: Batch | None
    prefill: Batch | None


class Builder(AttentionMetadataBuilder):
    def __init__(self, spec, names, config, device):
        super().__init__(spec, names, config, device)
        self._init_reorder_batch_threshold(1)  # decoding requests come first

    def build(self, common_prefix_len, common, fast_build=False):
        n, whole = split_decodes_and_prefills(common)[0], common.num_reqs
        slots = common.slot_mapping[: common.num_actual_tokens].long()
        parts = ((0, n), (n, whole))
        return Step(slots, *(self._batch(common, *part) for part in parts))

    def _batch(self, common, first, end):
        if first == end:
            return None
        starts = common.query_start_loc[first : end + 1].long()
        most = int(common.query_start_loc_cpu[first : end + 1].diff().max())
        tokens = torch.arange(most, device=self.device) + starts[:-1, None]
        tokens = tokens.masked_fill(tokens >= starts[1:, None], -1)
        table, lengths = common.block_table_tensor[first:end], common.seq_lens[first:end]
        return Batch(tokens, table, lengths, common.max_seq_len)


class Backend(AttentionBackend):
    supported_dtypes = [torch.float32, torch.bfloat16]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(SLOTS)]

    @staticmethod
    def get_name():
        return "LRKV"

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder


class Impl(AttentionImplBase):
    """vLLM asks each layer for one; ours attend by themselves."""
