"""A trained run as benchmarks ask it: likelihoods of texts, and texts, in batches.

Every answer is its own example's: what else is in the batch, how it is padded and how many devices
share it change nothing beyond the rounding of float32. Examples are sorted by length into batches
and come back in their own order.

B sequences of a batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from lrkv_jax.config import ModelConfig
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import Conversation
from lrkv_jax.data.text import cut
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.decode import Engine, Sampling
from lrkv_jax.decode.answers import Answer, answers
from lrkv_jax.decode.engine import CACHE_MULTIPLE
from lrkv_jax.errors import LrkvError
from lrkv_jax.run.restore import TrainedRun

OnExamples = Callable[[float], None]
Ids = Sequence[int]

_SEEDS = 1 << 63  # what JAX takes
# How many tokens are decoded between two looks for a stop string.
_LOOK_EVERY = 16


class Score(NamedTuple):
    """A continuation's log p in nats, and whether greedy decoding would have written it."""

    log_p: float
    greedy: bool


@dataclass(frozen=True)
class Draws:
    """How texts are drawn: example i's sample s from (seed, i, s) alone."""

    sampling: Sampling = Sampling()
    seed: int = 0
    samples: int = 1

    def __post_init__(self):
        if not -_SEEDS <= self.seed < _SEEDS:
            raise LrkvError(f"seed = {self.seed}: use a number below 2^63")


