"""The layer against its definition in float64: pieces of prompts, decoding, pages in any order.

Decoding is by PyTorch and by the Triton kernel, which Triton's interpreter runs here.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.utils.torch_utils import set_default_torch_dtype

from lrkv_vllm import attention, decode_kernel, weights
from lrkv_vllm.cache import Batch
from lrkv_vllm.config import LrkvConfig

D, H, K, BASE, PAGE = 24, 4, 16, 10000.0, 16
LRKV = dict(attention_kind="lrkv", rope_mode="full", rank_key=6, rank_value=6)
MLA = dict(attention_kind="mla", rope_mode="full", rank_latent=40, rank_private=0, latent_norm=True)
CASES = {
    "full": LRKV,
    "full, two groups, gains and biases": LRKV
    | dict(num_key_value_heads=2, qk_gain=True, qkv_bias=True, rank_value=8),
    "full, no norms": LRKV | dict(qk_norm=False),
    "shared": LRKV | dict(rope_mode="shared", rank_key=9),
    "latent, odd": LRKV | dict(rope_mode="latent", rank_key=7, num_key_value_heads=2),
    "mla": MLA,
    "mla, private latents, two groups, gains and biases": MLA
    | dict(rank_private=5, num_key_value_heads=2, qk_gain=True, qkv_bias=True),
    "mla, no norms": MLA | dict(latent_norm=False, qk_norm=False, rank_private=8),
}


def frequencies(width):
    return [BASE ** (-2 * j / width) for j in range(width // 2)]


def layer_of(settings, monkeypatch, dtype=torch.float32, length=256):
    settings = dict(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=H, head_dim=K, qk_norm=True,
        rms_norm_eps=1e-6, key_frequencies=frequencies(K), logit_scale=K**-0.5,
    ) | settings  # fmt: skip
    config = LrkvConfig(**settings)
    config.latent_frequencies = frequencies(settings.get("rank_key", 0))
    monkeypatch.setattr(weights.distributed, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(attention, "tensor_model_parallel_all_reduce", lambda x: x)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, max_model_len=length),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    attention.angles.cache_clear()
    with set_default_torch_dtype(dtype):  # as vLLM makes a model
        layer, drawn = attention.FactoredAttention(config, vllm_config, "layer"), torch.Generator()
    for name, parameter in sorted(layer.named_parameters()):
        scale = parameter.shape[0] ** -0.5 if parameter.dim() > 1 else 0.3
        drawn_there = scale * torch.randn(parameter.shape, generator=drawn.manual_seed(len(name)))
        parameter.data = (drawn_there + (1 if name.endswith("gain") else 0)).to(dtype)
    layer.exported = {name: p.double() for name, p in layer.named_parameters()}
    layer.prepare()
    return layer


def defined(layer, x):
    """[T, D] of one sequence, by the definition and in float64: no cache, no factor, no pages."""
    config, x = layer.config, x.double()
    p, G = layer.exported, config.num_key_value_heads

    def norm(y):
        return y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def rope(y):
        J = y.shape[-1] // 2
        turns = torch.arange(len(x)).double()[:, None] * torch.tensor(
            frequencies(y.shape[-1]), dtype=torch.float64
        )
        c, s = turns.cos()[:, None], turns.sin()[:, None]
        a, b = y[..., :J], y[..., J : 2 * J]
        return torch.cat([a * c - b * s, b * c + a * s, y[..., 2 * J :]], -1)

    q = torch.einsum("td,dhk->thk", x, p["query"])
    if config.attention_kind == "mla":
        c, r = x @ p["down"], x.new_zeros(len(x), G, 0)
        if config.rank_private:
            r = torch.einsum("td,gdr->tgr", x, p["private_down"])
        if config.latent_norm:
            c, r = norm(c), norm(r)
        k, v = (torch.einsum("tc,cgk->tgk", c, p[name]) for name in ("up_key", "up_value"))
        if config.rank_private:
            k = k + torch.einsum("tgr,grk->tgk", r, p["private_key"])
            v = v + torch.einsum("tgr,grk->tgk", r, p["private_value"])
        shared, own = None, None
    else:
        down = {n: torch.einsum("td,gdr->tgr", x, p[f"{n}_down"]) for n in ("key", "value")}
        up = {n: torch.einsum("tgr,grk->tgk", down[n], p[f"{n}_up"]) for n in down}
        k, v = ((x @ p[n])[:, None] + up[n] for n in ("key", "value"))
        shared, own = (x @ p["key"])[:, None], down["key"]
    if config.qkv_bias:
        q, k = q + p["query_bias"], k + p["key_bias"]
    gains = [p["query_gain"], p["key_gain"]] if config.qk_gain else [1, 1]
    q = norm(q) if config.qk_norm else q
    if config.rope_mode == "full":
        q, k = rope(q * gains[0]), rope((norm(k) if config.qk_norm else k) * gains[1])
    else:
        n = (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        in_latents = torch.einsum("tgek,grk->tger", q.unflatten(1, (G, -1)), p["key_up"])
        in_latents = in_latents.flatten(1, 2)
        if config.rope_mode == "latent":
            in_latents, own = rope(in_latents), rope(own)
        q = torch.cat([rope(q), in_latents], -1)
        k = n * torch.cat([rope(shared).expand(-1, G, -1), own], -1)
    k, v = (y.repeat_interleave(H // G, 1) for y in (k, v))
    logits = torch.einsum("thw,shw->hts", q, k) * K**-0.5
    logits = logits.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    y = torch.einsum("hts,shk,hkd->td", logits.softmax(-1), v, p["output"])
    return y + p["output_bias"] if config.qkv_bias else y


LENGTHS = (70, 23, 37)


def steps(layer, xs, monkeypatch, decode=None):
    """The layer's outputs for sequences that come in three pieces and then token by token."""
    pages = torch.randperm(24, generator=torch.Generator().manual_seed(1)).reshape(3, 8)
    pool = torch.full((32, 1, PAGE, layer.row.width), torch.nan, dtype=xs[0].dtype)
    layer.kv_cache, layer.kernel = pool, decode
    outs = [[] for _ in xs]
    cuts = [(0, n // 3, n // 2, n - 6, *range(n - 5, n + 1)) for n in LENGTHS]
    for step in range(len(cuts[0]) - 1):
        pieces = [(cut[step], cut[step + 1]) for cut in cuts]
        counts = torch.tensor([end - start for start, end in pieces])
        starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        places = torch.arange(int(counts.max())) + starts[:-1, None]
        lengths = torch.tensor([end for _, end in pieces])
        batch = Batch(
            places.masked_fill(places >= starts[1:, None], -1), pages, lengths,
            int(lengths.max()),
        )  # fmt: skip
        positions = torch.cat([torch.arange(start, end) for start, end in pieces])
        slots = torch.cat(
            [pages[b, torch.arange(start, end) // PAGE] * PAGE + torch.arange(start, end) % PAGE
             for b, (start, end) in enumerate(pieces)]
        )  # fmt: skip
        context = SimpleNamespace(attn_metadata={"layer": (slots, [batch])})
        monkeypatch.setattr(attention, "get_forward_context", lambda: context)  # noqa: B023
        x = torch.cat([x[start:end] for x, (start, end) in zip(xs, pieces, strict=True)])
        for out, part in zip(outs, layer(x, positions).split(counts.tolist()), strict=True):
            out.append(part)
    return [torch.cat(out) for out in outs]


# Two bytes a number: Triton's interpreter multiplies float16 as numpy does, and bfloat16 wrongly.
HALF = {"pytorch": torch.bfloat16, "triton": torch.float16}
BIASED = [name for name in CASES if "biases" in name]


@pytest.mark.parametrize("decode", ["pytorch", "triton"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "single") for case in CASES), *((case, "half") for case in BIASED)],
)
def test_pieces_and_decoding_are_the_definition(case, dtype, decode, monkeypatch):
    dtype = torch.float32 if dtype == "single" else HALF[decode]
    layer = layer_of(CASES[case], monkeypatch, dtype)
    draw = torch.Generator().manual_seed(3)
    xs = [torch.randn(n, D, generator=draw).to(dtype) for n in LENGTHS]
    kernel = None
    if decode == "triton":
        monkeypatch.setattr(decode_kernel, "PROGRAMS", 40)  # several runs of slots for a request
        monkeypatch.setattr(decode_kernel, "TILE", 16)
        monkeypatch.setattr(decode_kernel, "MLA_TILE", 16)
        kernel = partial(decode_kernel.decode, layer)
    for x, out in zip(xs, steps(layer, xs, monkeypatch, kernel), strict=True):
        expected = defined(layer, x)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < (25 if dtype == torch.float32 else 5) * torch.finfo(dtype).eps, error


def test_a_large_batch_is_decoded_in_pieces_that_bound_its_mix(monkeypatch):
    """At 513 requests of 32 heads of 128, rank 1,024, it had more numbers than an int32 counts."""
    layer, draw = layer_of(CASES["full"], monkeypatch), torch.Generator().manual_seed(4)
    queries, rows = layer.queries_and_rows(torch.randn(64, D, generator=draw), torch.arange(64))
    numbers = torch.arange(10)
    batch = Batch(numbers[:, None], (numbers % 4)[:, None], numbers + 7, PAGE)
    arguments, sizes, mix = (queries, rows.unflatten(0, (4, PAGE)), batch), [], layer.mix
    whole = decode_kernel.decode(layer, *arguments)
    monkeypatch.setattr(layer, "mix", lambda x: sizes.append(len(x)) or mix(x))
    monkeypatch.setattr(decode_kernel, "MIX", 4 * H * K * layer.key_factor.shape[1])
    pieces = decode_kernel.decode(layer, *arguments)
    assert (pieces - whole).abs().max() < 1e-5 and sizes == [4, 4, 2]


def test_angles_are_rounded_once_whatever_the_dtype_of_the_model(monkeypatch):
    """In bfloat16, the default, frequencies had 8 bits, and positions by 1,000 were off by 0.4."""
    layer = layer_of(CASES["latent, odd"], monkeypatch, torch.bfloat16, length=2048)
    for table, width in ((layer.turns, K), (layer.latent_turns, 7)):
        of_pairs = torch.tensor(frequencies(width), dtype=torch.float64)
        exact = torch.outer(torch.arange(2048, dtype=torch.float64), of_pairs)
        assert table.dtype == torch.float32
        assert (table.double() - torch.cat([exact.cos(), exact.sin()], -1)).abs().max() < 1e-7
