"""The decoder-only Transformer: blocks stacked over layers and scanned.

With a `layers_pattern` a step of the scan is the layers of one cycle of it.

B batch  T positions  D model width  V vocabulary  L layers
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.config import ModelConfig
from lrkv_jax.distributed import manual_sharding
from lrkv_jax.distributed.rules import constrain_batch
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.cross_entropy import soft_cap
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token, parameter_counts
from lrkv_jax.models.attention.cache import Cache, Pages
from lrkv_jax.models.layers import MLP, Embedding, Head, Norm, resolve_dtype
from lrkv_jax.models.remat import Remat, rematerialized
from lrkv_jax.models.weights import draw, spec_of, variables, weight_specs, weights_of


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: ModelConfig):
        gain: dict[str, Any] = {"gain": config.norm_gain, "eps": config.norm_eps}
        self.norm_attention = Norm(config.width, **gain)
        self.attention = config.attention.layer_class()(config)
        self.norm_mlp = Norm(config.width, **gain)
        self.mlp = MLP(
            config.width, config.feed_forward_width, config.activation, gated=config.gated
        )

    def __call__(self, x_BTD, positions_BT, segments_BT=None):
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), positions_BT, segments_BT)
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))

    def decode(self, x_BTD, cache, lengths_B, pages_BN=None):
        x_normed_BTD = self.norm_attention(x_BTD)
        attended_BTD, cache = self.attention.decode(x_normed_BTD, cache, lengths_B, pages_BN)
        x_BTD = x_BTD + attended_BTD
        return x_BTD + self.mlp(self.norm_mlp(x_BTD)), cache


class Cycle(nnx.Module):
    """The blocks of one cycle of a layers' pattern, `layer_0` and so on."""

    def __init__(self, config: ModelConfig):
        self.length = len(config.cycle)
        for place, kind in enumerate(config.cycle):
            setattr(self, f"layer_{place}", Block(kind))


def _in_order(blocks: Block | Cycle) -> list[Block]:
    """The blocks of a cycle; a Block is one by itself."""
    if isinstance(blocks, Block):
        return [blocks]
    return [getattr(blocks, f"layer_{place}") for place in range(blocks.length)]


def main_layers(config: ModelConfig) -> list[int]:
    """The layers that have `attention`: all, or those of kind G."""
    kinds, main = config.cycles * config.cycle, config.main_kind
    return [layer for layer, kind in enumerate(kinds) if kind.window == main.window]


class Transformer(nnx.Module):
    """Tokens → logits. Parameters are float32, the computation `config.dtype`, logits float32.

    `blocks` is one Block whose weights have a leading layers axis, which a forward pass scans; with
    a `layers_pattern`, a Cycle of Blocks whose leading axis counts cycles. Models of one seed share
    every weight, layer by layer, that they have in common.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width)
        one = Block if config.layers_pattern is None else Cycle
        self.blocks: Any = nnx.vmap(lambda _: one(config))(jnp.arange(config.cycles))
        self.norm = Norm(config.width, gain=config.norm_gain, eps=config.norm_eps)
        self.head = None if config.tied_head else Head(config.vocabulary, config.width)
        draw(self, rngs.params())

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token at every position, from the whole sequence at once.

        `segments_BT` numbers the documents packed into a sequence: they never see each other.
        """
        return self.logits(self.hidden(tokens_BT, positions_BT, segments_BT))

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
        *,
        remat: Remat = "none",
        sums: bool = True,
    ) -> Float[Array, "B T D"]:
        """The normed stream before the head.

        `remat` names what a gradient computes again (`lrkv_jax.models.remat`). In a training step,
        `sums` decides whether layers' gradients are summed over all devices in their turn.
        """
        chex.assert_rank(tokens_BT, 2)
        if positions_BT is None:
            T = tokens_BT.shape[1]
            positions_T = manual_sharding.first_position(T) + jnp.arange(T)
            positions_BT = jnp.broadcast_to(positions_T, tokens_BT.shape)
        chex.assert_equal_shape([tokens_BT, positions_BT])
        x_BTD = self.embed(tokens_BT)
        x_BTD = self._through_blocks(x_BTD, (positions_BT, segments_BT), remat, sums)
        return _gathered(self.norm, x_BTD.dtype)(x_BTD)

    def _through_blocks(self, x_BTD, places, remat, sums):
        unroll, turns, stacked = max(1, self.config.unroll // len(self.config.cycle)), [], []
        for blocks in _in_order(self.blocks):
            weights, tree = jax.tree.flatten(blocks)
            # A loop of one turn is none to a compiler.
            unrolled = unroll > 1 or self.config.cycles == 1
            turn = rematerialized(partial(_block, tree), remat, unrolled=unrolled)
            if manual_sharding.in_train_step():
                one_layers = [v.get_metadata("spec").axes for v in variables(blocks)]
                turn = manual_sharding.fsdp_layer(turn, one_layers, sums=sums)
            turns.append(turn)
            stacked.append(weights)

        def cycle(x_BTD, stacked):
            for turn, weights in zip(turns, stacked, strict=True):
                x_BTD = turn(x_BTD, weights, places)
            return x_BTD, None

        return jax.lax.scan(cycle, x_BTD, stacked, unroll=unroll)[0]

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Soft-capped float32 logits of hidden states."""
        if self.head is not None:
            product, kernel = "btd,dv->btv", self.head.kernel[...]
        else:  # the table as it lies: programs would make a transposed and scaled copy of it
            product, kernel = "btd,vd->btv", self.embedding.table[...]
            x_BTD = x_BTD * self.config.width**-0.5
        logits_BTV = jnp.einsum(
            product, x_BTD, kernel.astype(x_BTD.dtype), preferred_element_type=jnp.float32
        )
        return soft_cap(logits_BTV, self.config.softcap)

    def head_kernel(self) -> Float[Array, "D V"]:
        """The head's matrix: a separate one, or the embedding's transpose scaled by 1/sqrt(D)."""
        dtype = resolve_dtype(self.config.dtype)
        if self.head is not None:
            return _gathered(self.head, dtype).kernel[...]
        return _gathered(self.embedding, dtype).table[...].T * self.config.width**-0.5

    def embed(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The stream before the first block."""
        x_BTD = self.embedding(tokens_BT, resolve_dtype(self.config.dtype))
        if self.config.embedding_norm:
            x_BTD = Norm(self.config.width, gain=False, eps=self.config.norm_eps)(x_BTD)
        return constrain_batch(x_BTD)


class Unstacked(Transformer):
    """The model with a list of L blocks instead of the stack, and with a cache for each.

    Decoding reads each layer's weights in place.
    """

    def __init__(self, model: Transformer):
        self.config = model.config
        self.embedding, self.norm, self.head = model.embedding, model.norm, model.head
        self.blocks = nnx.List(
            jax.tree.map(lambda leaf, at=at: leaf[at], block)
            for at in range(model.config.cycles)
            for block in _in_order(model.blocks)
        )

    def _through_blocks(self, x_BTD, places, remat, sums):
        for block in self.blocks:
            x_BTD = block(x_BTD, *places)
        return x_BTD

    def by_layer(self, of_windows: Sequence[Any]) -> list[Any]:
        """For each layer what its window has, of one thing for each of the config's `windows`."""
        found = dict(zip(self.config.windows, of_windows, strict=True))
        return [found[block.attention.config.window] for block in self.blocks]

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype | None = None) -> list[Cache]:
        """An empty cache a layer, for `batch` sequences of up to `length` tokens.

        `dtype` is the computation's unless given.
        """
        return [block.attention.init_cache(batch, length, dtype) for block in self.blocks]

    def decode(
        self,
        tokens_BT: Int[Array, "B T"],
        cache: list[Cache],
        lengths_B: Int[Array, "B"],
        pages_BN: Pages | tuple[Pages, ...] = None,
    ) -> tuple[Float[Array, "B T D"], list[Cache]]:
        """Hidden states of T new tokens a sequence after `lengths_B` cached ones, and the cache.

        With `pages_BN` each layer's cache is a pool of pages: all of them by one table, or by one
        for each of the config's `windows`.
        """
        chex.assert_rank([tokens_BT, lengths_B], [2, 1])
        x_BTD, new = self.embed(tokens_BT), []
        windows = len(self.config.windows)
        tables = self.by_layer(pages_BN if isinstance(pages_BN, tuple) else [pages_BN] * windows)
        for block, layer_cache, pages in zip(self.blocks, cache, tables, strict=True):
            x_BTD, layer_cache = block.decode(x_BTD, layer_cache, lengths_B, pages)
            new.append(layer_cache)
        return self.norm(x_BTD), new


