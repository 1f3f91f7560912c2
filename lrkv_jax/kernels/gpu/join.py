"""Join the pieces of each sequence, in the order of its tokens: a second, small kernel.

One order makes the result the same whenever and wherever the pieces were computed. XLA's segment
sums are atomic additions on a GPU, in the order of arrival.

B batch  Y places of pieces  U units of heads  Q warpgroups per CTA  N columns  X 64 coordinates
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lrkv_jax.kernels.gpu.plan import WIDTH
from lrkv_jax.kernels.online import MASKED

LAYOUT = plgpu.Layout.WGMMA
AT_ONCE = 4  # pieces whose sums are on their way at the same time


def join(work, sums, peak, total, *, interpret):
    """Softmax averages [B, U, Q, blocks, X, N] and log-sum-exps [B, U, Q, N] from pieces' sums.

    `sums` [Y, U, Q, blocks, X, N] are unnormalized; `peak` [Y, U, Q, N] is a piece's largest logit
    times log2(e), `total` [Y, U, Q, N] its sum of 2^(logit − peak). A query that sees nothing gets
    0 and MASKED. `interpret` are the arguments of `plgpu.kernel` for the interpreter.
    """
    B, (_, U, Q, blocks, _, N) = len(work.place_B), sums.shape

    def along_N(vector_N):
        return lax.broadcast_in_dim(vector_N, (WIDTH, N), [1])

    def vector(ref_N):
        return plgpu.load(ref_N, layout=LAYOUT.reduce(0), optimized=False)

    def body(place_B, pieces_B, sums, peak, total, mean, log_sum, mean_s, log_sum_s):
        b, heads, block = (lax.axis_index(name) for name in ("sequence", "heads", "block"))
        own = lax.div(heads, jnp.int32(Q)), lax.rem(heads, jnp.int32(Q))
        first, count = place_B[b], pieces_B[b]

        def some(k, carry):
            peak_N, total_N, sum_XN = carry
            wanted = [k * AT_ONCE + i for i in range(AT_ONCE)]
            # Past the last piece, the last once more, with no weight.
            places = [first + jnp.minimum(piece, count - 1) for piece in wanted]
            peaks = [vector(peak.at[j, *own]) for j in places]
            totals = [vector(total.at[j, *own]) for j in places]
            sums_XN = [
                plgpu.load(sums.at[j, *own, block], layout=LAYOUT, optimized=False) for j in places
            ]
            new_N = peak_N
            for piece_N in peaks:
                new_N = jnp.maximum(new_N, piece_N)
            decay_N = jnp.exp2(peak_N - new_N)
            total_N, sum_XN = total_N * decay_N, sum_XN * along_N(decay_N)
            for piece, piece_N, more_N, more_XN in zip(wanted, peaks, totals, sums_XN, strict=True):
                weight_N = jnp.exp2(piece_N - new_N) * jnp.where(piece < count, 1.0, 0.0)
                total_N += weight_N * more_N
                sum_XN += along_N(weight_N) * more_XN
            return new_N, total_N, sum_XN

        peak_N = plgpu.layout_cast(jnp.full((N,), MASKED, jnp.float32), LAYOUT.reduce(0))
        total_N = plgpu.layout_cast(jnp.zeros((N,), jnp.float32), LAYOUT.reduce(0))
        sum_XN = plgpu.layout_cast(jnp.zeros((WIDTH, N), jnp.float32), LAYOUT)
        steps = lax.div(count + (AT_ONCE - 1), jnp.int32(AT_ONCE))
        peak_N, total_N, sum_XN = lax.fori_loop(0, steps, some, (peak_N, total_N, sum_XN))
        safe_N = jnp.where(total_N > 0, total_N, 1.0)
        mean_s[...] = sum_XN / along_N(safe_N)
        seen_N = (peak_N + jnp.log2(safe_N)) * jnp.log(2.0)
        log_sum_s[...] = jnp.where(total_N > 0, seen_N, MASKED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mean_s, mean.at[b, *own, block])

        @pl.when(block == 0)
        def _():
            plgpu.copy_smem_to_gmem(log_sum_s, log_sum.at[b, *own])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, U, Q, blocks, WIDTH, N), jnp.float32),
            jax.ShapeDtypeStruct((B, U, Q, N), jnp.float32),
        ),
        scratch_types=(plgpu.SMEM((WIDTH, N), jnp.float32), plgpu.SMEM((N,), jnp.float32)),
        grid=(blocks, U * Q, B),
        grid_names=("block", "heads", "sequence"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **interpret,
    )(work.place_B, work.pieces_B, sums, peak, total)
