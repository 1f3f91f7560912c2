"""MHA's and GQA's decode attention in PyTorch, as `first_light.py` asks for it.

Reads JSON lines [batch, heads, groups, width, length, samples], and answers each with a line: the
times of `scaled_dot_product_attention` by each of its backends. Every result is checked in float32
before it is timed. Caches rotate, so that none is still in the GPU's L2. Nothing here imports this
project.
"""

import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
ROTATED_BYTES = 3 * (64 << 20)
TOLERANCE = 2e-2
CALLS = 16 if ON_GPU else 1


def sdpa(backend):
    def attend(q_BHK, k_BSGK, v_BSGK):
        k_BGSK, v_BGSK = k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
        shared = {"enable_gqa": True} if k_BGSK.shape[1] != q_BHK.shape[1] else {}
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q_BHK[:, :, None], k_BGSK, v_BGSK, **shared)
        return out[:, :, 0]

    return attend


WAYS = {
    "SDPA, its choice": sdpa([b for b in SDPBackend.__members__.values() if b != SDPBackend.ERROR]),
    "SDPA, flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
}


def seconds(function, calls):
    """Seconds of one of `calls` calls in a row, by the device's own clock."""
    if not ON_GPU:
        began = time.perf_counter()
        for i in range(calls):
            function(i)
        return (time.perf_counter() - began) / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for i in range(calls):
        function(i)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def measure(batch, heads, groups, width, length, samples):
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device=DEVICE, dtype=DTYPE)

    q_BHK = normal(batch, heads, width)
    nbytes = 2 * batch * length * groups * width * q_BHK.element_size()
    count = max(1, math.ceil(ROTATED_BYTES / nbytes)) if ON_GPU else 1
    caches = [[normal(batch, length, groups, width) for _ in range(2)] for _ in range(count)]
    k_SHK, v_SHK = (a[-1].float().repeat_interleave(heads // groups, 1) for a in caches[0])
    weights_HS = torch.einsum("hk,shk->hs", q_BHK[-1].float(), k_SHK) / width**0.5
    truth_HK = torch.einsum("hs,shk->hk", weights_HS.softmax(-1), v_SHK)
    del k_SHK, v_SHK
    rows, timed = [], []
    for name, attend in WAYS.items():
        row = {"name": name, "us": None, "reason": None}
        rows.append(row)
        try:
            error = (attend(q_BHK, *caches[0])[-1].float() - truth_HK).abs().max()
            row["error"] = float(error / truth_HK.abs().max())
            if not row["error"] < TOLERANCE:
                raise ValueError(f"differs from the truth by {row['error']:.1e}")
            timed.append((row, lambda i, attend=attend: attend(q_BHK, *caches[i % count])))
        except Exception as error:  # a library may raise anything
            row["reason"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    taken = [[] for _ in timed]
    for _ in range(samples):
        for (_, function), times in zip(timed, taken, strict=True):
            times.append(1e6 * seconds(function, CALLS))
    for (row, _), times in zip(timed, taken, strict=True):
        row["us"], row["samples"] = statistics.median(times), times
    x = torch.zeros((2 << 30 if ON_GPU else 4 << 20) // 4, device=DEVICE)
    y = torch.empty_like(x)
    copies = [2 * 4 * x.numel() / seconds(lambda i: y.copy_(x), 2) for _ in range(5)]
    del caches, x, y
    if ON_GPU:
        torch.cuda.empty_cache()
    return {"rows": rows, "torch": torch.__version__, "bytes": nbytes,
            "copy_bytes_per_second": statistics.median(copies)}  # fmt: skip


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            with torch.no_grad():
                answer = measure(*json.loads(line))
        except Exception as error:  # too little memory, for one
            answer = {"rows": [], "reason": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)
