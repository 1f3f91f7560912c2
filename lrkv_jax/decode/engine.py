"""Cached decoding: prefill once, then one jitted step whose state is donated and never reshaped.

B sequences  T prompt positions  S cache slots
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, Key

from lrkv_jax.config import ModelConfig
from lrkv_jax.decode.sampling import Sampling, sample
from lrkv_jax.errors import LrkvError
from lrkv_jax.model import Transformer, with_parameters

# Prompts are padded to a multiple of this, so that few prefill programs are ever compiled.
PROMPT_MULTIPLE = 32
# Steps between two looks at whether every sequence has stopped; a look waits for the device.
STEPS_PER_LOOK = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """What a step reads and replaces. `token_B` is sampled but not yet in the cache."""

    cache: Any
    token_B: Int[Array, "B"]
    lengths_B: Int[Array, "B"]  # tokens in the cache
    stopped_B: Bool[Array, "B"]
    keys_B: Key[Array, "B"]


class Engine:
    """Decodes batches of up to `batch` sequences of up to `length` tokens with one model.

    Raises `LrkvError` for prompts that are empty, too many or too long for the cache.
    """

    def __init__(self, config: ModelConfig, params: Any, *, batch: int, length: int):
        self.config, self.batch, self.length = config, batch, length
        model = with_parameters(config, params).unstacked()
        self._graph, self._weights = nnx.split(model)
        self._spare_cache = None  # the last call's buffers, used again

    def init_cache(self) -> Any:
        """A cache for the whole batch, a list with one entry a layer."""
        cache, self._spare_cache = self._spare_cache, None
        if cache is None:
            cache = self._model().init_cache(self.batch, self.length)
        return cache

    def cache_bytes_per_token(self) -> float:
        """Bytes of the live cache buffers over the tokens they hold."""
        cache = self.init_cache()
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        self._spare_cache = cache
        return total / (self.batch * self.length)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: Sequence[int] = (),
    ) -> Iterator[Int[Array, "B"]]:
        """Yield each step's tokens, one a sequence, −1 after a sequence has stopped.

        `stop` lists the tokens that end a sequence; the one that did is yielded. Sequence i draws
        from (seed, i) alone: its text does not depend on the rest of the batch.
        """
        sampling = sampling or Sampling()
        state, token_B = self._start(prompts, new_tokens, sampling, seed, tuple(stop))
        yield token_B
        for step in range(1, new_tokens):
            if step % STEPS_PER_LOOK == 0 and bool(jnp.all(state.stopped_B)):
                break
            state, token_B = _step(self._graph, self._weights, state, sampling, tuple(stop))
            yield token_B
        self._spare_cache = state.cache

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, **how) -> list[list[int]]:
        """The new tokens of each prompt, without the stop token; arguments as for `stream`."""
        if not prompts or new_tokens < 1:
            return [[] for _ in prompts]
        stop = set(how.get("stop", ()))
        steps_NB = np.stack(jax.device_get(list(self.stream(prompts, new_tokens, **how))))
        columns = [steps_NB[:, i].tolist() for i in range(len(prompts))]
        return [[t for t in column if t != -1 and t not in stop] for column in columns]

    def _start(self, prompts, new_tokens, sampling, seed, stop):
        """Prefill: the first token of each sequence, and the state of the steps to come."""
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or len(lengths) > self.batch:
            raise LrkvError(f"{len(lengths)} prompts for a batch of {self.batch}: give 1 to that")
        if min(lengths) == 0:
            raise LrkvError(f"prompt {lengths.index(0)} is empty: start it with the BOS token")
        # The last new token is never written, but counting it keeps the rule simple.
        if max(lengths) + new_tokens > self.length:
            raise LrkvError(
                f"a prompt of {max(lengths)} tokens and {new_tokens} new ones do not fit a cache "
                f"of {self.length}: shorten the prompt or make the cache longer"
            )
        padded = min(-(-max(lengths) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE, self.length)
        tokens_BT = np.zeros((self.batch, padded), np.int32)
        lengths_B = np.ones(self.batch, np.int32)  # unused rows decode one padding token
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
            lengths_B[row] = len(prompt)
        idle_B = np.arange(self.batch) >= len(prompts)
        root = jax.random.key(seed)
        keys_B = jax.vmap(partial(jax.random.fold_in, root))(jnp.arange(self.batch))
        state = DecodeState(
            self.init_cache(), jnp.zeros(self.batch, jnp.int32), jnp.asarray(lengths_B),
            jnp.asarray(idle_B), keys_B,
        )  # fmt: skip
        return _prefill(self._graph, self._weights, state, jnp.asarray(tokens_BT), sampling, stop)

    def _model(self) -> Transformer:
        return nnx.merge(self._graph, self._weights)


def _next(model, x_BD, state, sampling, stop):
    """Sample from the last hidden state; mark the sequences that it stops."""
    logits_BV = model.logits(x_BD[:, None])[:, 0]
    # The key of a draw is the sequence's key and the position: replays draw the same.
    keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.lengths_B)
    token_B = sample(logits_BV, keys_B, sampling)
    stopped_B = state.stopped_B
    for token in stop:
        stopped_B = stopped_B | (token_B == token)
    shown_B = jnp.where(state.stopped_B, -1, token_B)
    return replace(state, token_B=token_B, stopped_B=stopped_B), shown_B


@partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
def _prefill(graph, weights, state, tokens_BT, sampling, stop):
    model = nnx.merge(graph, weights)
    x_BTD, cache = model.prefill(tokens_BT, state.cache)
    x_BD = jnp.take_along_axis(x_BTD, (state.lengths_B - 1)[:, None, None], axis=1)[:, 0]
    return _next(model, x_BD, replace(state, cache=cache), sampling, stop)


@partial(jax.jit, static_argnums=(0, 3, 4), donate_argnums=2)
def _step(graph, weights, state, sampling, stop):
    model = nnx.merge(graph, weights)
    x_B1D, cache = model.decode(state.token_B[:, None], state.cache, state.lengths_B)
    # A stopped sequence writes its slot again and again; nobody reads it.
    lengths_B = jnp.where(state.stopped_B, state.lengths_B, state.lengths_B + 1)
    state = replace(state, cache=cache, lengths_B=lengths_B)
    return _next(model, x_B1D[:, 0], state, sampling, stop)


def generate(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """New token ids for each prompt of token ids, decoded together from one cache.

    `params` is the nested dict of `lrkv_jax.model.parameters`. Stop tokens end a sequence and are
    not returned. Raises `LrkvError` for an empty prompt.
    """
    length = max((len(prompt) for prompt in prompts), default=0) + new_tokens
    length = -(-length // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    engine = Engine(config, params, batch=max(1, len(prompts)), length=length)
    return engine.generate(prompts, new_tokens, sampling=sampling, seed=seed, stop=stop)
