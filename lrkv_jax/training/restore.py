"""A trained run read from its directory, ready for evaluation and decoding.

B batch  T positions  V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from lrkv_jax.config import MeshConfig, ModelConfig, RunConfig
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import parameter_shardings
from lrkv_jax.inference import Sampling, generate
from lrkv_jax.inference.request import check_tokens
from lrkv_jax.models.layers import resolve_dtype
from lrkv_jax.models.transformer import abstract_parameters, specs, with_parameters
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.run_dir import asked_dtype, read_run

# How text is sampled by default: on the command line, from Python and while a run trains.
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


def load_run(
    directory: str | Path, *, step: int | str | None = None, overrides: Sequence[str] = ()
) -> TrainedRun:
    """Read a run with the parameters of its newest step, of `step`, or of the `best` one kept.

    Parameters are replicated over all devices, whatever mesh trained them; `overrides`, such as
    `mesh.fsdp=8 mesh.data=1`, change that and other settings that leave the model as it is.
    A `model.dtype` of auto, with which the run was trained, is what suits this machine.
    Raises `LrkvError` if there is no run, no checkpoint or no such step.
    """
    config = read_run(directory, overrides)
    asked, named = asked_dtype(directory, config), "model.dtype="
    # Asked for as auto, it may have become another one where it was trained.
    if asked != config.model.dtype and not any(one.startswith(named) for one in overrides):
        model = config.model.model_copy(update={"dtype": resolve_dtype(asked).name})
        config = config.model_copy(update={"model": model})
    if not any(override.startswith("mesh.") for override in overrides):
        config = config.model_copy(update={"mesh": MeshConfig(data=-1, fsdp=1)})
    mesh = make_mesh(config.mesh)
    step, params = restore_parameters(directory, config.model, mesh, step)
    return TrainedRun(config, step, params, mesh)


def restore_parameters(
    directory: str | Path, model: ModelConfig, mesh: Mesh, step: int | str | None
) -> tuple[int, Any]:
    """The parameters of one of a run's steps (of the newest unless given), placed as in training.

    Raises `LrkvError` as `Checkpointer.restore` does.
    """
    shapes = abstract_parameters(model)
    placed = parameter_shardings(specs(model), shapes, mesh)
    abstract = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        placed,
    )
    with Checkpointer(Path(directory) / "checkpoints") as checkpoints:
        chosen = checkpoints.best() if step == "best" else cast(int | None, step)
        found, items = checkpoints.restore({"params": abstract}, chosen)
    return found, items["params"]
