"""The static shape of a split-KV decode: how heads share a CTA, and how much is in flight.

B batch  T queries  S cache slots  H heads  G key/value heads  N columns
"""

from dataclasses import dataclass, replace

from lrkv_jax.kernels.gpu.schedule import TILE

WIDTH = 64  # values of a slot's row: a 128-byte swizzled row in 16 bits
MULTIPROCESSORS = 132  # of an H200
SHARED_MEMORY = 232_448 - 2048  # bytes of a multiprocessor, less what the compiler keeps
ITEMSIZE = 2
SLOT_BYTES = TILE * WIDTH * ITEMSIZE
MOST_QUERIES = 8
# Float32 registers a thread may hold for logits, weights and sums, all [64, N].
ACCUMULATORS = 92
TWO_CTAS_ACCUMULATORS = 48  # with which a thread needs at most 128 registers
MOST_SLOTS = 28  # of a ring: its barriers keep their state in the bits of one register


@dataclass(frozen=True)
class KernelPlan:
    """The kernel's compile-time plan. Heads are split evenly over units and warpgroups."""

    heads: int  # query heads per warpgroup
    queries: int  # columns per head: T rounded up to 1, 2, 4 or 8
    warpgroups: int  # that consume, in a CTA
    units: int  # CTAs per worker
    groups: int  # G
    key_widths: tuple[int, ...]  # of each array that the keys of a group are made of
    value_width: int
    values_in_keys: bool = False  # the values are the first of those arrays (MLA)
    rank: int = 0  # cached width of a head's latents; 0 without latents
    full: bool = False  # residual keys are rebuilt and rotated
    repeats: int = 1  # heads that share latents: T / repeats queries of each, one after another
    norm_heads: int = 0  # rows of inverse norms per warpgroup; 0 without QK-norm
    shared_norm: bool = False  # one row serves all heads
    ring: int = 0  # slots that all warpgroups read
    head_ring: int = 0  # slots of each warpgroup's private ring
    ctas: int = 1  # per multiprocessor
    workers: int = 0

    @property
    def query_heads(self):
        """H, all units' heads together."""
        return self.units * self.warpgroups * self.heads

    @property
    def columns(self):
        return -(-self.heads * self.queries // 8) * 8

    @property
    def key_blocks(self):
        return sum(-(-width // WIDTH) for width in self.key_widths)

    @property
    def value_blocks(self):
        return -(-self.value_width // WIDTH)

    @property
    def rank_blocks(self):
        return -(-self.rank // WIDTH)

    @property
    def query_blocks(self):
        """Blocks of queries in the cache's dtype: in `full`, the residual's are not among them."""
        latent = 0 if self.full else self.heads * self.rank_blocks
        return self.key_blocks + latent

    @property
    def tile_slots(self):
        """Slots of a tile that all warpgroups read."""
        return self.key_blocks + (0 if self.values_in_keys else self.value_blocks)

    @property
    def fixed_bytes(self):
        """Shared memory in addition to the rings."""
        N, Q, row = self.columns, self.warpgroups, WIDTH * ITEMSIZE
        total = Q * N * row * (self.query_blocks + 1)  # queries and weights
        total += Q * WIDTH * N * 4 + 2 * Q * N * 4  # staging of the results
        total += 2 * Q * self.norm_heads * TILE * 4
        if self.full:
            total += Q * self.heads * self.rank_blocks * WIDTH * 2 * row
            total += Q * (self.heads * self.queries + 1) * 2 * WIDTH * 4
        return total + 4096  # barriers, alignment, the reductions' scratch

    @property
    def accumulators(self):
        """Registers a thread holds through a tile: logits, weights, total and the sums."""
        angles = 2 * WIDTH * TILE // 128 if self.full else 0
        return self.columns // 2 * (3 + self.value_blocks + self.rank_blocks) + angles


def find(dtype, widths, impl, *, T, slots, paged, H, G, **shape):
    """(plan, None), or (None, why the kernel cannot take these arrays).

    `slots` is the length of the cache arrays' second axis, which with page tables is a page's.
    """
    interpret = impl == "interpret"
    if str(dtype) not in ("bfloat16", "float16") and not (interpret and str(dtype) == "float32"):
        return None, f"a {dtype} cache: the kernel takes bfloat16 or float16"
    if not 1 <= T <= MOST_QUERIES:
        return None, f"{T} queries a sequence: the kernel takes 1 to {MOST_QUERIES}"
    if paged and slots != TILE:
        return None, f"pages of {slots} slots: the kernel takes {TILE}"
    if slots % 8:
        return None, f"a cache of {slots} slots: the kernel takes a multiple of 8"
    for name, width in widths.items():
        # The copy engine takes rows of 16-byte multiples, in boxes of 64 values or one smaller.
        if width % 8 or (width > WIDTH and width % WIDTH):
            return None, f"{name} = {width}: the kernel takes a multiple of 8 up to 64, or of 64"
    # The interpreter runs one CTA after the other, idle ones too.
    multiprocessors = 4 if interpret else MULTIPROCESSORS
    plan = make_plan(H=H, G=G, T=T, multiprocessors=multiprocessors, **shape)
    return plan, None if plan else "no split of the heads fits a multiprocessor"


def make_plan(*, H, G, T, multiprocessors=MULTIPROCESSORS, **widths):
    """The plan that fits with the most query heads per CTA, or None.

    It reads the tiles that heads share least often.
    """
    queries = next(n for n in (1, 2, 4, 8) if n >= T)
    per_group = H // G
    rank = widths.get("rank", 0)
    for warpgroups in (2, 1):
        split = per_group // warpgroups
        if per_group % warpgroups or (warpgroups == 2 and not rank and per_group * queries < 16):
            continue
        for heads in range(split, 0, -1):
            if split % heads:
                continue
            # The compiler spills 448 to 896 bytes of these (6.3B), and none of those around it.
            if rank and not widths.get("full") and (warpgroups, heads, queries) == (2, 8, 2):
                continue
            norm = widths.get("norm_heads", 0) and (1 if widths.get("shared_norm") else heads)
            plan = KernelPlan(
                heads=heads, queries=queries, warpgroups=warpgroups,
                units=H // (heads * warpgroups), groups=G, **{**widths, "norm_heads": norm},
            )  # fmt: skip
            plan = with_rings(plan)
            if plan is not None and plan.accumulators <= ACCUMULATORS:
                return replace(plan, workers=max(1, multiprocessors * plan.ctas // plan.units))
    return None


def with_rings(plan):
    """The plan with rings that fill the shared memory, or None where they do not fit."""
    # One consumer cannot hide its latency: two CTAs then share a multiprocessor.
    two_fit = plan.accumulators <= TWO_CTAS_ACCUMULATORS
    ctas = 2 if plan.warpgroups == 1 and not plan.full and two_fit else 1
    free = (SHARED_MEMORY // ctas - plan.fixed_bytes) // SLOT_BYTES
    least = plan.key_blocks + 1
    if not plan.rank:
        ring = min(free, MOST_SLOTS, 6 * plan.tile_slots)
        return None if ring < least else replace(plan, ring=ring, ctas=ctas)
    # A tile's latents are `heads` times as many as its shared slots: rings in that proportion.
    per_tile = 2 * plan.heads * plan.rank_blocks
    share = plan.tile_slots / (plan.tile_slots + plan.warpgroups * per_tile)
    ring = max(least, min(round(free * share), 2 * plan.tile_slots))
    head_ring = min((free - ring) // plan.warpgroups, MOST_SLOTS // plan.warpgroups, 2 * per_tile)
    if ring < least or head_ring < plan.rank_blocks + 1:
        return None
    return replace(plan, ring=ring, head_ring=head_ring, ctas=ctas)
