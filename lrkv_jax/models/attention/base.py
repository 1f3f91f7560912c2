"""The contract of an attention layer: train on whole sequences, decode from a cache.

A variant supplies, in this order in its file:

- its cache, a dataclass (`lrkv_jax.models.attention.cache`), and its parameters;
- `queries`, each head's query in the form that is multiplied with the cache, and `new_kv`, what
  each token leaves there;
- `attend_cached`, attention of queries to the stored cache, through a decode kernel;
- `materialize_kv`, the keys and values of each head that the cache represents, and `expand_query`,
  the queries for those;
- `cache_shapes`, and `head_weights` for analysis.

`attend_full` (training) follows from these, and a variant that can do better replaces it. Decoding,
also of prompts, meshes and checks are here, once. Benchmarks time `attend_cached` and hold it
against `materialize_kv`.

B batch  T new tokens  S cache slots  D model width  H heads  K head width  W logit width
"""

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.config import ModelConfig
from lrkv_jax.distributed import manual_sharding
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.angles import turned_back
from lrkv_jax.kernels.gpu.plan import MOST_QUERIES
from lrkv_jax.models.attention.cache import (
    Cache,
    Pages,
    attend_tiles,
    in_int8,
    lengths_of,
    near,
    slots_of,
    write,
)
from lrkv_jax.models.attention.context_parallel import attend_sequences
from lrkv_jax.models.attention.head_weights import HeadWeights, in_float64
from lrkv_jax.models.attention.on_mesh import on_mesh, summed_over_heads
from lrkv_jax.models.layers import biased, gained, on_tensor, resolve_dtype, rms_norm
from lrkv_jax.models.rope import frequencies, logit_factor, rope_angles, rotate
from lrkv_jax.models.weights import by_rows, vector, weight

# Queries as a variant projects them: an array, or a tuple of arrays, [B, T, H, ...].
Query = Any


