"""The Triton kernel on this GPU: its results against PyTorch's, and its times beside MHA's.

    python bench_kernel.py --out FILE.json

Compares decoding of random pages at every kind of row that the tests have, in float32 and
bfloat16. Then times it at some models' shapes, beside this package's PyTorch path, a copy, and
MHA's decode attention in PyTorch at the same batch and length. vLLM need not be there: names of it
stand in for it.
"""

import argparse
import json
import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
WIDTH = 256  # of the hidden states that pages are made of
LRKV = dict(attention_kind="lrkv")
SHAPES = {
    "full, 32 heads of 128, rank 54": dict(
        LRKV, rope_mode="full", num_attention_heads=32, head_dim=128, rank_key=54, rank_value=54
    ),
    "latent, 32 heads of 128, rank 54": dict(
        LRKV, rope_mode="latent", num_attention_heads=32, head_dim=128, rank_key=54, rank_value=54
    ),
    "shared, 18 heads of 128, rank 55": dict(
        LRKV, rope_mode="shared", num_attention_heads=18, head_dim=128, rank_key=55, rank_value=55
    ),
    "full, 18 heads of 128, rank 55": dict(
        LRKV, rope_mode="full", num_attention_heads=18, head_dim=128, rank_key=55, rank_value=55
    ),
    "mla full, 9 heads of 64 in 3 groups, latent 224": dict(
        attention_kind="mla", rope_mode="full", num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, rank_latent=224, rank_private=8, latent_norm=True,
    ),
}  # fmt: skip
PARTS = ("input", "key_factor", "value_factor", "gained_factor")


def stand_in_for_vllm():
    """The names of vLLM that the layer imports."""

    def module(name, **names):
        made = sys.modules[name] = ModuleType(name)
        made.__dict__.update(names)
        return made

    @contextmanager
    def set_default_torch_dtype(dtype):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(before)

    distributed = module(
        "vllm.distributed", tensor_model_parallel_all_reduce=None,
        get_tensor_model_parallel_world_size=lambda: 1,
    )  # fmt: skip
    bases = ("AttentionImplBase", "AttentionMetadataBuilder", "AttentionBackend", "MultipleOf")
    backend = module("vllm.v1.attention.backend", **{name: type(name, (), {}) for name in bases})
    module("vllm", distributed=distributed)
    module("vllm.logger", init_logger=logging.getLogger)
    module("vllm.utils")
    module("vllm.utils.torch_utils", set_default_torch_dtype=set_default_torch_dtype)
    module("vllm.forward_context", get_forward_context=None)
    module(
        "vllm.model_executor.layers.attention_layer_base",
        AttentionLayerBase=type("AttentionLayerBase", (), {}),
    )
    module("vllm.v1.attention", backend=backend)
    module("vllm.v1.attention.backends.utils", split_decodes_and_prefills=None)
    module("vllm.v1.kv_cache_interface", FullAttentionSpec=None)


stand_in_for_vllm()
sys.path[:0] = [str(HERE), str(HERE / "tests")]

import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from triton.testing import do_bench, do_bench_cudagraph  # noqa: E402

from lrkv_vllm import decode_kernel  # noqa: E402
from lrkv_vllm.cache import Batch  # noqa: E402
from test_attention import CASES, D, frequencies, layer_of  # noqa: E402

PEERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def moved(layer, device):
    layer.to(device)
    for name in PARTS:
        setattr(layer, name, getattr(layer, name).to(device))
    return layer


def compared(settings, dtype, device):
    """The kernel's error and PyTorch's, there, in ulp of the result of PyTorch on the CPU."""
    layer = layer_of(settings, pytest.MonkeyPatch(), dtype)
    x = torch.randn(256, D, generator=torch.Generator().manual_seed(3)).to(dtype)
    queries, rows = layer.queries_and_rows(x, torch.arange(256) % 128)
    pool, table = (
        rows.unflatten(0, (8, 32)),
        torch.tensor([[3, 1, 0, 2], [6, 7, 5, 4], [5, 6, 4, 7]]),
    )
    numbers = torch.tensor([[127], [32], [128]]), table, torch.tensor([128, 33, 1])
    right = layer.attend(queries, pool, Batch(*numbers, 128))
    moved(layer, device)
    there = Batch(*(each.to(device) for each in numbers), 128)
    arguments = [x.to(device) for x in queries], pool.to(device), there
    ulp = torch.finfo(dtype).eps * right.abs().max()
    errors = {
        name: ((out.cpu() - right).abs().max() / ulp).item()
        for name, out in (
            ("kernel_ulp", decode_kernel.decode(layer, *arguments)),
            ("torch_ulp", layer.attend(*arguments)),
        )
    }
    return {**errors, "taken": decode_kernel.checked(layer) is not None}


