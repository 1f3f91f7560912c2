"""One optimiser step, and the loss it descends: both pure, both jitted by the loop.

B sequences  T positions  M microbatches  b sequences a microbatch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.kernels.cross_entropy import chunked_cross_entropy, mean_cross_entropy
from lrkv_jax.model import with_parameters
from lrkv_jax.optim import learning_rates
from lrkv_jax.sharding import BATCH, batch_sharding, replicated
from lrkv_jax.train.state import TrainState, optimizer_of, state_shardings


def token_losses(
    config: ModelConfig, params: Any, tokens_BU: Int[Array, "B U"], chunk: int
) -> Float[Array, "B T"]:
    """−log p in nats of each token after the first, U = T + 1, from the tokens before it."""
    model = with_parameters(config, params)
    x_BTD = model.hidden(tokens_BU[:, :-1])
    return chunked_cross_entropy(
        x_BTD, model.head_kernel(), tokens_BU[:, 1:], softcap=config.softcap, chunk=chunk
    )


def bits_per_byte(nats, num_bytes):
    """Nats over tokens that stand for text, and those tokens' UTF-8 bytes, to bits per byte."""
    return nats / (num_bytes * np.log(2.0))


def make_train_step(
    config: RunConfig, mesh: Mesh, token_bytes_V: np.ndarray
) -> Callable[[TrainState, Int[Array, "B U"]], tuple[TrainState, dict[str, Array]]]:
    """The jitted step: (state, tokens [B, T + 1]) → (state, metrics); it consumes the state.

    Gradients of `accumulation` microbatches are averaged before the optimiser sees them. Metrics
    are scalars: `loss` (nats a token), `bpb` (specials excluded), `grad_norm` before clipping and
    each group's learning rate.
    """
    optimizer, microbatches = optimizer_of(config), config.train.accumulation
    rates = learning_rates(config.optimizer, config.train.total_steps)
    token_bytes_V = jnp.asarray(token_bytes_V)
    micro_sharding = NamedSharding(mesh, PartitionSpec(None, BATCH))

    def loss(params, tokens_bU):
        model = with_parameters(config.model, params)
        mean, nll_bT = mean_cross_entropy(
            model.hidden(tokens_bU[:, :-1]),
            model.head_kernel(),
            tokens_bU[:, 1:],
            softcap=config.model.softcap,
            chunk=config.train.loss_chunk,
        )
        bytes_bT = token_bytes_V[tokens_bU[:, 1:]]
        return mean, (jnp.sum(nll_bT * (bytes_bT > 0)), jnp.sum(bytes_bT))

    def gradient(params, tokens_BU):
        if microbatches == 1:
            return jax.value_and_grad(loss, has_aux=True)(params, tokens_BU)
        # Row i goes to microbatch i mod M: each device splits the rows that it already has.
        tokens_MbU = tokens_BU.reshape(-1, microbatches, tokens_BU.shape[1]).swapaxes(0, 1)
        tokens_MbU = jax.lax.with_sharding_constraint(tokens_MbU, micro_sharding)

        def add(total, tokens_bU):
            part = jax.value_and_grad(loss, has_aux=True)(params, tokens_bU)
            return jax.tree.map(jnp.add, total, part), None

        zero = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(jax.value_and_grad(loss, has_aux=True), params, tokens_MbU[0]),
        )
        ((value, aux), grads), _ = jax.lax.scan(add, zero, tokens_MbU)
        value, grads = jax.tree.map(lambda leaf: leaf / microbatches, (value, grads))
        return (value, aux), grads

    def step(state: TrainState, tokens_BU):
        (value, (nats, num_bytes)), grads = gradient(state.params, tokens_BU)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": value,
            "bpb": bits_per_byte(nats, num_bytes),
            "grad_norm": optax.global_norm(grads),
            **{f"lr_{group}": rate for group, rate in rates(state.step).items()},
        }
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    placed = state_shardings(config, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placed, batch_sharding(mesh)),
        out_shardings=(placed, replicated(mesh)),
    )
