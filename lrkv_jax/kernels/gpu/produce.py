"""The warpgroup that copies tiles of the cache into rings of slots, ahead of those that attend."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lrkv_jax.kernels.gpu.plan import WIDTH
from lrkv_jax.kernels.gpu.schedule import TILE


def produce(plan, r, each_piece, unit, zero):
    """Copy the tiles of all pieces into the rings, in the order in which they are consumed.

    `zero` is 0, but not known to be: a box from a constant index could not reach past its array's
    edge, where the copy engine fills it with zeros.
    """

    def put(source, slots, ready, free, index, size, offset=0):
        slot = lax.rem(index, size) + offset

        @pl.when(index >= size)
        def _():
            plgpu.barrier_wait(free.at[slot])

        plgpu.copy_gmem_to_smem(source, slots.at[slot], ready.at[slot])

    shared = [(r.keys, width) for width in plan.key_widths[:1]]
    shared += [(r.more_keys, width) for width in plan.key_widths[1:]]
    if not plan.values_in_keys:
        shared.append((r.values, plan.value_width))
    group = lax.div(unit * plan.groups, jnp.int32(plan.units))
    per_head = plan.heads * plan.rank_blocks

    def put_tile(i, tile, rows):
        """The worker's i-th tile, which is its sequence's `tile`-th, in these rows."""

        def put_shared(source, width, index):
            for block in range(-(-width // WIDTH)):
                box = source.at[(*rows, group, pl.ds(zero + block * WIDTH, WIDTH))]
                put(box, r.slots, r.ready, r.free, i * plan.tile_slots + index + block, plan.ring)
            return index + -(-width // WIDTH)

        def put_latents(source, begin):
            for head in range(plan.heads):
                for block in range(plan.rank_blocks):
                    index = 2 * i * per_head + begin + head * plan.rank_blocks + block
                    for w in range(plan.warpgroups):
                        h = (unit * plan.warpgroups + w) * plan.heads + head
                        box = source.at[(*rows, h, pl.ds(zero + block * WIDTH, WIDTH))]
                        put(
                            box, r.head_slots, r.head_ready, r.head_free, index,
                            plan.head_ring, w * plan.head_ring,
                        )  # fmt: skip

        index = 0
        for w in range(plan.warpgroups if plan.norm_heads else 0):
            h = (unit * plan.warpgroups + w) * plan.norm_heads if not plan.shared_norm else zero
            box = r.norms.at[rows[0], pl.ds(h, plan.norm_heads), rows[1]]
            put(box, r.norm_s, r.norm_ready, r.norm_free, i, 2, 2 * w)
        keys = plan.key_blocks
        for source, width in shared:
            if index == keys and plan.rank:
                put_latents(r.rk, 0)
            index = put_shared(source, width, index)
        if plan.rank:
            put_latents(r.rv, per_head)

    def put_piece(_, sequence, first, tiles, done):
        before = done - first

        @pl.loop(first, first + tiles)
        def _(tile):
            if r.pages is None:
                put_tile(tile + before, tile, (sequence, pl.ds(tile * TILE, TILE)))
            else:
                put_tile(tile + before, tile, (r.pages[sequence, tile], pl.ds(0, TILE)))

        return done + tiles

    tiles = each_piece(put_piece, jnp.int32(0))

    def drain(free, copies, size, offset=0):
        """Wait until the last slots are free: no barrier is left with a phase unseen."""

        @pl.loop(jnp.maximum(copies - size, 0), copies)
        def _(index):
            plgpu.barrier_wait(free.at[lax.rem(index, size) + offset])

    drain(r.free, tiles * plan.tile_slots, plan.ring)
    for w in range(plan.warpgroups):
        if plan.rank:
            drain(r.head_free, 2 * tiles * per_head, plan.head_ring, w * plan.head_ring)
        if plan.norm_heads:
            drain(r.norm_free, tiles, 2, 2 * w)
