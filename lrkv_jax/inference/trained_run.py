"""A trained model with what was said of its run: ready for evaluation and decoding.

B batch  T positions  V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from lrkv_jax.config import RunConfig
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.inference.engine import generate
from lrkv_jax.inference.request import check_tokens
from lrkv_jax.inference.sampling import Sampling
from lrkv_jax.models.transformer import with_parameters

# How text is sampled by default: on the command line, from Python and while a run
# trains.
SAMPLING = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class TrainedRun:
    """A run's configuration and the parameters of one of its steps, placed on `mesh`.

    `params` is the nested dict of `lrkv_jax.models.transformer.parameters`.
    """

    config: RunConfig
    step: int
    params: Any
    mesh: Mesh

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with."""
        return load_tokenizer(self.config.data.tokenizer)

    def ids(self, text: str) -> list[int]:
        """The ids of a text that begins: BOS and its tokens, or as its own tokenizer has them."""
        return self.tokenizer.prompt(text)

    def model(self, ids: Int[Array, "... T"] | Sequence) -> Float[Array, "... T V"]:
        """Float32 logits of the next token at every position of `ids`, one sequence or a batch.

        This is the whole-sequence forward, compiled once per shape of `ids`. Raises `LrkvError` for
        ids that are not whole numbers of the model's vocabulary.
        """
        check_tokens("ids", ids, self.config.model.vocabulary)
        tokens_T = np.asarray(ids)
        logits_BTV = self._forward(np.atleast_2d(tokens_T))
        return logits_BTV if tokens_T.ndim == 2 else logits_BTV[0]

    def logits(self, text: str) -> Float[Array, "T V"]:
        """Logits of the token after the beginning of sequence, and after each token of `text`."""
        return self.model(self.ids(text))

    def generate(
        self, text: str, new_tokens: int = 128, *, sampling: Sampling | None = None, seed: int = 0
    ) -> str:
        """The text that continues `text`, up to `new_tokens` long, decoded from the cache.

        Tokens are drawn as `lrkv generate` draws them unless `sampling` says otherwise: at
        temperature 0.8, among the likeliest that make up 0.95.
        """
        (new,) = generate(
            self.config.model, self.params, [self.ids(text)], new_tokens,
            sampling=sampling or SAMPLING, seed=seed, stop=self.tokenizer.ends, mesh=self.mesh,
        )  # fmt: skip
        return self.tokenizer.decode(new)

    @cached_property
    def _forward(self) -> Callable[[Int[np.ndarray, "B T"]], Float[Array, "B T V"]]:
        forward = jax.jit(lambda model, tokens_BT: model(tokens_BT))
        return partial(forward, with_parameters(self.config.model, self.params))
