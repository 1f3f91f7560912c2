"""Attention that owns its cache in vLLM's pages, for every mode that has a factored cache.

A head's logit of a position s is scale · n(s) times

    full             q · (k(s) + rope_s(c(s) A + r(s) B))     k shared key, rotated  r latents
    shared, latent   q · k(s) + q' · r(s)                     c MLA's common latent, without k

where q' is the query in the latents' space and n is 1/rms of the head's key, or 1. Its value is
v(s) + r(s) B with a shared value v, or c(s) A + r(s) B. `lrkv_jax.models.attention` has the rest.

B requests  T tokens  S slots  D model width  H heads  G groups of them  E = H / G  K head width
R rank  C latent width, 0 for LRKV  J = K / 2 frequency pairs. Heads and groups are this worker's.
"""

from functools import lru_cache

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionImplBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

from lrkv_vllm.cache import Backend, Batch, Row, gather
from lrkv_vllm.weights import padded, weight

# Parameters that steps use as they are.
KEPT = ("output", "query_gain", "key_gain", "query_bias", "output_bias")
LOGITS = 2**26  # of one product, so that a long prompt's take 256 MiB at most


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@lru_cache(2)  # all layers have one table for keys and one for latents
def angles(frequencies: tuple[float, ...], length: int) -> torch.Tensor:
    """[cos, sin] of each position's angles, [length, 2J], rounded to float32 once.

    vLLM makes a model under its dtype, in which a bare `torch.tensor` would round frequencies.
    """
    of_pairs = torch.tensor(frequencies, dtype=torch.float64)
    turns = torch.outer(torch.arange(length, dtype=torch.float64), of_pairs)
    return torch.cat([turns.cos(), turns.sin()], -1).float()


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the J pairs of the last axis; coordinates past them stay."""
    J = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[..., :J], cos_sin[..., J:]
    a, b, rest = x.float()[..., :J], x.float()[..., J : 2 * J], x.float()[..., 2 * J :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class FactoredAttention(nn.Module, AttentionLayerBase):
    """One layer: projections, cache and attention of this worker's heads."""

    def __init__(self, config, vllm_config, prefix: str):
        super().__init__()
        self.config, self.layer_name = config, prefix
        self.kv_cache, self.impl = torch.tensor([]), AttentionImplBase()
        D, H, K = config.hidden_size, config.num_attention_heads, config.head_dim
        G, bias = config.num_key_value_heads, config.qkv_bias
        self.mla, self.full = config.attention_kind == "mla", config.rope_mode == "full"
        self.query, self.output = weight(D, H, K, axis=1), weight(H, K, D, axis=0)
        self.heads = self.query.shape[1]
        self.groups = own = G * self.heads // H
        # What a token's parts are before they are padded, in the order of `inputs`.
        if self.mla:
            C, R = config.rank_latent, config.rank_private
            self.down, self.private_down = weight(D, C), weight(G, D, R, axis=0)
            self.up_key, self.up_value = (weight(C, G, K, axis=1) for _ in range(2))
            self.private_key, self.private_value = (weight(G, R, K, axis=0) for _ in range(2))
            self.made = {"common": (C,), "latents": (own, R)}
        else:
            R_k, R_v = config.rank_key, config.rank_value
            self.key, self.value = weight(D, K), weight(D, K)
            self.key_down, self.value_down = (weight(G, D, R, axis=0) for R in (R_k, R_v))
            self.key_up, self.value_up = (weight(G, R, K, axis=0) for R in (R_k, R_v))
            self.made = {
                "common": (K,), "latents": (own, R_k), "value_latents": (own, R_v), "key": (K,),
            }  # fmt: skip
        if config.qk_gain:
            self.query_gain, self.key_gain = weight(K), weight(K)
        if bias:
            self.query_bias, self.key_bias = weight(H, K, axis=0), weight(G, K, axis=0)
            self.output_bias = weight(D)
        self.of_bias = "common" if self.mla else "latents"
        parts = {name: list(shape) for name, shape in self.made.items()}
        parts[self.of_bias][-1] += bias
        for name in parts.keys() & {"latents", "value_latents"}:
            parts[name][-1] = padded(parts[name][-1])
        dtype, length = vllm_config.model_config.dtype, vllm_config.model_config.max_model_len
        if config.qk_norm:  # float32s, in elements of the cache
            parts["norms"] = [own * 4 // dtype.itemsize]
        self.row = Row.of(parts, dtype)
        # MLA's latents are of keys and of values.
        self.row.parts.setdefault("value_latents", self.row.parts["latents"])
        self.register_buffer("turns", angles(tuple(config.key_frequencies), length), False)
        if config.rope_mode == "latent":
            latent_turns = angles(tuple(config.latent_frequencies), length)
            self.register_buffer("latent_turns", latent_turns, False)
        self.kernel = None  # of decoding, where there is one
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_attn_backend(self):
        return Backend

    def get_kv_cache_spec(self, vllm_config):
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=1,
            head_size=self.row.width, head_size_v=0, dtype=vllm_config.model_config.dtype,
        )  # fmt: skip

    def prepare(self) -> None:
        """Make what a step multiplies with of the parameters, once they are loaded.

        Factors [G, C + R, K] have the cache's widths. Biases of keys are a row of theirs, which
        meets a latent that is 1.
        """
        none = self.query.new_zeros(self.groups, 0, self.config.head_dim)
        if self.mla:
            commons = [up.transpose(0, 1) for up in (self.up_key, self.up_value)]
            owns = [self.private_key, self.private_value]
            inputs = [self.down, self.private_down]
        else:
            commons, owns = [none, none], [self.key_up, self.value_up]
            inputs = [self.value, self.key_down, self.value_down, self.key]
        if self.config.qkv_bias:
            biases = self.key_bias[:, None], torch.zeros_like(self.key_bias[:, None])
            of_bias = commons if self.mla else owns
            of_bias[:] = (torch.cat(each, 1) for each in zip(of_bias, biases, strict=True))
        flat = [x.transpose(0, 1).flatten(1) if x.dim() == 3 else x for x in inputs]
        self.input = torch.cat([self.query.flatten(1), *flat], 1)
        self.widths = [self.query[0].numel(), *(x.shape[1] for x in flat)]
        self.common = self.width_of("common") if self.mla else 0
        widths = [self.width_of("latents"), self.width_of("value_latents")]
        self.key_factor, self.value_factor = (
            torch.cat([common, nn.functional.pad(own, (0, 0, 0, width - own.shape[1]))], 1)
            for common, own, width in zip(commons, owns, widths, strict=True)
        )
        # Norms are of keys without gains.
        gain = self.key_gain if self.config.qk_gain else 1
        self.gained_factor = self.key_factor * gain
        for name in [name for name, _ in self.named_parameters() if name not in KEPT]:
            delattr(self, name)

    def width_of(self, name: str) -> int:
        """The last axis of a part of a row."""
        return self.row.parts[name][1][-1]

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, D] for a step's tokens at their positions."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures a step's memory, without a cache
            return torch.zeros_like(x)
        (slots, batches), cache = metadata[self.layer_name], self.kv_cache[:, 0]
        queries, rows = self.queries_and_rows(x[: len(slots)], positions[: len(slots)])
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows
        out = x.new_zeros(len(x), self.heads, self.config.head_dim)
        for batch in batches:
            there, decodes = batch.tokens >= 0, batch.tokens.shape[1] == 1
            attend = self.kernel if decodes and self.kernel else self.attend
            out[batch.tokens[there]] = attend(queries, cache, batch)[there]
        y = tensor_model_parallel_all_reduce(torch.einsum("thk,hkd->td", out, self.output))
        return y + self.output_bias if self.config.qkv_bias else y

    def queries_and_rows(self, x: torch.Tensor, positions: torch.Tensor):
        """Queries, rotated [T, H, K] and perhaps in the latents' space [T, H, R], and rows."""
        config, eps, turns = self.config, self.config.rms_norm_eps, self.turns[positions]
        query, *made = (x @ self.input).split(self.widths, -1)
        query = query.unflatten(-1, (self.heads, -1))
        query = query + self.query_bias if config.qkv_bias else query
        query = rms_norm(query, eps) if config.qk_norm else query
        query = query * self.query_gain if config.qk_gain else query
        parts = {
            name: part.unflatten(-1, shape)
            for part, (name, shape) in zip(made, self.made.items(), strict=True)
        }
        if self.mla and config.latent_norm:
            parts = {name: rms_norm(part, eps) for name, part in parts.items()}
        if config.qkv_bias:
            part = parts[self.of_bias]
            parts[self.of_bias] = torch.cat([part, part.new_ones(*part.shape[:-1], 1)], -1)
        if config.qk_norm:
            whole = self.residual(parts, self.key_factor)
            whole = whole if self.mla else whole + parts["key"][:, None]
            parts["norms"] = torch.rsqrt(whole.float().square().mean(-1) + eps).view(x.dtype)
        if not self.mla:
            key = parts["key"] * self.key_gain if config.qk_gain else parts["key"]
            parts["key"] = rotate(key, turns)
        queries = [rotate(query, turns[:, None])]
        if not self.full:
            of_groups = query.unflatten(1, (self.groups, -1))
            in_latents = torch.einsum("tgek,grk->tger", of_groups, self.key_factor)
            queries.append(in_latents.flatten(1, 2))
        if config.rope_mode == "latent":
            latent_turns = self.latent_turns[positions][:, None]
            queries = [queries[0], rotate(queries[1], latent_turns)]
            parts["latents"] = rotate(parts["latents"], latent_turns)
        return queries, self.row.pack(parts)

    def residual(self, parts: dict[str, torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        """Keys [..., G, K] that latents make; without LRKV's shared part and the rotation."""
        latents, C = parts["latents"], self.common
        made = torch.einsum("...gr,grk->...gk", latents, factor[:, C : C + latents.shape[-1]])
        if self.mla:
            made += torch.einsum("...c,gck->...gk", parts["common"], factor[:, :C])
        return made

    def mix(self, rotated: torch.Tensor) -> torch.Tensor:
        """M_h(q) [..., G, E, K, C + R] of rotated queries [..., G, E, K].

        q · rope_s(B x) is [cos sΘ, sin sΘ] · M_h(q) · x for the factor B that makes keys of
        latents x (docs/decode.md of lrkv_jax).
        """
        a, b = (half[..., None] for half in rotated.float().chunk(2, -1))
        low, high = self.gained_factor.float().mT[:, None].chunk(2, -2)
        return torch.cat([a * low + b * high, b * low - a * high], -2)

    def logits(self, queries, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Products of queries [B, T, G, E, ...] and keys, without norms, [B, G, E, T, S]."""
        rotated, latents = queries[0], parts["latents"]
        (_, T, _, E, K), (S, R) = rotated.shape, (latents.shape[1], latents.shape[-1])
        product = "btgek,bsk->bgets"
        logits = 0 if self.mla else torch.einsum(product, rotated, parts["key"].float())
        if not self.full:
            return logits + torch.einsum("btger,bsgr->bgets", queries[1], latents.float())
        if not self.mla and T * E * R < K:  # fewer numbers than keys have
            carried = torch.einsum("sk,btgekr->bsgetr", self.turns[:S], self.mix(rotated))
            products = (carried * latents[:, :, :, None, None]).sum(-1)
            return logits + products.permute(0, 2, 3, 4, 1)
        if "keys" not in parts:  # for all tiles of a prompt
            keys = rotate(self.residual(parts, self.gained_factor), self.turns[:S, None])
            parts["keys"] = keys.float()
        return logits + torch.einsum("btgek,bsgk->bgets", rotated, parts["keys"])

    def attend(self, queries, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Heads' outputs [B, T, H, K] of a batch's tokens, from the pages of its requests."""
        B, T = batch.tokens.shape
        rows = gather(cache, batch)
        S, G = rows.shape[1], self.groups
        parts = {name: self.row.view(rows, name) for name in self.row.parts}
        queries = [x[batch.tokens.clamp(min=0)].unflatten(2, (G, -1)).float() for x in queries]
        norms = 1
        if "norms" in parts:
            norms = parts["norms"].contiguous().view(torch.float32).mT[:, :, None, None]
        places = torch.arange(S, device=rows.device)
        last = batch.lengths - (batch.tokens >= 0).sum(1)
        seen = places <= (last[:, None] + torch.arange(T, device=rows.device))[..., None]
        out, most = [], max(1, LOGITS // (B * self.heads * S))
        for tile in (slice(start, start + most) for start in range(0, T, most)):
            logits = self.logits([x[:, tile] for x in queries], parts) * norms
            logits = (logits * self.config.logit_scale).masked_fill(
                ~seen[:, None, None, tile], float("-inf")
            )
            shares = logits.softmax(-1).to(rows.dtype)
            common = torch.einsum("bgets,bsc->btgec", shares, parts["common"])
            latents = torch.einsum("bgets,bsgr->btger", shares, parts["value_latents"])
            out.append(self.values(common, latents))
        return torch.cat(out, 1)

    def values(self, common: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Heads' outputs [B, T, H, K] from their means of what values are made of."""
        C, factor = self.common, self.value_factor.to(common.dtype)
        if self.mla:
            common = torch.einsum("btgec,gck->btgek", common, factor[:, :C])
        out = common + torch.einsum("btger,grk->btgek", latents, factor[:, C:])
        return out.flatten(2, 3)
