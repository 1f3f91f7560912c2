"""What vLLM tells a layer of each step, in the form that the layers here read.

B requests  T tokens  N pages of a request
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
        n = split_decodes_and_prefills(common)[0]
        table, lengths, longest = common.block_table_tensor, common.seq_lens, common.max_seq_len
        decode = prefill = None
        if n:
            tokens = torch.arange(n, device=self.device)[:, None]
            decode = Batch(tokens, table[:n], lengths[:n], longest)
        if common.num_reqs > n:
            starts = common.query_start_loc[n : common.num_reqs + 1].long()
            counts = common.query_start_loc_cpu[n : common.num_reqs + 1].diff()
            tokens = torch.arange(int(counts.max()), device=self.device) + starts[:-1, None]
            tokens = tokens.masked_fill(tokens >= starts[1:, None], -1)
            prefill = Batch(tokens, table[n:], lengths[n:], longest)
        return Step(common.slot_mapping[: common.num_actual_tokens].long(), decode, prefill)


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
