"""Decoding from the factored cache by one Triton kernel: a query a request, pages as they lie.

A program attends to one run of a request's slots, for the heads of one group. It reads each row's
parts once and makes no key (`FactoredAttention.mix`). The runs of a request are joined by their
log-sum-exps, in PyTorch.

B requests  H heads  G groups of them  E = H / G  N pages of a request  Z runs of slots
K head width  C common latent's width  R latents' width  X = C + R, unrotated latents
"""

import torch
import triton
import triton.language as tl
from vllm.logger import init_logger

from lrkv_vllm.cache import Batch

logger = init_logger(__name__)

# Of seven settings that were timed on an H200 (docs/servers.md).
TILE, MLA_TILE = 64, 32  # slots read at a time; more of MLA's wide latents are too much for an A100
PROGRAMS, STAGES = 8, 2  # programs for each of a GPU's multiprocessors; tiles on their way in one
MIX = 2**26  # numbers of M at once: 256 MiB, and offsets that an int32 has


@triton.jit
def _part(rows, there, at, size: tl.constexpr, width: tl.constexpr):
    """Columns at, at + 1, … of rows, [rows, width]: zeros past size, and of rows not there."""
    columns = tl.arange(0, width)[None, :]
    return tl.load(rows[:, None] + at + columns, there[:, None] & (columns < size), other=0.0)


@triton.jit
def _through_mix(
    logits, rows, there, at, turns, mix, head, E: tl.constexpr, K: tl.constexpr, X: tl.constexpr,
    first: tl.constexpr, size: tl.constexpr, X_: tl.constexpr,
):  # fmt: skip
    """Add [cos sΘ, sin sΘ] · M_h(q) · x of latents x at `at`; M's column for them is `first`."""
    coordinate = tl.arange(0, turns.shape[1])
    for start in tl.static_range(0, size, X_):
        x = _part(rows, there, at + start, size - start, X_).to(tl.float32)
        for e in tl.static_range(E):
            of_head = mix + (head + e) * K * X + coordinate * X
            mixed = _part(of_head, coordinate < K, first + start, size - start, X_)
            carried = tl.dot(turns, mixed, input_precision="ieee")
            here = tl.arange(0, logits.shape[0])[:, None] == e
            logits += tl.where(here, tl.sum(carried * x, 1)[None, :], 0.0)
    return logits


