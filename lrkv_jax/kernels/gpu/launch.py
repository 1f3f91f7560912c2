"""Call the kernel: split the work, name the operands, run the CTAs and join the pieces."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lrkv_jax.kernels.gpu import schedule
from lrkv_jax.kernels.gpu.consume import Consumer
from lrkv_jax.kernels.gpu.join import join
from lrkv_jax.kernels.gpu.plan import WIDTH
from lrkv_jax.kernels.gpu.produce import produce
from lrkv_jax.kernels.gpu.schedule import TILE
from lrkv_jax.kernels.online import slots_of

# A thread's registers, where a CTA has its multiprocessor alone. With two consumers each of the 384
# threads starts with 168: the three warpgroups may not ask for more than 3 x 168 together, or the
# last waits for ever. With one consumer they start with as many as it asks for.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, {1: 240, 2: 232}


def attend(plan, operands, lengths_B, *, T, scale, interpret):
    """Run the kernel over all pieces of the work and join them.

    `operands` are arrays by name: `queries` in columns (`columns`); `keys` [B, S, G, ·], further
    ones in `more_keys`, and `values`, unless they are in the keys; for latents `rk`, `rv`
    [B, S, H, R'] and, if they are rebuilt, `up` [H · blocks, 64, 128], float32 `full_queries`
    [B, U, Q, N, 2, 64] and `angles` [S, 2, 64]; `norms` [B, H, S]. With `pages` [B, S / 64] that
    are not None, caches are pools of pages, 64 slots of a page instead of S of a sequence. T
    counts the queries of all heads that share latents (`plan.repeats`).
    Returns averages [B, U, Q, blocks, 64, N] (shared value blocks, then latent ones) and
    log-sum-exps [B, U, Q, N].
    """
    pages_BN = operands["pages"]
    slots = slots_of(operands["keys"], pages_BN)
    work = schedule.split(lengths_B, plan.workers, slots)
    operands = {
        **operands,
        "lengths": lengths_B.astype(jnp.int32), "begin_Z": work.begin_Z, "count_Z": work.count_Z,
        "pieces": jnp.stack([work.sequence_Y, work.first_Y, work.tiles_Y], axis=1),
    }  # fmt: skip
    if pages_BN is None:
        del operands["pages"]
    if plan.full:
        operands |= _angles(operands["angles"])
    names, arrays = zip(*operands.items(), strict=True)
    scratch = _scratch(plan, operands["keys"].dtype, operands["queries"].dtype)
    shape = (len(work.tiles_Y), plan.units, plan.warpgroups)
    blocks = plan.value_blocks + plan.rank_blocks
    outputs = {
        "sums": jax.ShapeDtypeStruct((*shape, blocks, WIDTH, plan.columns), jnp.float32),
        "peak": jax.ShapeDtypeStruct((*shape, plan.columns), jnp.float32),
        "total": jax.ShapeDtypeStruct((*shape, plan.columns), jnp.float32),
    }
    every = (*names, *outputs, *scratch)

    def body(*refs):
        _cta(plan, T, scale, dict(zip(every, refs, strict=True)))

    how = {"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}
    sums, peak, total = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=tuple(scratch.values()),
        # Units first: the CTAs that read one tile for different heads run side by side.
        grid=(plan.units, plan.workers),
        grid_names=("unit", "worker"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **how,
    )(*arrays)
    return join(work, sums, peak, total, interpret=how)


def _angles(angles_S2J):
    """Angles of a tile's tokens, and of the turn from one tile to the next."""
    last = len(angles_S2J) - 1
    tokens = jnp.minimum(jnp.arange(TILE), last)
    return {
        "in_tile": angles_S2J[tokens].swapaxes(0, 1),
        "turn": angles_S2J[min(TILE, last)],  # a cache of one tile has no next one
    }


def _scratch(plan, dtype, query_dtype):
    """Shared memory and barriers, by name; the cache's dtype and the queries' are equally wide."""
    swizzled = (
        plgpu.TilingTransform((8, 128 // dtype.itemsize)),
        plgpu.SwizzleTransform(128),
    )
    Q, N = plan.warpgroups, plan.columns

    def slots(*shape, dtype=dtype):
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    scratch = {
        "slots": slots(plan.ring, TILE, WIDTH),
        "ready": plgpu.Barrier(num_barriers=plan.ring),
        # One more than slots: on the last, warpgroups await the zeroing of a tile that all read.
        "free": plgpu.Barrier(num_arrivals=Q, num_barriers=plan.ring + 1),
        "queries_s": slots(Q * plan.query_blocks, N, WIDTH, dtype=query_dtype),
        "weights": slots(Q, N, TILE),
        "sums_s": plgpu.SMEM((Q, WIDTH, N), jnp.float32),
        "peak_s": plgpu.SMEM((Q, N), jnp.float32),
        "total_s": plgpu.SMEM((Q, N), jnp.float32),
        "queries_ready": plgpu.Barrier(num_arrivals=2 if plan.full else 1, num_barriers=Q),
    }
    if Q > 1:
        scratch["exchange"] = plgpu.Barrier(num_barriers=Q)  # whose turn it is to reduce rows
    if plan.rank:
        scratch |= {
            "head_slots": slots(Q * plan.head_ring, TILE, WIDTH),
            "head_ready": plgpu.Barrier(num_barriers=Q * plan.head_ring),
            "head_free": plgpu.Barrier(num_barriers=Q * plan.head_ring),
        }
    if plan.norm_heads:
        scratch |= {
            "norm_s": plgpu.SMEM((2 * Q, plan.norm_heads, TILE), jnp.float32),
            "norm_ready": plgpu.Barrier(num_barriers=2 * Q),
            "norm_free": plgpu.Barrier(num_barriers=2 * Q),
        }
    if plan.full:
        scratch |= {
            "up_s": slots(Q * plan.heads * plan.rank_blocks, WIDTH, 2 * WIDTH),
            "full_s": plgpu.SMEM((Q, plan.heads * plan.queries, 2, WIDTH), jnp.float32),
            "turn_s": plgpu.SMEM((Q, 2, WIDTH), jnp.float32),
            "factors_ready": plgpu.Barrier(num_arrivals=2, num_barriers=Q),
        }
    return scratch


def _cta(plan, T, scale, refs):
    """Run one CTA: its last warpgroup copies, the others attend. `refs` names what they use."""
    r = SimpleNamespace(**{"pages": None, **refs})
    unit, worker, warpgroup = (lax.axis_index(n) for n in ("unit", "worker", "warpgroup"))

    def each_piece(work, carry):
        """work(place, sequence, first tile, tiles, carry) for each of this worker's pieces."""

        def one(j, carry):
            return work(j, *(r.pieces[j, field] for field in range(3)), carry)

        begin = r.begin_Z[worker]
        return lax.fori_loop(begin, begin + r.count_Z[worker], one, carry)

    @pl.when(warpgroup == plan.warpgroups)
    def _():
        if plan.ctas == 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(plan, r, each_piece, unit, worker * 0)

    @pl.when(warpgroup < plan.warpgroups)
    def _():
        if plan.ctas == 1:
            plgpu.set_max_registers(CONSUMER_REGISTERS[plan.warpgroups], action="increase")
        Consumer(plan, r, unit, warpgroup, T=T, scale=scale).run(each_piece)
