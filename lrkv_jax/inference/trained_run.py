"""A trained model with the configuration of its run: ready for evaluation and decoding.

B batch  T positions  V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from lrkv_jax.config import RunConfig
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.errors import LrkvError, nearest
from lrkv_jax.inference.engine import Engine
from lrkv_jax.inference.placement import check_parameters
from lrkv_jax.inference.request import check_tokens
from lrkv_jax.inference.sampling import Sampling
from lrkv_jax.models.transformer import with_parameters

# How text is sampled by default: on the command line, from Python and while a run
# trains.
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
_SETTINGS = ("max_new_tokens", "seed", *(field.name for field in fields(Sampling)))


@dataclass(frozen=True)
class TrainedRun:
    """A run's configuration and the parameters of one of its steps, placed on `mesh`.

    `params` is the nested dict of `lrkv_jax.models.weights.weights_of`, `directory` the run's,
    if it has one.
    """

    config: RunConfig
    step: int
    params: Any
    mesh: Mesh
    directory: Path | None = None

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        label = self.config.model.attention.label
        return f"TrainedRun({self.directory}, step {self.step}, {label}, mesh {mesh})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with."""
        return load_tokenizer(self.config.data.tokenizer)

    def ids(self, text: str) -> list[int]:
        """The ids of a text that begins: BOS and its tokens, or as its tokenizer has them."""
        if not isinstance(text, str):
            raise LrkvError(f"the prompt is a {type(text).__name__}: give a text")
        return self.tokenizer.prompt(text)

    def apply(self, params: Any, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Float32 logits of the next token at every position: pure, for `jax.grad` and `jax.jit`.

        `params` has the structure of `self.params`. Raises `LrkvError` for others, and for tokens
        that are no batch of the model's ids; whether traced ones are is the caller's to know.
        """
        check_parameters(self.config.model, params)
        if not isinstance(tokens_BT, jax.core.Tracer):
            check_tokens("tokens", tokens_BT, self.config.model.vocabulary, axes=2)
        tokens_BT = jnp.asarray(tokens_BT)
        if tokens_BT.ndim != 2 or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
            shape = f"{tokens_BT.dtype}{list(tokens_BT.shape)}"
            raise LrkvError(f"the tokens are {shape}: give token ids [batch, positions]")
        return with_parameters(self.config.model, params)(tokens_BT)

    def model(self, ids: Int[Array, "... T"] | Sequence) -> Float[Array, "... T V"]:
        """Float32 logits of the next token at every position of `ids`, one sequence or a batch.

        This is the whole-sequence forward, compiled once per shape of `ids`. Raises `LrkvError` for
        ids that are not whole numbers of the model's vocabulary.
        """
        check_tokens("ids", ids, self.config.model.vocabulary, axes=2)
        tokens_T = np.asarray(ids)
        logits_BTV = self._forward(self.params, np.atleast_2d(tokens_T))
        return logits_BTV if tokens_T.ndim == 2 else logits_BTV[0]

    def logits(self, text: str) -> Float[Array, "T V"]:
        """Logits of the token after the beginning of sequence, and after each token of `text`."""
        return self.model(self.ids(text))

    def generate(
        self,
        text: str,
        max_new_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> str:
        """The text that continues `text`, up to `max_new_tokens` long, decoded from the cache.

        Tokens are drawn as `lrkv generate` draws them, at temperature 0.8 and top-p 0.95, unless
        `sampling` or `settings` (`temperature=0`, `top_k=50`) change that. Raises `LrkvError` for
        a prompt that is no text and for wrong settings.
        """
        if max_new_tokens < 1:
            raise LrkvError(f"max_new_tokens = {max_new_tokens}: use 1 or more")
        if unknown := sorted(settings.keys() - vars(SAMPLING).keys()):
            raise LrkvError(f"generate has no setting {unknown[0]}{nearest(unknown[0], _SETTINGS)}")
        ids = self.ids(text)
        engine = Engine(self, batch=1, length=len(ids) + max_new_tokens)
        (new,) = engine.generate(
            [ids], max_new_tokens, sampling=replace(sampling or SAMPLING, **settings), seed=seed,
            stop=self.tokenizer.eos_token_ids,
        )  # fmt: skip
        return self.tokenizer.decode(new)

    @cached_property
    def _forward(self) -> Callable:
        return jax.jit(self.apply)
