"""The warpgroups that attend: an online softmax over tiles, for N (head, query) columns each.

Arrays in registers are named for what they are. Rows are the tile's tokens (logits, weights), or 64
coordinates of a value (sums); columns are always the N.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lrkv_jax.kernels.online import MASKED
from lrkv_jax.kernels.split_kv.plan import WIDTH
from lrkv_jax.kernels.split_kv.schedule import TILE

BLOCKS_AT_ONCE = 4  # of values: old sums and new ones need registers at the same time


def consume(plan, r, each_segment, unit, worker, me, *, T, scale):
    """Online softmax over each segment's tiles for this warpgroup's columns."""
    N, heads, blocks = plan.columns, plan.heads, plan.rank_blocks
    layout = plgpu.Layout.WGMMA
    column = plgpu.broadcasted_iota(jnp.int32, (TILE, N), 1, layout=layout)
    row = plgpu.broadcasted_iota(jnp.int32, (TILE, N), 0, layout=layout)
    zeros = plgpu.layout_cast(jnp.zeros((TILE, N), jnp.float32), layout)

    if plan.full:
        # What depends on the heads alone stays for all segments.
        factors = heads * blocks
        begin = (unit * plan.warpgroups + me) * factors
        up = r.up_s.at[pl.ds(me * factors, factors)]
        plgpu.copy_gmem_to_smem(r.up.at[pl.ds(begin, factors)], up, r.set_up.at[me])
        plgpu.copy_gmem_to_smem(r.turn, r.turn_s.at[me], r.set_up.at[me])
        plgpu.copy_gmem_to_smem(r.base.at[worker], r.base_s.at[me], r.set_up.at[me])
        plgpu.barrier_wait(r.set_up.at[me])

    def along(vector, axis, shape=(TILE, N)):
        return lax.broadcast_in_dim(vector, shape, [axis])

    def turned(angle, by):
        cos, sin = angle
        c, s = (along(by[i], 1, (TILE, WIDTH)) for i in (0, 1))
        return cos * c - sin * s, sin * c + cos * s

    def shared_slot(i, index):
        return lax.rem(i * plan.tile_slots + index, plan.ring)

    def free_shared(i, begin, count):
        @pl.loop(begin, begin + count)
        def _(index):
            plgpu.barrier_arrive(r.free.at[shared_slot(i, index)])

    def head_slot(i, index):
        return me * plan.head_ring + lax.rem(2 * i * heads * blocks + index, plan.head_ring)

    def logits_of(i, angle):
        def products(acc):
            @pl.loop(0, plan.key_blocks)
            def _(block):
                slot = shared_slot(i, block)
                plgpu.barrier_wait(r.ready.at[slot])
                query = r.queries_s.at[me * plan.query_blocks + block]
                plgpu.wgmma(acc, r.slots.at[slot], query.T)

            if plan.rank and not plan.full:

                @pl.loop(0, heads * blocks)
                def _(index):
                    slot = head_slot(i, index)
                    plgpu.barrier_wait(r.head_ready.at[slot])
                    query = r.queries_s.at[me * plan.query_blocks + plan.key_blocks + index]
                    plgpu.wgmma(acc, r.head_slots.at[slot], query.T)
                    # The product before this one is done: its slot may be filled again.
                    plgpu.wgmma_wait(1)

                    @pl.when(index > 0)
                    def _():
                        plgpu.barrier_arrive(r.head_free.at[head_slot(i, index - 1)])

            return acc[...]

        logits = pl.run_scoped(products, plgpu.ACC((TILE, N), jnp.float32))
        if not plan.values_in_keys:
            free_shared(i, 0, plan.key_blocks)
        if plan.rank and not plan.full:
            plgpu.barrier_arrive(r.head_free.at[head_slot(i, heads * blocks - 1)])
        if plan.full:

            def add(head, logits):
                return residual_logits(i, head, angle, logits)

            logits = lax.fori_loop(0, heads, add, logits)
        if plan.norm_heads:
            slot = 2 * me + lax.rem(i, 2)
            plgpu.barrier_wait(r.norm_ready.at[slot])
            norm = along(r.norm_s[slot, 0], 0)
            for head in range(1, plan.norm_heads):
                mine = column >= head * plan.queries
                norm = jnp.where(mine, along(r.norm_s[slot, head], 0), norm)
            logits *= norm
        return logits * (scale * math.log2(math.e))

    def residual_logits(i, head, angle, logits):
        """Add a head's residual key tile, rebuilt and rotated, against its queries."""

        def rebuild(first, second):
            for block in range(blocks):
                slot = head_slot(i, head * blocks + block)
                plgpu.barrier_wait(r.head_ready.at[slot])
                up = r.up_s.at[(me * heads + head) * blocks + block]
                plgpu.wgmma(first, r.head_slots.at[slot], up.at[:, pl.ds(0, WIDTH)])
                plgpu.wgmma(second, r.head_slots.at[slot], up.at[:, pl.ds(WIDTH, WIDTH)])
            return first[...], second[...]

        residual = plgpu.ACC((TILE, WIDTH), jnp.float32)
        first, second = pl.run_scoped(rebuild, residual, residual)
        for block in range(blocks):
            plgpu.barrier_arrive(r.head_free.at[head_slot(i, head * blocks + block)])
        cos, sin = angle
        first, second = first * cos - second * sin, second * cos + first * sin

        def add(t, logits):
            c = head * plan.queries + t
            a, b = (along(r.full_s[me, c, half], 1, (TILE, WIDTH)) for half in (0, 1))
            dots = (first * a + second * b).sum(axis=1)
            return logits + jnp.where(column == c, along(dots, 0), 0.0)

        return lax.fori_loop(0, T, add, logits)

    def zero_tail(slots, slot, valid):
        """Rows that no token was written to may hold anything, and 0 times NaN is NaN."""
        wide = plgpu.broadcasted_iota(jnp.int32, (TILE, WIDTH), 0, layout=layout)
        value = slots[slot].astype(jnp.float32)
        slots[slot] = jnp.where(wide < valid, value, 0.0).astype(slots.dtype)
        plgpu.commit_smem()

    def averages(i, valid, old, decay):
        """Old sums, decayed, plus the tile's values weighted: shared blocks, then latent ones."""
        offset = 0 if plan.values_in_keys else plan.key_blocks
        if not plan.values_in_keys:

            @pl.loop(0, plan.value_blocks)
            def _(block):
                plgpu.barrier_wait(r.ready.at[shared_slot(i, offset + block)])

        # One warpgroup zeroes what all share, and the others wait. Where the values are the keys,
        # another may still be reading these rows for logits, which are masked whatever they say.
        @pl.when(valid < TILE)
        def _():
            @pl.when(me == 0)
            def _():
                @pl.loop(0, plan.value_blocks)
                def _(block):
                    zero_tail(r.slots, shared_slot(i, offset + block), valid)

            if plan.warpgroups > 1:
                plgpu.barrier_arrive(r.zeroed)
                plgpu.barrier_wait(r.zeroed)

        def products(blocks):
            def run(*accs):
                for block, acc in zip(blocks, accs, strict=True):
                    slot = shared_slot(i, offset + block)
                    plgpu.wgmma(acc, r.slots.at[slot].T, r.weights.at[me].T)
                return [acc[...] for acc in accs]

            return pl.run_scoped(run, *[plgpu.ACC((WIDTH, N), jnp.float32)] * len(blocks))

        # A few blocks at a time: old sums and new ones need registers at once.
        sums = []
        for begin in range(0, plan.value_blocks, BLOCKS_AT_ONCE):
            new = products(range(plan.value_blocks)[begin : begin + BLOCKS_AT_ONCE])
            sums += [sum_ * decay + more for sum_, more in zip(old[begin:], new, strict=False)]
        used = plan.key_blocks if plan.values_in_keys else plan.value_blocks
        free_shared(i, offset, used)

        def add(head, latent):
            of_head = lax.div(column, jnp.int32(plan.queries)) == head
            begin = (heads + head) * blocks
            mine = [head_average(head_slot(i, begin + block), valid) for block in range(blocks)]
            return tuple(
                old + jnp.where(of_head, more, 0.0) for old, more in zip(latent, mine, strict=True)
            )

        latent = tuple(value * decay for value in old[plan.value_blocks :])
        return (*sums, *(lax.fori_loop(0, heads, add, latent) if blocks else ()))

    def head_average(slot, valid):
        plgpu.barrier_wait(r.head_ready.at[slot])

        @pl.when(valid < TILE)
        def _():
            zero_tail(r.head_slots, slot, valid)

        def product(acc):
            plgpu.wgmma(acc, r.head_slots.at[slot].T, r.weights.at[me].T)
            return acc[...]

        mine = pl.run_scoped(product, plgpu.ACC((WIDTH, N), jnp.float32))
        plgpu.barrier_arrive(r.head_free.at[slot])
        return mine

    def attend(sequence, first, tiles, done):
        """One segment, whose first tile is the worker's `done`-th."""
        own = (sequence, unit, me)
        mine = pl.ds(me * plan.query_blocks, plan.query_blocks)
        plgpu.copy_gmem_to_smem(r.queries.at[own], r.queries_s.at[mine], r.asked.at[me])
        if plan.full:
            plgpu.copy_gmem_to_smem(r.full_queries.at[own], r.full_s.at[me], r.asked.at[me])
        plgpu.barrier_wait(r.asked.at[me])
        length = r.lengths[sequence]

        def tile(k, carry):
            peak, total, sums, angle = carry
            i, start = done + k, (first + k) * TILE
            logits = logits_of(i, angle)
            query = jnp.minimum(lax.rem(column, jnp.int32(plan.queries)), T - 1)
            seen = row + start <= length - T + query
            logits = jnp.where(seen, logits, MASKED)
            new_peak = jnp.maximum(peak, logits.max(axis=0))
            weights = jnp.where(seen, jnp.exp2(logits - along(new_peak, 1)), 0.0)
            decay = along(jnp.exp2(peak - new_peak), 1)
            r.weights.at[me].T[...] = weights.astype(r.weights.dtype)
            plgpu.commit_smem()
            if plan.norm_heads:
                # After the fence above: the copy engine's next write must not overtake our read.
                plgpu.barrier_arrive(r.norm_free.at[2 * me + lax.rem(i, 2)])
            sums = averages(i, length - start, sums, decay)
            if plan.full:
                angle = turned(angle, r.turn_s.at[me])
            return new_peak, total * decay + weights, sums, angle

        peak = plgpu.layout_cast(jnp.full((N,), MASKED, jnp.float32), layout.reduce(0))
        sums = (zeros,) * (plan.value_blocks + blocks)
        carry = (peak, zeros, sums, first_angle(first) if plan.full else ())
        peak, total, sums, _ = lax.fori_loop(0, tiles, tile, carry)
        write(worker + sequence, peak, total, sums)
        return done + tiles

    def first_angle(first):
        """Angles of a segment's first tile; only a worker's first segment starts beyond 0."""
        table = [plgpu.load(r.in_tile.at[i], layout=layout, optimized=False) for i in (0, 1)]
        return turned(table, r.base_s.at[me, jnp.where(first > 0, 1, 0)])

    def write(place, peak, total, sums):
        for block, value in enumerate(sums):
            r.sums_s[me] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(r.sums_s.at[me], r.sums.at[place, unit, me, block])
            plgpu.wait_smem_to_gmem(0)
        r.peak_s[me] = peak
        r.total_s[me] = total.sum(axis=0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.peak_s.at[me], r.peak.at[place, unit, me])
        plgpu.copy_smem_to_gmem(r.total_s.at[me], r.total.at[place, unit, me])
        plgpu.wait_smem_to_gmem(0)

    each_segment(attend, jnp.int32(0))