@triton.jit(do_not_specialize=["Z"])  # Z grows with a request: one program is for all of it
def _decode(
    cache, norms, table, lengths, rotated, in_latents, mix, turns, out, lse,
    scale, page_stride, norm_stride, table_stride, slots, width, norm_width, run, Z,
    H: tl.constexpr, E: tl.constexpr, HB: tl.constexpr, K: tl.constexpr,
    K_: tl.constexpr, KEY: tl.constexpr, COMMON: tl.constexpr, C: tl.constexpr,
    C_: tl.constexpr, LATENTS: tl.constexpr, R: tl.constexpr, R_: tl.constexpr,
    VALUES: tl.constexpr, V: tl.constexpr, V_: tl.constexpr, NORMS: tl.constexpr,
    FULL: tl.constexpr, IN_KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """KEY, COMMON, LATENTS, VALUES and NORMS are where parts of a row begin, −1 for none; NORMS in
    float32s. IN_KEYS are the columns of the common part that make keys: C, or 0 for LRKV."""
    b, g, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b)
    head, rows_of = b * H + g * E, tl.arange(0, HB)
    heads = rows_of < E
    top = tl.full([HB], float("-inf"), tl.float32)
    total = tl.zeros([HB], tl.float32)
    common_sum = tl.zeros([HB, C_], tl.float32)
    latent_sum = tl.zeros([HB, V_], tl.float32)
    first = z * run
    for start in range(first, tl.minimum(first + run, length), TILE):
        slot = start + tl.arange(0, TILE)
        there = slot < tl.minimum(first + run, length)
        page = tl.load(table + b * table_stride + slot // slots, there, other=0).to(tl.int64)
        rows = cache + page * page_stride + (slot % slots) * width
        logits = tl.zeros([HB, TILE], tl.float32)
        if KEY >= 0:
            q = _part(rotated + (head + rows_of) * K, heads, 0, K, K_)
            key = _part(rows, there, KEY, K, K_)
            logits += tl.dot(q, tl.trans(key), input_precision="ieee")
        if FULL:
            angles = _part(turns + slot * K, there, 0, K, K_).to(cache.dtype.element_ty)
            if IN_KEYS > 0:
                logits = _through_mix(
                    logits, rows, there, COMMON, angles, mix, head, E, K, IN_KEYS + R, 0, IN_KEYS,
                    32,
                )  # fmt: skip
            if R > 0:
                logits = _through_mix(
                    logits, rows, there, LATENTS + g * R, angles, mix, head, E, K, IN_KEYS + R,
                    IN_KEYS, R, R_,
                )  # fmt: skip
        else:
            q = _part(in_latents + (head + rows_of) * R, heads, 0, R, R_)
            latents = _part(rows, there, LATENTS + g * R, R, R_)
            logits += tl.dot(q, tl.trans(latents), input_precision="ieee")
        if NORMS >= 0:
            at = page * norm_stride + (slot % slots) * norm_width + NORMS + g
            logits *= tl.load(norms + at, there, other=0.0)[None, :]
        logits = tl.where(there[None, :], logits * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(logits, 1))
        shares, kept = tl.exp(logits - peak[:, None]), tl.exp(top - peak)
        total, top = total * kept + tl.sum(shares, 1), peak
        shares = shares.to(cache.dtype.element_ty)
        common = _part(rows, there, COMMON, C, C_)
        common_sum = common_sum * kept[:, None] + tl.dot(shares, common, input_precision="ieee")
        if V > 0:
            latents = _part(rows, there, VALUES + g * V, V, V_)
            latent_sum *= kept[:, None]
            latent_sum += tl.dot(shares, latents, input_precision="ieee")
    # A run past a request's length has no share.
    total = tl.where(total > 0, total, 1.0)
    there = (head + rows_of) * Z + z
    tl.store(lse + there, top + tl.log(total), heads)
    column = tl.arange(0, C_)
    at = there[:, None] * (C + V) + column[None, :]
    tl.store(out + at, common_sum / total[:, None], heads[:, None] & (column[None, :] < C))
    column = tl.arange(0, V_)
    at = there[:, None] * (C + V) + C + column[None, :]
    tl.store(out + at, latent_sum / total[:, None], heads[:, None] & (column[None, :] < V))


def pow2(width: int) -> int:
    """The width of a part on a GPU, where products take at least 16."""
    return max(16, triton.next_power_of_2(width))


def decode(layer, queries, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
    """`FactoredAttention.attend` of requests with one token each, by the kernel: [B, 1, H, K]."""
    most = MIX // (layer.heads * layer.key_factor[0].numel())
    most = max(4, most // 4 * 4)  # four lengths are 16 bytes, to which the kernel is compiled
    if layer.full and len(batch.tokens) > most:
        numbers = (each.split(most) for each in (batch.tokens, batch.table, batch.lengths))
        batches = [Batch(*each, batch.longest) for each in zip(*numbers, strict=True)]
        return torch.cat([decode(layer, queries, cache, each) for each in batches])
    rotated, *in_latents = (x[batch.tokens[:, 0]].contiguous() for x in queries)
    (B, H, K), G = rotated.shape, layer.groups
    mix = layer.mix(rotated.unflatten(1, (G, -1))).to(cache.dtype) if layer.full else None
    at = {name: start for name, (start, _) in layer.row.parts.items()}
    C, R, V = map(layer.width_of, ("common", "latents", "value_latents"))
    processors = 1
    if cache.is_cuda:
        processors = torch.cuda.get_device_properties(cache.device).multi_processor_count
    tile = MLA_TILE if layer.mla else TILE
    Z = max(1, min(PROGRAMS * processors // (B * G), batch.longest // (2 * tile)))
    norms = cache.view(torch.float32)
    out = torch.empty(B, H, Z, C + V, device=cache.device, dtype=torch.float32)
    lse = torch.empty(B, H, Z, device=cache.device, dtype=torch.float32)
    _decode[B, G, Z](
        cache, norms, batch.table, batch.lengths, rotated, *(in_latents or [None]), mix,
        layer.turns, out, lse,
        layer.config.logit_scale, cache.stride(0), norms.stride(0), batch.table.stride(0),
        cache.shape[1], cache.stride(1), norms.stride(1),
        -(-batch.longest // (Z * tile)) * tile, Z,
        H=H, E=H // G, HB=pow2(H // G), K=K, K_=pow2(K), KEY=at.get("key", -1),
        COMMON=at["common"], C=C, C_=pow2(C), LATENTS=at["latents"], R=R, R_=pow2(R),
        VALUES=at["value_latents"], V=V, V_=pow2(V),
        NORMS=at["norms"] * cache.dtype.itemsize // 4 if "norms" in at else -1,
        FULL=layer.full, IN_KEYS=layer.common, TILE=tile, num_stages=STAGES,
    )  # fmt: skip
    shares = (lse - lse.logsumexp(-1, keepdim=True)).exp()
    means = (out * shares[..., None]).sum(2).to(cache.dtype)
    means = means.unflatten(1, (G, -1))[:, None]
    return layer.values(means[..., :C], means[..., C:])


def checked(layer):
    """`decode` if its output for drawn tokens is that of PyTorch; else None, with one warning."""
    like, longest = layer.input, min(500, len(layer.turns))  # 500 slots are read in several runs
    x = torch.randn(512, len(like), generator=torch.Generator().manual_seed(0)).to(like)
    queries, rows = layer.queries_and_rows(x, torch.arange(512, device=x.device) % longest)
    tokens = torch.tensor([[5], [9]])
    table = torch.tensor([[3, 1, 6, 0, 7, 2, 5, 4], [2, 3, 5, 1, 0, 4, 7, 6]])
    numbers = tokens, table, torch.tensor([longest, longest // 3])
    batch = Batch(*(each.to(x.device) for each in numbers), longest)
    try:
        arguments = queries, rows.unflatten(0, (8, 64)), batch
        ours, right = decode(layer, *arguments), layer.attend(*arguments)
        error = ((ours - right).abs().max() / right.abs().max()).item()
        wrong = "" if error < 16 * torch.finfo(x.dtype).eps else f"it is off by {error:.1e}"
    except Exception as failure:
        wrong = str(failure).splitlines()[0]
    if wrong:
        logger.warning("LRKV decodes in PyTorch: its Triton kernel does not run, %s", wrong)
    return None if wrong else decode