class LanguageModel:
    """A model, its tokenizer, and `context`, the largest number of tokens that it reads.

    A prompt that is too long loses its beginning, BOS aside; `truncated` counts them. `progress` is
    called with the number of examples that each batch has finished.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        *,
        context: int,
        batch: int,
        mesh: Mesh | None = None,
        progress: OnExamples | None = None,
    ):
        self.tokenizer, self.context, self.batch = tokenizer, context, batch
        self.chat = ChatFormat(tokenizer)
        self.truncated = 0
        self.progress = progress or (lambda done: None)
        self._vocabulary = config.vocabulary
        self._make = lambda length: Engine(config, params, batch=batch, length=length, mesh=mesh)
        self._engine: Engine | None = None

    @classmethod
    def of(
        cls, run: TrainedRun, *, batch: int, progress: OnExamples | None = None
    ) -> LanguageModel:
        """A trained run, reading as many tokens as it was trained on."""
        config = run.config
        return cls(
            config.model, run.params, run.tokenizer,
            context=config.train.context, batch=batch, mesh=run.mesh, progress=progress,
        )  # fmt: skip

    def prompt(self, text: str) -> list[int]:
        """Text as the beginning of a document."""
        return [self.tokenizer.bos, *self.tokenizer.encode(text).tolist()]

    def check_chat(self) -> None:
        """Raise `LrkvError` for a model of too few ids to chat."""
        self.chat.check(self._vocabulary)

    def chat_prompt(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation up to the start of the answer.

        Raises `LrkvError` for a model without ids for a chat, and where nothing is asked.
        """
        self.check_chat()
        return self.chat.prompt(conversation)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of a continuation, cut where the context's own ids end.

        The lm-evaluation-harness's rule: spaces that end the context go over to the continuation,
        and both are encoded together.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, start = self.prompt(context + continuation), len(self.prompt(context))
        return whole[:start], whole[start:]

    def log_likelihoods(self, asked: Sequence[tuple[Ids, Sequence[Ids]]]) -> list[list[Score]]:
        """Return, for each (context, continuations), the score of every continuation.

        The context is prefilled once. Raises `LrkvError` for a continuation that is empty or longer
        than what the model reads.
        """
        fitted = []
        for context, continuations in asked:
            longest = max(map(len, continuations))
            if not min(map(len, continuations)) or longest > self.context:
                raise LrkvError(
                    f"a continuation of {longest} tokens, another of "
                    f"{min(map(len, continuations))}: give 1 to {self.context}"
                )
            # The last token of a continuation is predicted and never read.
            fitted.append(self._fitted(context, self.context + 1 - longest))
        results: list[list[Score]] = [[] for _ in asked]
        engine = self._engine_of(self.context + 1)
        behind = [max(map(len, continuations)) for _, continuations in asked]
        for rows in self._batches([len(context) for context in fitted], behind):
            choices = [asked[i][1] for i in rows]
            with engine.session() as session:
                session.append([fitted[i] for i in rows])
                for number in range(max(map(len, choices))):
                    # A question with fewer choices scores one of them again.
                    some = [c[min(number, len(c) - 1)] for c in choices]
                    for i, log_p, greedy in zip(rows, *session.score(some), strict=True):
                        if number < len(asked[i][1]):
                            total = float(log_p.sum(dtype=np.float64))
                            results[i].append(Score(total, bool(greedy.all())))
            self.progress(len(rows))
        return results

    def next_log_p(self, prompts: Sequence[Ids], ids: Sequence[Ids]) -> list[np.ndarray]:
        """Return the log p (float32) of each of an example's `ids` right after its prompt."""
        fitted = [self._fitted(prompt, self.context) for prompt in prompts]
        results: list[np.ndarray] = [np.empty(0)] * len(prompts)
        engine = self._engine_of(self.context + 1)
        for rows in self._batches([len(prompt) for prompt in fitted]):
            with engine.session() as session:
                session.append([fitted[i] for i in rows])
                for i, log_p in zip(rows, session.next_log_p([ids[i] for i in rows]), strict=True):
                    results[i] = log_p
            self.progress(len(rows))
        return results

    def answers(self, prompts: Sequence[Ids], new_tokens: int, draws: Draws) -> list[list[Answer]]:
        """Return `draws.samples` answers to each chat prompt.

        Each has up to `new_tokens`, the calculator's included; fewer where the context ends.
        """
        self.check_chat()
        results: list[list[Answer]] = [[] for _ in prompts]
        for rows, fitted, streams in self._generated(prompts, new_tokens, draws):
            with self._engine.session(seed=draws.seed, draws=streams) as session:
                budgets = [min(new_tokens, self.context - len(prompt)) for prompt in fitted]
                said: list[Answer] = []
                for said in answers(session, self.chat, fitted, budgets, draws.sampling):  # noqa: B007
                    pass
            for i, answer in zip(rows, said, strict=True):
                results[i].append(answer)
        return results

    def continuations(
        self, prompts: Sequence[Ids], new_tokens: int, until: Sequence[str], draws: Draws
    ) -> list[list[str]]:
        """Return `draws.samples` texts after each prompt, up to the first string of `until`."""
        results: list[list[str]] = [[] for _ in prompts]
        for rows, fitted, streams in self._generated(prompts, new_tokens, draws):
            said: list[list[int]] = [[] for _ in rows]
            budgets = [min(new_tokens, self.context - len(prompt)) for prompt in fitted]
            with self._engine.session(seed=draws.seed, draws=streams) as session:
                session.append(fitted)
                steps = session.stream(
                    max(budgets), sampling=draws.sampling, stop=(self.tokenizer.bos,)
                )
                for number, tokens_B in enumerate(steps, 1):
                    for row, ids in enumerate(said):
                        if tokens_B[row] >= 0 and len(ids) < budgets[row]:
                            ids.append(int(tokens_B[row]))
                    if number % _LOOK_EVERY == 0 and all(
                        tokens_B[row] < 0
                        or len(ids) == budgets[row]
                        or (text := self.tokenizer.decode(ids)) != cut(text, until)
                        for row, ids in enumerate(said)
                    ):
                        break
                steps.close()
            for i, ids in zip(rows, said, strict=True):
                results[i].append(cut(self.tokenizer.decode(ids), until))
        return results

    def _generated(self, prompts, new_tokens, draws) -> Iterator[tuple[list[int], list, list[int]]]:
        """Yield batches: examples (each `samples` times), their prompts, their draws."""
        if new_tokens < 1 or new_tokens >= self.context:
            raise LrkvError(f"new_tokens = {new_tokens}: use 1 to {self.context - 1}")
        # A prompt leaves the answer a quarter of the context, or all that it may take.
        room = min(new_tokens, self.context // 4)
        fitted = [self._fitted(prompt, self.context - room) for prompt in prompts]
        # Sequences that share a batch go on until the longest is done.
        self._engine_of(self.context + new_tokens)
        lengths = np.repeat([len(prompt) for prompt in fitted], draws.samples)
        for places in self._batches(lengths.tolist()):
            rows = [place // draws.samples for place in places]
            yield rows, [fitted[i] for i in rows], places
            self.progress(len(places) / draws.samples)

    def _fitted(self, prompt: Ids, limit: int) -> list[int]:
        """The last `limit` tokens of a prompt, its BOS in the first one's place."""
        if len(prompt) <= limit:
            return list(prompt)
        self.truncated += 1
        return [self.tokenizer.bos, *prompt[len(prompt) - limit + 1 :]][-limit:]

    def _batches(self, lengths: Sequence[int], behind: Ids | None = None) -> Iterator[list[int]]:
        """Yield the places in batches, longest first, so that the largest batch runs first.

        `behind`: tokens to come after each. The longest of a batch must leave room for the most of
        them, in a cache for the context: a long one is not asked beside one with much to come.
        """
        rows: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            crowded = False
            if rows and behind is not None:
                most = max(behind[row] for row in (*rows, i))
                crowded = lengths[rows[0]] + most > self.context + 1
            if len(rows) == self.batch or crowded:
                yield rows
                rows = []
            rows.append(i)
        if rows:
            yield rows

    def _engine_of(self, length: int) -> Engine:
        """Return an engine whose cache is at least this long; only one exists at a time."""
        length = -(-length // CACHE_MULTIPLE) * CACHE_MULTIPLE
        if self._engine is None or self._engine.length < length:
            self._engine = None  # its cache goes before another comes
            self._engine = self._make(length)
        return self._engine