class Attention(nnx.Module):
    """One layer of attention: x [B, T, D] → [B, T, D].

    A cache of S slots serves sequences of up to S tokens, each with a length. `axis_rules`
    are pairs of a logical axis and the mesh axes that shard it, before those of `RULES`. `joins`
    names the weights that a layer multiplies with x through `product`; no subclass inherits it.
    """

    axis_rules: tuple[tuple[str, Any], ...] = ()
    joins: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig):
        """Make the output projection, zero at the start, and the vectors that variants share."""
        self.config = config
        takes = inspect.signature(self.attend_cached).parameters
        if config.window is not None and "first_B1" not in takes:
            raise LrkvError(
                f"model.window = {config.window}, and {type(self).__name__}.attend_cached takes no "
                "first_B1: see docs/new_variant.md, or use a variant of this package"
            )
        shape = (config.heads, config.head_width, config.width)
        self.output = weight("heads head_width -> embed", shape, std=0)
        entry, width = config.attention, config.attention.query_width(config)
        self.query_gain, self.key_gain = (
            vector("head_width", (width,), 1.0) if config.qk_gain else None for _ in range(2)
        )
        queries, keys = (config.heads, width), (entry.key_heads(config), width)
        self.query_bias, self.key_bias, self.output_bias = (
            vector(axes, shape, 0.0) if config.qkv_bias else None
            for axes, shape in (
                ("heads head_width", queries), ("kv_heads head_width", keys),
                ("embed", (config.width,)),
            )
        )  # fmt: skip

    # What a variant supplies.

    def queries(self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]) -> Query:
        """Each head's query, normed and rotated as the cache's keys are."""
        raise NotImplementedError

    def new_kv(self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]) -> Cache:
        """Each token's cache entries: the cache's dataclass with T slots."""
        raise NotImplementedError

    def attend_cached(
        self,
        query: Query,
        cache: Cache,
        positions_BT: Int[Array, "B T"],
        angles: Any,
        pages_BN: Pages = None,
        first_B1: Int[Array, "B 1"] | int = 0,
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"] | None]:
        """Heads' outputs for a few queries at `positions_BT`, the last ones of each sequence.

        The cache holds their tokens already; with `pages_BN` it is a pool of pages. `angles` is
        `slot_angles` of its slots. In a layer with a window slot 0 is at position `first_B1`. Also
        returns the log-sum-exp of each head's logits if the kernel gives it.
        """
        raise NotImplementedError

    def materialize_kv(
        self, cache: Cache, positions_BT: Int[Array, "1 S"]
    ) -> tuple[Float[Array, "B S G W"], Float[Array, "B S G K"]]:
        """The keys and values of the heads (or of groups of heads) in these slots."""
        raise NotImplementedError

    def expand_query(
        self, query: Query, positions_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T H W"]:
        """The queries for materialized keys."""
        return query

    def slot_angles(self, slots: int) -> Any:
        """The angles of slots' positions for `attend_cached`, or None."""
        return None

    def cache_shapes(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        """The cache as `jax.ShapeDtypeStruct`s, all of `dtype` except for inverse norms."""
        raise NotImplementedError

    def head_weights(self) -> HeadWeights:
        """Each head's matrices in float64, as if it shared none with another."""
        raise LrkvError(
            f"attention.kind = {self.config.attention.kind} cannot be analyzed: give its layer "
            f"{type(self).__name__} a method head_weights (docs/new_variant.md)"
        )

    # What every variant then has.

    def attend_full(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        attend: Callable[..., Float[Array, "B T H K"]],
    ) -> Float[Array, "B T H K"]:
        """Heads' outputs of causal attention over the sequence itself.

        `attend(q [B, T, H, W], k [B, T, G, W], v [B, T, G, K])` is `causal_attention`, wherever the
        sequence's positions lie; H and G are what this device has.
        """
        q_BTHW = self.expand_query(self.queries(x_BTD, positions_BT), positions_BT)
        new = self.new_kv(x_BTD, positions_BT)
        return attend(q_BTHW, *self.materialize_kv(new, positions_BT))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attend over whole sequences; tokens of different segments never see each other.

        Positions are 0 to T − 1 unless given. Of both [T] stands for every sequence. Raises
        `LrkvError` for arrays of another shape or dtype.
        """
        self._check_input(x_BTD)
        shape = x_BTD.shape[:2]
        positions_BT = jnp.arange(shape[1]) if positions_BT is None else positions_BT
        positions_BT = _integers("positions", positions_BT, shape)
        if segments_BT is not None:
            segments_BT = _integers("segments", segments_BT, shape)
        if manual_sharding.in_train_step():
            out_BTHK = on_tensor(Attention.heads, self, x_BTD, positions_BT, segments_BT)
        else:
            out_BTHK, _ = on_mesh(_heads, self, x_BTD, None, positions_BT, segments_BT)
        return self._project(out_BTHK)

    def heads(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T H K"]:
        """The heads' outputs that `__call__` projects; in a training step, this device's heads'."""
        key_heads = self.config.attention.key_heads(self.config)
        attend = partial(
            attend_sequences, scale=self.scale, segments_BT=segments_BT, key_heads=key_heads,
            window=self.config.window, impl=self.config.train_kernel,
        )  # fmt: skip
        return self.attend_full(x_BTD, positions_BT, attend)

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype | None = None) -> Cache:
        """An empty cache for `batch` sequences of up to `length` tokens.

        `dtype` is the computation's, `config.dtype`, unless given. Raises `LrkvError` for sizes and
        dtypes that no cache has.
        """
        try:
            dtype = jnp.dtype(dtype or resolve_dtype(self.config.dtype))
            smallest = min(operator.index(batch), operator.index(length))
        except TypeError:
            smallest = 0
        if smallest < 1:
            raise LrkvError(
                f"init_cache({batch!r}, {length!r}, {dtype!r}): give a batch and a length of 1 or "
                "more, and a dtype of JAX or none"
            )
        shapes = self.stored_shapes(batch, length, dtype)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def stored_shapes(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        """The cache as it is stored: some rows in eight bits, if `kv_cache_dtype` is int8."""
        shapes = self.cache_shapes(batch, length, dtype)
        return in_int8(shapes) if self.config.kv_cache_dtype == "int8" else shapes

    def decode(
        self,
        x_BTD: Float[Array, "B T D"],
        cache: Cache,
        lengths_B: Int[Array, "B"],
        pages_BN: Pages = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Attend T new tokens per sequence, after `lengths_B` cached ones, and cache them.

        With `pages_BN` the cache is a pool of pages (`lrkv_jax.models.attention.cache`).

        Up to `MOST_QUERIES` of them read the stored cache, in the decode kernel. For more, as
        when a prompt is prefilled in chunks, making each head's keys once costs less than meeting
        the factors once per query. Raises `LrkvError` for a cache that this layer would not make,
        and for tokens past its end; of traced lengths and of pools that is the caller's to know.
        """
        self._check_input(x_BTD)
        B, T = x_BTD.shape[:2]
        self._check(cache, B if pages_BN is None else None)
        lengths_B = _integers("lengths", lengths_B, (B,))
        if pages_BN is None:
            _check_room(lengths_B, T, slots_of(cache))
        elif np.shape(pages_BN)[:1] == (B,):  # a row of pages for each sequence
            pages_BN = _integers("pages", pages_BN, (B, np.shape(pages_BN)[-1]))
        else:
            raise LrkvError(f"pages {list(np.shape(pages_BN))}: give integers [{B}, pages]")
        positions_BT = lengths_B[:, None] + jnp.arange(T)
        attend = Attention._attend_from_cache if T <= MOST_QUERIES else Attention._prefill
        out_BTHK, cache = on_mesh(attend, self, x_BTD, cache, positions_BT, pages_BN)
        return self._project(out_BTHK), cache

    # What variants share.

    @property
    def scale(self) -> float:
        """1 / sqrt(query's width), the factor of logits; times YaRN's where keys are rotated."""
        entry = self.config.attention
        scaling = None if entry.mode == "none" else self.config.rope_scaling
        return entry.query_width(self.config) ** -0.5 * logit_factor(scaling)

    def normed(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        """QK-norm, RMSNorm over the last axis, if the model has it; its gain is not in it."""
        return rms_norm(x, self.config.norm_eps) if self.config.qk_norm else x

    def norm_and_rope(
        self,
        x_BTHK: Float[Array, "B T H K"],
        positions_BT: Int[Array, "B T"],
        gain: nnx.Param | None,
    ) -> Float[Array, "B T H K"]:
        """Whole queries or keys as logits take them: normed, gained, rotated."""
        if gain is None:  # then the rotation commutes with the norm
            return self.normed(self.rotated(x_BTHK, positions_BT))
        return self.rotated(gained(self.normed(x_BTHK), gain), positions_BT)

    def rotated(
        self, x_BTHK: Float[Array, "B T H K"], positions_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T H K"]:
        """RoPE over the last axis at each token's position; nothing in the mode `none`."""
        if self.config.attention.mode == "none":
            return x_BTHK
        cos, sin = self.angles_at(positions_BT, x_BTHK.shape[-1])
        return rotate(x_BTHK, cos[:, :, None], sin[:, :, None])

    def angles_at(
        self, positions: Int[Array, "..."], width: int
    ) -> tuple[Float[Array, "... J"], Float[Array, "... J"]]:
        """cos and sin by which `rotated` turns the J = width // 2 pairs of what is `width` wide."""
        return rope_angles(positions, width, self.config.rope_base, self.config.rope_scaling)

    def turned_back(
        self, q_BTHK: Float[Array, "B T H K"], first_B1: Int[Array, "B 1"] | int
    ) -> Float[Array, "B T H K"]:
        """Rotated queries as if positions counted from `first_B1`, as `slot_angles` do."""
        if self.config.window is None:
            return q_BTHK
        turn_B1K = jnp.concatenate(self.angles_at(jnp.asarray(first_B1), q_BTHK.shape[-1]), -1)
        return turned_back(q_BTHK, turn_B1K[:, :, None]).astype(q_BTHK.dtype)

    @property
    def frequencies(self) -> tuple[float, ...]:
        """The angles per position of a head's pairs, for kernels that rotate keys on reading."""
        model = self.config
        return frequencies(model.head_width, model.rope_base, model.rope_scaling)

    def table(self, slots: int, width: int) -> Float[Array, "S 2J"]:
        """cos and sin of each slot's position as one array, [cos, sin], for `slot_angles`."""
        return jnp.concatenate(self.angles_at(jnp.arange(slots), width), axis=-1)

    def logit_gain(self) -> np.ndarray | None:
        """The gains' factor of each coordinate of a logit's product, [K], in float64."""
        if self.query_gain is None:
            return None
        return in_float64(self.query_gain) * in_float64(self.key_gain)

    def _check_input(self, x_BTD):
        is_array, shape = hasattr(x_BTD, "dtype"), getattr(x_BTD, "shape", ())
        floating = is_array and jnp.issubdtype(x_BTD.dtype, jnp.floating)
        if len(shape) != 3 or shape[-1] != self.config.width or 0 in shape or not floating:
            given = _shape(x_BTD) if is_array else f"a {type(x_BTD).__name__}"
            raise LrkvError(
                f"the layer's input is {given}: give floating-point [batch, positions, "
                f"{self.config.width}], as wide as the model"
            )

    def _check(self, cache, batch):
        """Raise `LrkvError` unless this layer makes such caches for `batch` sequences, or a pool
        like this one for None."""
        own = self.stored_shapes(1, 1, jnp.float32)
        if type(cache) is not type(own):
            raise LrkvError(
                f"the cache is a {type(cache).__name__}, and this layer's is a "
                f"{type(own).__name__}: make it with this model's init_cache"
            )
        first = next(array for array in vars(cache).values() if array is not None)
        batch = first.shape[0] if batch is None else batch
        for name, leaf in vars(self.stored_shapes(batch, slots_of(cache), first.dtype)).items():
            ours, theirs = map(_shape, (leaf, vars(cache)[name]))
            if ours != theirs or not jnp.issubdtype(first.dtype, jnp.floating):
                raise LrkvError(
                    f"the cache's {name} is {theirs}, and this layer's is {ours} in its own "
                    "dtype: make it with this model's init_cache"
                )

    def _attend_from_cache(self, x_BTD, cache, positions_BT, pages_BN):
        """Heads' outputs for a few new tokens, and the cache with them in it."""
        query = self.queries(x_BTD, positions_BT)
        cache = write(cache, self.new_kv(x_BTD, positions_BT), positions_BT, pages_BN)
        seen, pages_BN, first_B1 = self._seen(cache, positions_BT, pages_BN)
        angles = self.slot_angles(slots_of(seen, pages_BN))
        first = {} if self.config.window is None else {"first_B1": first_B1}
        out_BTHK, _ = self.attend_cached(query, seen, positions_BT, angles, pages_BN, **first)
        return out_BTHK.astype(x_BTD.dtype), cache

    def _prefill(self, x_BTD, cache, positions_BT, pages_BN):
        """Heads' outputs for many tokens: keys and values exist for a tile of slots at a time."""
        q_BTHW = self.expand_query(self.queries(x_BTD, positions_BT), positions_BT)
        cache = write(cache, self.new_kv(x_BTD, positions_BT), positions_BT, pages_BN)
        seen, pages_BN, first_B1 = self._seen(cache, positions_BT, pages_BN)
        out_BTHK = attend_tiles(
            q_BTHW, seen, self.materialize_kv, lengths_of(positions_BT - first_B1),
            scale=self.scale, pages_BN=pages_BN, window=self.config.window, first_B1=first_B1,
        )  # fmt: skip
        return out_BTHK.astype(x_BTD.dtype), cache

    def _seen(self, cache, positions_BT, pages_BN):
        """What tokens at these positions attend to: (cache, pages, position of slot 0 [B, 1])."""
        if self.config.window is None:
            return cache, pages_BN, 0
        return near(cache, positions_BT, self.config.window, pages_BN)

    def _project(self, out_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        output_HKD, sharding = self.output[...].astype(out_BTHK.dtype), summed_over_heads(out_BTHK)
        if sharding is None:
            out_BTD = by_rows(out_BTHK, output_HKD, inputs=2)
        else:
            out_BTD = jnp.einsum("BTHK,HKD->BTD", out_BTHK, output_HKD, out_sharding=sharding)
        return biased(out_BTD, self.output_bias)


def _heads(layer, x_BTD, cache, positions_BT, segments_BT):
    return layer.heads(x_BTD, positions_BT, segments_BT), cache


def _integers(name, given, shape):
    """Integers of this shape, from what broadcasts to it; raises `LrkvError` for anything else."""
    try:
        found = jnp.asarray(given)
        if jnp.issubdtype(found.dtype, jnp.integer):
            return jnp.broadcast_to(found.astype(jnp.int32), shape)  # sums of small ones wrap
    except (TypeError, ValueError):  # no numbers, or of no such shape
        pass
    raise LrkvError(f"{name} = {str(given)[:60]}: give integers {list(shape)}")


def _check_room(lengths_B, T, slots):
    """Raise `LrkvError` for T tokens that the cache has no slots for: `write` drops them."""
    traced = isinstance(lengths_B, jax.core.Tracer) or not lengths_B.is_fully_addressable
    known_B = np.zeros(1, int) if traced else np.asarray(lengths_B)
    if known_B.min() < 0 or known_B.max() + T > slots:
        raise LrkvError(
            f"lengths {known_B.min()} to {known_B.max()} and {T} new tokens, in a cache of {slots} "
            "slots: lengths are 0 or more, and init_cache needs a length for all tokens"
        )


def _shape(array):
    parts = jax.tree.leaves(array)  # rows of eight bits have two
    return " and ".join(f"{part.dtype}{list(part.shape)}" for part in parts) or None