def layer_at(shape, dtype, length, device):
    heads, K = shape["num_attention_heads"], shape["head_dim"]
    more = dict(
        hidden_size=WIDTH, num_key_value_heads=heads, key_frequencies=frequencies(K),
        logit_scale=K**-0.5,
    )  # fmt: skip
    return moved(layer_of(more | shape, pytest.MonkeyPatch(), dtype, length), device)


def problem(layer, batch, length, dtype, device):
    """Queries, pages in a random order that hold whole sequences, and the step."""
    pages = -(-length // 64)
    pool = torch.empty(batch * pages, 64, layer.row.width, dtype=dtype, device=device)
    for rows in pool.flatten(0, 1).split(1 << 16):
        x = torch.randn(len(rows), WIDTH, device=device).to(dtype)
        positions = torch.arange(len(rows), device=device) % length
        rows.copy_(layer.queries_and_rows(x, positions)[1])
    order = torch.randperm(batch * pages, device=device)
    last = torch.full((batch,), length - 1, device=device)
    queries, _ = layer.queries_and_rows(torch.randn(batch, WIDTH, device=device).to(dtype), last)
    places = torch.arange(batch, device=device)[:, None]
    table, lengths = order.reshape(batch, pages).int(), (last + 1).int()
    return queries, pool, Batch(places, table, lengths, length)


def peers(shape, batch, length):
    """Microseconds of MHA's decode attention in PyTorch, and bytes per second of a copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * len(source) / do_bench(lambda: target.copy_(source), return_mode="median") * 1e3
    H, K = shape["num_attention_heads"], shape["head_dim"]
    query, key, value = (
        torch.randn(batch, H, slots, K, device="cuda", dtype=torch.bfloat16)
        for slots in (1, length, length)
    )
    attend, found = torch.nn.functional.scaled_dot_product_attention, {}
    for peer in PEERS:
        with sdpa_kernel(peer):
            ms = do_bench(lambda: attend(query, key, value), return_mode="median")
        found[peer.name] = ms * 1e3
    return found, copy


def timed(name, shape, batch, length, device):
    """The row of a shape; on a CPU, without times."""
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    layer = layer_at(shape, dtype, length, device)
    arguments = problem(layer, batch, length, dtype, device)
    right = layer.attend(*arguments)
    row = {"shape": name, "batch": batch, "length": length}
    row["bytes"] = batch * length * layer.row.width * dtype.itemsize
    if on_gpu:
        row["mha_us"], row["copy_bytes_per_second"] = peers(shape, batch, length)
        ms = do_bench(lambda: layer.attend(*arguments), return_mode="median")
        row["pytorch_us"] = ms * 1e3

    def ours():
        return decode_kernel.decode(layer, *arguments)

    try:
        row["error"] = ((ours() - right).abs().max() / right.abs().max()).item()
        row["us"] = do_bench_cudagraph(ours, return_mode="median") * 1e3 if on_gpu else None
    except Exception as failure:  # too much shared memory, say
        row["failed"] = str(failure).splitlines()[0][:200]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of them")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "compared": [], "timed": [],
    }  # fmt: skip

    def keep(part, row):
        found[part].append(row)
        print(json.dumps(row), flush=True)
        given.out.write_text(json.dumps(found, indent=1))

    for case, settings in CASES.items():
        for dtype in dtypes:
            row = compared(settings, dtype, device)
            keep("compared", {"case": case, "dtype": str(dtype), **row})
    for name, shape in list(SHAPES.items())[: given.shapes]:
        keep("timed", timed(name, shape, given.batch, given.length, device))


if __name__ == "__main__":
    main()
