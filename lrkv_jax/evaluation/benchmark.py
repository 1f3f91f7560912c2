"""The parts common to the five benchmarks: their settings, questions and results."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lrkv_jax.data.tasks.registry import DEMO, fingerprint, load
from lrkv_jax.errors import LrkvError, whole
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.language_model import Draws, LanguageModel


@dataclass(frozen=True)
class BenchmarkSettings:
    """Settings of benchmarks: in a chat, zero-shot, as the recipe evaluates a midtrained model.

    folder: that of the sets, or "demo". limit: only the first `limit` examples. samples,
    temperature, top_p, max_new_tokens, seed: of generated answers. run_model_code:
    whether programs that the model writes may run, in the sandbox.

    Raises LrkvError for settings that contradict each other.
    """

    folder: str = "data/tasks"
    limit: int | None = None
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    run_model_code: bool = False

    def __post_init__(self):
        object.__setattr__(self, "folder", os.fspath(self.folder))  # a path may name the set
        for name in ("limit", "samples", "max_new_tokens", "seed"):
            if (value := getattr(self, name)) is None:
                continue
            object.__setattr__(self, name, value := whole(name, value))
            if value < 1 and name != "seed":
                raise LrkvError(f"{name} = {value}: use 1 or more")
        self.draws()  # which refuses a temperature or a top_p that cannot be
        if self.samples > 1 and self.temperature == 0:
            raise LrkvError(
                f"samples = {self.samples} at temperature 0 are all the same: give a temperature"
            )

    @property
    def asked(self) -> dict[str, Any]:
        """Those that a score depends on."""
        asked = asdict(self)
        del asked["run_model_code"]  # permits, and changes no score
        return asked

    def draws(self) -> Draws:
        """How answers are drawn."""
        return Draws(Sampling(self.temperature, 0, self.top_p), self.seed, self.samples)


@dataclass(frozen=True)
class Questions:
    """A benchmark's questions, and what identifies them."""

    examples: list[Any]  # of the set's kind
    dataset: dict[str, Any]


@dataclass
class BenchmarkResult:
    """A benchmark's outcome.

    score: the value that is compared, 0 to 1; `measure` is its name. records: one per
    example. more: further measures.
    """

    measure: str
    score: float
    records: list[dict[str, Any]]
    more: dict[str, Any] = field(default_factory=dict)


Benchmark = Callable[[LanguageModel, Questions, BenchmarkSettings], BenchmarkResult]


def questions(name: str, split: str, settings: BenchmarkSettings) -> Questions:
    """Return the examples of a set's split.

    Raises LrkvError as `lrkv_jax.data.tasks.registry.load` does.
    """
    everything = load(name, split, settings.folder)
    examples = everything[: settings.limit]
    dataset = {
        "name": name,
        "split": split,
        "folder": settings.folder,
        "demonstration": settings.folder == DEMO,
        "examples": len(examples),
        "of": len(everything),
        "sha256": fingerprint(everything),
    }
    return Questions(examples, dataset)


def measured(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean of independent examples (of bools, the share that is true), and its
    standard error: sample deviation over sqrt(n)."""
    array = np.asarray(values, np.float64)
    error = float(array.std(ddof=1) / np.sqrt(len(array))) if len(array) > 1 else 0.0
    return {name: float(array.mean()), f"{name}_stderr": error}
