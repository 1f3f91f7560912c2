"""The warpgroups that attend: an online softmax over tiles, for N (head, query) columns each.

Products are transposed: their rows are the tokens of a tile, or the coordinates of a block of
values. Names of arrays in registers end in their axes:

M = 64 tokens of a tile  N columns of a warpgroup  X = 64 coordinates of a block of values
J = 64 padded frequency pairs
"""

import math
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lrkv_jax.kernels.gpu.plan import WIDTH
from lrkv_jax.kernels.gpu.schedule import TILE
from lrkv_jax.kernels.online import MASKED

LAYOUT = plgpu.Layout.WGMMA
BLOCKS_AT_ONCE = 4  # of values: old sums and new ones need registers at the same time


class Consumer:
    """The `me`-th warpgroup of a CTA, which attends for `plan.heads` of the heads of `unit`.

    `r` holds arrays, results and scratch by name (`launch`). T is the number of queries per
    sequence, of all heads that share latents, `scale` multiplies the logits, and `i`
    counts the tiles of the worker.
    """

    def __init__(self, plan, r, unit, me, *, T, scale):
        self.plan, self.r = plan, r
        self.unit, self.me = unit, me
        self.T, self.tokens, self.scale = T, T // plan.repeats, scale
        shape = TILE, plan.columns
        self.column_MN = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT)
        self.row_MN = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT)
        self.zeros_MN = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT)

    def run(self, each_piece):
        """Attend to each piece of the worker, one after another."""
        if self.plan.full:
            self._load_factors()
        if self.plan.warpgroups == 1:
            each_piece(self._attend, jnp.int32(0))
            return

        @pl.when(self.me == 1)
        def _():
            plgpu.barrier_arrive(self.r.exchange.at[0])

        each_piece(self._attend, jnp.int32(0))

        @pl.when(self.me == 0)
        def _():  # no barrier is left with a phase unseen
            plgpu.barrier_wait(self.r.exchange.at[0])

    def _attend(self, place, sequence, first, tiles, done):
        """One piece, whose first tile is the worker's `done`-th: its sums go to memory."""
        plan, r, me = self.plan, self.r, self.me
        self._load_queries(sequence)
        length, before = r.lengths[sequence], done - first

        def tile(t, carry):
            peak_N, total_MN, sums_XN, angle_MJ = carry
            i, start = t + before, t * TILE
            logits_MN = self._logits(i, angle_MJ)
            seen_MN = self.row_MN + start <= length - self.tokens + self._token()
            logits_MN = jnp.where(seen_MN, logits_MN, MASKED)
            new_peak_N = jnp.maximum(peak_N, self._over_rows(jnp.max, logits_MN, i))
            weights_MN = jnp.where(seen_MN, jnp.exp2(logits_MN - self._rows(new_peak_N)), 0.0)
            # The same in all rows: it scales both totals [M, N] and sums [X, N].
            decay_MN = self._rows(jnp.exp2(peak_N - new_peak_N))
            r.weights.at[me].T[...] = weights_MN.astype(r.weights.dtype)
            plgpu.commit_smem()
            if plan.norm_heads:
                # After the fence above: the copy engine's next write must not overtake our read.
                plgpu.barrier_arrive(r.norm_free.at[self._norm_slot(i)])
            sums_XN = self._sums(i, length - start, sums_XN, decay_MN)
            if plan.full:
                angle_MJ = _turned(angle_MJ, r.turn_s.at[me])
            return new_peak_N, total_MN * decay_MN + weights_MN, sums_XN, angle_MJ

        peak_N = jnp.full((plan.columns,), MASKED, jnp.float32)
        peak_N = plgpu.layout_cast(peak_N, LAYOUT.reduce(0))
        sums_XN = (self.zeros_MN,) * (plan.value_blocks + plan.rank_blocks)
        angle_MJ = self._first_angle(first) if plan.full else ()
        carry = (peak_N, self.zeros_MN, sums_XN, angle_MJ)
        peak_N, total_MN, sums_XN, _ = lax.fori_loop(first, first + tiles, tile, carry)
        self._write(place, peak_N, total_MN, sums_XN)
        return done + tiles

    def _token(self):
        """The token of each column's query, 0 to `tokens` − 1."""
        plan, column_MN = self.plan, self.column_MN
        if plan.repeats == 1:
            return jnp.minimum(lax.rem(column_MN, jnp.int32(plan.queries)), self.tokens - 1)
        if plan.queries % self.tokens:
            column_MN = lax.rem(column_MN, jnp.int32(plan.queries))
        return lax.rem(column_MN, jnp.int32(self.tokens))

    def _logits(self, i, angle_MJ):
        """scale · log2(e) · (keys · queries) · inverse norms, [M, N]."""
        plan, r = self.plan, self.r
        acc_MN = plgpu.ACC((TILE, plan.columns), jnp.float32)
        logits_MN = pl.run_scoped(partial(self._cached_logits, i), acc_MN)
        if not plan.values_in_keys:
            self._free_shared(i, 0, plan.key_blocks)
        if plan.rank and not plan.full:
            last = plan.heads * plan.rank_blocks - 1
            plgpu.barrier_arrive(r.head_free.at[self._head_slot(i, last)])
        if plan.full:
            add = partial(self._add_residual, i, angle_MJ)
            logits_MN = lax.fori_loop(0, plan.heads, add, logits_MN)
        if plan.norm_heads:
            logits_MN *= self._inverse_norms(i)
        return logits_MN * (self.scale * math.log2(math.e))

    def _cached_logits(self, i, acc_MN):
        """The cached blocks, shared keys and then latents, against their blocks of queries."""
        plan, r = self.plan, self.r

        @pl.loop(0, plan.key_blocks)
        def _(block):
            slot = self._shared_slot(i, block)
            plgpu.barrier_wait(r.ready.at[slot])
            query = r.queries_s.at[self.me * plan.query_blocks + block]
            plgpu.wgmma(acc_MN, r.slots.at[slot], query.T)

        if plan.rank and not plan.full:

            @pl.loop(0, plan.heads * plan.rank_blocks)
            def _(index):
                slot = self._head_slot(i, index)
                plgpu.barrier_wait(r.head_ready.at[slot])
                query = r.queries_s.at[self.me * plan.query_blocks + plan.key_blocks + index]
                plgpu.wgmma(acc_MN, r.head_slots.at[slot], query.T)
                # The product before this one is done: its slot may be filled again.
                plgpu.wgmma_wait(1)

                @pl.when(index > 0)
                def _():
                    plgpu.barrier_arrive(r.head_free.at[self._head_slot(i, index - 1)])

        return acc_MN[...]

    def _add_residual(self, i, angle_MJ, head, logits_MN):
        """The logits plus a head's residual key tile, rebuilt and rotated, against its queries."""
        plan, r, me = self.plan, self.r, self.me
        blocks = plan.rank_blocks

        def rebuild(acc_M2J):
            for block in range(blocks):
                slot = self._head_slot(i, head * blocks + block)
                plgpu.barrier_wait(r.head_ready.at[slot])
                up = r.up_s.at[(me * plan.heads + head) * blocks + block]
                # One product for both halves: the latents are read from shared memory once.
                plgpu.wgmma(acc_M2J, r.head_slots.at[slot], up)
            return acc_M2J[...]

        key_M2J = pl.run_scoped(rebuild, plgpu.ACC((TILE, 2 * WIDTH), jnp.float32))
        key_MJ = key_M2J[:, :WIDTH], key_M2J[:, WIDTH:]
        for block in range(blocks):
            plgpu.barrier_arrive(r.head_free.at[self._head_slot(i, head * blocks + block)])
        first_MJ, second_MJ = _rotated(key_MJ, angle_MJ)

        def add(t, logits_MN):
            column = head * plan.queries + t
            a_MJ, b_MJ = (_along(r.full_s[me, column, half], 1, WIDTH) for half in (0, 1))
            dots_M = (first_MJ * a_MJ + second_MJ * b_MJ).sum(axis=1)
            return logits_MN + jnp.where(self.column_MN == column, self._columns(dots_M), 0.0)

        return lax.fori_loop(0, self.T, add, logits_MN)

    def _inverse_norms(self, i):
        """The inverse norm of each token's key in each column's head, [M, N]."""
        plan, r = self.plan, self.r
        slot = self._norm_slot(i)
        plgpu.barrier_wait(r.norm_ready.at[slot])
        norm_MN = self._columns(r.norm_s[slot, 0])
        for head in range(1, plan.norm_heads):
            from_head_MN = self.column_MN >= head * plan.queries
            norm_MN = jnp.where(from_head_MN, self._columns(r.norm_s[slot, head]), norm_MN)
        return norm_MN

    def _sums(self, i, valid, old_XN, decay_MN):
        """Old sums, decayed, plus the tile's values weighted: shared blocks, then latent ones."""
        plan = self.plan
        shared_XN = self._shared_sums(i, valid, old_XN[: plan.value_blocks], decay_MN)
        latent_XN = tuple(sum_XN * decay_MN for sum_XN in old_XN[plan.value_blocks :])
        if plan.rank:
            add = partial(self._add_latent, i, valid)
            latent_XN = lax.fori_loop(0, plan.heads, add, latent_XN)
        return *shared_XN, *latent_XN

    def _shared_sums(self, i, valid, old_XN, decay_MN):
        """Old sums, decayed, plus blocksᵀ · weights of the values that all heads share."""
        plan, r = self.plan, self.r
        begin = 0 if plan.values_in_keys else plan.key_blocks

        def slot_of(block):
            return self._shared_slot(i, begin + block)

        if not plan.values_in_keys:

            @pl.loop(0, plan.value_blocks)
            def await_block(block):
                plgpu.barrier_wait(r.ready.at[slot_of(block)])

        # One warpgroup zeroes what all share, and the others wait. Where the values are the keys,
        # another may still be reading these rows for logits, which are masked in any case.
        @pl.when(valid < TILE)
        def _():
            @pl.when(self.me == 0)
            def _():
                @pl.loop(0, plan.value_blocks)
                def _(block):
                    _zero_tail(r.slots, slot_of(block), valid)

            if plan.warpgroups > 1:
                # An index that is not known before: a fixed address would be held, and spilled.
                last = plan.ring + jnp.minimum(i, 0)
                plgpu.barrier_arrive(r.free.at[last])
                plgpu.barrier_wait(r.free.at[last])

        sums_XN = []
        for first in range(0, plan.value_blocks, BLOCKS_AT_ONCE):
            some = range(plan.value_blocks)[first : first + BLOCKS_AT_ONCE]
            new_XN = self._weighted(r.slots, slot_of, some)
            sums_XN += [
                old_XN[block] * decay_MN + more_XN
                for block, more_XN in zip(some, new_XN, strict=True)
            ]
        self._free_shared(i, begin, plan.key_blocks if plan.values_in_keys else plan.value_blocks)
        return sums_XN

    def _add_latent(self, i, valid, head, sums_XN):
        """The sums plus blocksᵀ · weights of a head's latent values, in the head's columns."""
        plan, r = self.plan, self.r
        first = head * plan.queries
        mine_MN = (self.column_MN >= first) & (self.column_MN < first + plan.queries)
        begin = (plan.heads + head) * plan.rank_blocks

        def average(block):
            slot = self._head_slot(i, begin + block)
            plgpu.barrier_wait(r.head_ready.at[slot])

            @pl.when(valid < TILE)
            def _():
                _zero_tail(r.head_slots, slot, valid)

            [new_XN] = self._weighted(r.head_slots, lambda _: slot, [block])
            plgpu.barrier_arrive(r.head_free.at[slot])
            return new_XN

        new_XN = [average(block) for block in range(plan.rank_blocks)]
        return tuple(
            sum_XN + jnp.where(mine_MN, more_XN, 0.0)
            for sum_XN, more_XN in zip(sums_XN, new_XN, strict=True)
        )

    def _weighted(self, slots, slot_of, blocks):
        """blocksᵀ · weights, [X, N] each."""

        def products(*accs_XN):
            for block, acc_XN in zip(blocks, accs_XN, strict=True):
                weights = self.r.weights.at[self.me]
                plgpu.wgmma(acc_XN, slots.at[slot_of(block)].T, weights.T)
            return [acc_XN[...] for acc_XN in accs_XN]

        acc_XN = plgpu.ACC((WIDTH, self.plan.columns), jnp.float32)
        return pl.run_scoped(products, *[acc_XN] * len(blocks))

    def _load_factors(self):
        """Bring in what depends on the heads alone and stays for all pieces."""
        r, me = self.r, self.me
        factors = self.plan.heads * self.plan.rank_blocks
        begin = (self.unit * self.plan.warpgroups + me) * factors
        up = r.up_s.at[pl.ds(me * factors, factors)]
        plgpu.copy_gmem_to_smem(r.up.at[pl.ds(begin, factors)], up, r.factors_ready.at[me])
        plgpu.copy_gmem_to_smem(r.turn, r.turn_s.at[me], r.factors_ready.at[me])
        plgpu.barrier_wait(r.factors_ready.at[me])

    def _load_queries(self, sequence):
        plan, r, me = self.plan, self.r, self.me
        own = (sequence, self.unit, me)
        mine = pl.ds(me * plan.query_blocks, plan.query_blocks)
        plgpu.copy_gmem_to_smem(r.queries.at[own], r.queries_s.at[mine], r.queries_ready.at[me])
        if plan.full:
            plgpu.copy_gmem_to_smem(r.full_queries.at[own], r.full_s.at[me], r.queries_ready.at[me])
        plgpu.barrier_wait(r.queries_ready.at[me])

    def _first_angle(self, first):
        """Angles of a piece's first tile: those of a tile, turned by those of its first token."""

        def load(ref, layout):
            return [plgpu.load(ref.at[i], layout=layout, optimized=False) for i in (0, 1)]

        base_J = load(self.r.angles.at[first * TILE], LAYOUT.reduce(0))
        return _turned(load(self.r.in_tile, LAYOUT), base_J)

    def _write(self, place, peak_N, total_MN, sums_XN):
        """Write a piece's results to memory, by way of shared memory."""
        r, me = self.r, self.me
        for block, sum_XN in enumerate(sums_XN):
            r.sums_s[me] = sum_XN
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(r.sums_s.at[me], r.sums.at[place, self.unit, me, block])
            plgpu.wait_smem_to_gmem(0)
        r.peak_s[me] = peak_N
        r.total_s[me] = self._over_rows(jnp.sum, total_MN, place)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.peak_s.at[me], r.peak.at[place, self.unit, me])
        plgpu.copy_smem_to_gmem(r.total_s.at[me], r.total.at[place, self.unit, me])
        plgpu.wait_smem_to_gmem(0)

    def _over_rows(self, reduce, array_MN, i):
        """The rows reduced to one, [N], by one warpgroup after the other.

        A warpgroup's four warps have 16 rows each, and Mosaic has them meet in one place in shared
        memory, the same for all warpgroups.
        """
        if self.plan.warpgroups == 1:
            return reduce(array_MN, axis=0)
        # An index that is not known before: a fixed address would be held, and spilled.
        mine = self.me + jnp.minimum(i, 0)
        plgpu.barrier_wait(self.r.exchange.at[mine])
        reduced_N = reduce(array_MN, axis=0)
        plgpu.barrier_arrive(self.r.exchange.at[1 - self.me])
        return reduced_N

    def _shared_slot(self, i, index):
        return lax.rem(i * self.plan.tile_slots + index, self.plan.ring)

    def _free_shared(self, i, begin, count):
        @pl.loop(begin, begin + count)
        def _(index):
            plgpu.barrier_arrive(self.r.free.at[self._shared_slot(i, index)])

    def _head_slot(self, i, index):
        plan = self.plan
        return self.me * plan.head_ring + lax.rem(
            2 * i * plan.heads * plan.rank_blocks + index, plan.head_ring
        )

    def _norm_slot(self, i):
        return 2 * self.me + lax.rem(i, 2)

    def _rows(self, vector_N):
        """The vector in each of 64 rows."""
        return _along(vector_N, 1, self.plan.columns)

    def _columns(self, vector_M):
        """The vector in each of N columns."""
        return _along(vector_M, 0, self.plan.columns)


def _along(vector, axis, columns):
    """[64, columns], whose `axis` is the vector's."""
    return lax.broadcast_in_dim(vector, (TILE, columns), [axis])


def _rotated(pair_MJ, angle_MJ):
    """Both coordinates of each frequency pair, turned by the angle whose cos and sin are given."""
    (x_MJ, y_MJ), (cos_MJ, sin_MJ) = pair_MJ, angle_MJ
    return x_MJ * cos_MJ - y_MJ * sin_MJ, y_MJ * cos_MJ + x_MJ * sin_MJ


def _turned(angle_MJ, by_2J):
    """The sum of the tokens' angles and one angle for all of them, as cos and sin."""
    return _rotated(angle_MJ, [_along(by_2J[i], 1, WIDTH) for i in (0, 1)])


def _zero_tail(slots, slot, valid):
    """Rows that no token was written to may hold anything, and 0 times NaN is NaN."""
    row_MX = plgpu.broadcasted_iota(jnp.int32, (TILE, WIDTH), 0, layout=LAYOUT)
    value_MX = slots[slot].astype(jnp.float32)
    slots[slot] = jnp.where(row_MX < valid, value_MX, 0.0).astype(slots.dtype)
    plgpu.commit_smem()
