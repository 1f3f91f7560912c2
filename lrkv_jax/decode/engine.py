"""Cached decoding of a model: its weights and its cache in place, and batches of text from them.

B sequences  N steps of a call  V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from lrkv_jax.accounting.counts import cache_bytes_per_token
from lrkv_jax.config import ModelConfig
from lrkv_jax.decode import placement
from lrkv_jax.decode import prompts as ragged
from lrkv_jax.decode.decoder import Decoder
from lrkv_jax.decode.sampling import Sampling
from lrkv_jax.decode.session import Session
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch
from lrkv_jax.nn.dtype import resolve_dtype

# `generate` makes its cache a multiple of this long: few caches, and few programs.
CACHE_MULTIPLE = 32


@dataclass(frozen=True)
class EngineReport:
    """What an engine decodes with, and what its cache occupies as it was allocated."""

    decode_kernel: str  # as asked for: `ModelConfig.decode_kernel`
    kernels: dict[str, str]  # what each kernel ran on so far in this process, and why
    cache_bytes: int
    cache_bytes_per_token: float
    cache_bytes_per_token_formula: int  # without what allocation pads
    cache_bytes_per_device: int
    mesh: dict[str, int]  # empty without one
    heads_split: bool  # each tensor shard attends with its own heads


class Engine(Decoder):
    """Decodes batches of up to `batch` sequences of up to `length` tokens with one model.

    On a `mesh` (`lrkv_jax.sharding.make_mesh`; the mesh in use, unless given) sequences are split
    over `data` and `fsdp` where those divide `batch`, heads and their cache over `tensor`, and
    parameters as in training.

    Raises `LrkvError` for parameters of another model, a mesh that cannot split it, and prompts
    that are empty, too many, too long for the cache, or not of the model's vocabulary.
    """

    def cache_bytes_per_token(self) -> float:
        """Bytes of the live cache buffers over the tokens they hold."""
        return self.report().cache_bytes_per_token

    def report(self) -> EngineReport:
        """What runs, and the bytes of the cache, summed from its live buffers."""
        cache = self._spare_cache = self.take_cache()
        leaves = jax.tree.leaves(cache)
        total = sum(leaf.nbytes for leaf in leaves)
        return EngineReport(
            decode_kernel=self.config.decode_kernel,
            kernels=dispatch.choices(),
            cache_bytes=total,
            cache_bytes_per_token=total / (self.batch * self.length),
            cache_bytes_per_token_formula=cache_bytes_per_token(
                self.config, resolve_dtype(self.config.dtype).itemsize
            ),
            cache_bytes_per_device=sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
            mesh=dict(self.mesh.shape) if self.mesh else {},
            heads_split=placement.splits_heads(self.model, self.mesh),
        )

    def session(self, *, seed: int = 0, draws: Sequence[int] | None = None) -> Session:
        """Up to `batch` sequences that grow in this engine's cache (`lrkv_jax.decode.session`)."""
        return Session(self, seed=seed, draws=draws)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
        draws: Sequence[int] | None = None,
        stop: Sequence[int] = (),
    ) -> Iterator[Int[np.ndarray, "B"]]:
        """Yield each step's tokens, one a sequence, −1 after a sequence has stopped.

        `stop` lists the tokens that end a sequence; the one that did is yielded. Ends when all
        have. Sequence i draws from (seed, draws[i], or i) alone: its text does not depend on the
        rest of the batch. `steps_per_call` steps run on the device at a time, the next ones while
        these are handed out.
        """
        self._check(prompts, new_tokens)
        with self.session(seed=seed, draws=draws) as session:
            session.append(prompts)
            yield from session.stream(new_tokens, sampling=sampling, stop=stop)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, **how) -> list[list[int]]:
        """The new tokens of each prompt, without the stop token; arguments as for `stream`."""
        if not prompts or new_tokens < 1:
            return [[] for _ in prompts]
        stop = set(how.get("stop", ()))
        steps_NB = np.stack(list(self.stream(prompts, new_tokens, **how)))
        columns = [steps_NB[:, i].tolist() for i in range(len(prompts))]
        return [[t for t in column if t != -1 and t not in stop] for column in columns]

    def forced_logits(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> Float[np.ndarray, "B N V"]:
        """Float32 logits of the N tokens of each continuation, from `stream`'s own programs.

        The continuations, of one length, take the place of what would be sampled: logits [b, n]
        are those from which token n of `continuations[b]` would be.
        """
        lengths = {len(tokens) for tokens in continuations}
        if len(continuations) != len(prompts) or len(lengths) != 1:
            raise LrkvError(
                f"{len(continuations)} continuations of {sorted(lengths)} tokens for "
                f"{len(prompts)} prompts: give one for each, all of one length"
            )
        for row, tokens in enumerate(continuations):
            ragged.check_tokens(f"continuation {row}", tokens, self.config.vocabulary)
        forced_NB = np.zeros((lengths.pop(), self.batch), np.int32)
        forced_NB[:, : len(prompts)] = np.transpose(continuations)
        self._check(prompts, len(forced_NB))
        with self.session() as session:
            session.append(prompts)
            logits_NBV = session.forced_logits(forced_NB)
        return logits_NBV[:, : len(prompts)].swapaxes(0, 1)

    def _check(self, prompts, new_tokens):
        ragged.check(
            prompts, new_tokens,
            batch=self.batch, length=self.length, vocabulary=self.config.vocabulary,
        )  # fmt: skip


def generate(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[int] = (),
    mesh: Mesh | None = None,
) -> list[list[int]]:
    """New token ids for each prompt of token ids, decoded together from one cache.

    `params` is the nested dict of `lrkv_jax.model.parameters`. Stop tokens end a sequence and are
    not returned. `mesh` and what is raised are as for `Engine`.
    """
    length = max((len(prompt) for prompt in prompts), default=0) + new_tokens
    length = -(-length // CACHE_MULTIPLE) * CACHE_MULTIPLE
    engine = Engine(config, params, batch=max(1, len(prompts)), length=max(1, length), mesh=mesh)
    return engine.generate(prompts, new_tokens, sampling=sampling, seed=seed, stop=stop)