def _block(tree, x_BTD, weights, places):
    return constrain_batch(tree.unflatten(weights)(x_BTD, *places))


def _gathered[M: nnx.Module](module: M, dtype: jnp.dtype) -> M:
    """The module with its weights gathered in `dtype`, in a training step; elsewhere, itself."""
    shards, tree = jax.tree.flatten(module)
    if not (shards and manual_sharding.in_train_step()):
        return module
    axes = [spec_of(variable).axes for variable in variables(module)]
    return jax.tree.unflatten(tree, manual_sharding.gathered(shards, axes, dtype))


def init_parameters(config: ModelConfig, seed: int) -> Any:
    """Fresh float32 parameters; a pure function of its arguments, to be jitted or not."""
    return weights_of(Transformer(config, rngs=nnx.Rngs(seed)))


def with_parameters(config: ModelConfig, params: Any) -> Transformer:
    """The model of `config` around a nested dict of arrays, as `weights_of` gives it."""
    return _shape_of(config)[0].unflatten(jax.tree.leaves(params))


def abstract_parameters(config: ModelConfig) -> Any:
    """The parameters of `init_parameters`, with `jax.ShapeDtypeStruct`s instead of arrays.

    Raises `LrkvError` for a variant whose layer does not exist, or is not as large as it counts.
    """
    return _shape_of(config)[1]


def specs(config: ModelConfig) -> Any:
    """The tree of `WeightSpec` that mirrors the parameters."""
    return _shape_of(config)[2]


# A training run calls this some forty times before its first step, at tens of milliseconds each.
@lru_cache
def _shape_of(config: ModelConfig) -> tuple[Any, Any, Any]:
    """The model's structure, the shapes of its parameters, and their `WeightSpec`s."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    _check_counts(config, [block.attention for block in _in_order(model.blocks)])
    return jax.tree.structure(model), weights_of(model), weight_specs(model)


def _check_counts(config, layers):
    """Raise `LrkvError` unless a cycle's layers have the sizes that plans and tables count."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(layers))  # stacked over cycles
    shapes = [layer.stored_shapes(1, 1, jnp.bfloat16) for layer in layers]
    a_cycle = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    for what, counted, there in (
        ("parameters", parameter_counts(config).attention, weights),
        ("cache bytes per token", cache_allocated_bytes_per_token(config), config.cycles * a_cycle),
    ):
        if counted != there:
            raise LrkvError(
                f"{config.attention.label} counts {counted:,} {what} over all layers, and its "
                f"arrays have {there:,}: correct its settings class (docs/new_variant.md)"
            )
