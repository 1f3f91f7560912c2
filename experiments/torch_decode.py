"""MHA's decode attention in PyTorch on a GPU, as `first_light.py` asks for it.

Reads JSON lines [batch, heads, width, length, samples], and answers each with a line: the times of
`scaled_dot_product_attention` by each of its backends. Every result is checked in float32 before it
is timed. Caches rotate, so that none is still in the GPU's L2. Nothing here imports this project.
"""

import json
import math
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROTATED_BYTES = 3 * (64 << 20)
TOLERANCE = 2e-2
CALLS = 16


def sdpa(backend):
    def attend(q_BHK, k_BSHK, v_BSHK):
        k_BHSK, v_BHSK = k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q_BHK[:, :, None], k_BHSK, v_BHSK)[:, :, 0]

    return attend


WAYS = {
    "SDPA, its choice": sdpa([b for b in SDPBackend.__members__.values() if b != SDPBackend.ERROR]),
    "SDPA, flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
}


def seconds(function):
    """Seconds of one of `CALLS` calls in a row, by the device's own clock."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for i in range(CALLS):
        function(i)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / CALLS


def measure(batch, heads, width, length, samples):
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q_BHK = normal(batch, heads, width)
    nbytes = 2 * batch * length * heads * width * q_BHK.element_size()
    count = math.ceil(ROTATED_BYTES / nbytes)
    caches = [[normal(batch, length, heads, width) for _ in range(2)] for _ in range(count)]
    k_SHK, v_SHK = (array_BSHK[-1].float() for array_BSHK in caches[0])
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
            times.append(1e6 * seconds(function))
    for (row, _), times in zip(timed, taken, strict=True):
        row["us"], row["samples"] = statistics.median(times), times
    del caches
    torch.cuda.empty_cache()
    return {"rows": rows, "torch": torch.__version__, "bytes": nbytes}


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            with torch.no_grad():
                answer = measure(*json.loads(line))
        except Exception as error:  # too little memory, for one
            answer = {"rows": [], "reason": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)
