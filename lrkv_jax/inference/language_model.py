"""A trained run as benchmarks use it: likelihoods of texts, and texts, in batches.

No answer depends on what else is decoded in its batch. The number of devices changes it by no more
than the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import Conversation
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine, Sampling
from lrkv_jax.inference.answers import Answer, Answering
from lrkv_jax.inference.request import SEEDS, Ids, RngStream
from lrkv_jax.inference.request import Sequence as EngineSequence
from lrkv_jax.inference.trained_run import TrainedRun

# Requests that are queued at a time, of each that runs.
_QUEUED = 2
# Streams of random numbers between an example's samples; a stream is an int32.
_EXAMPLES = 1 << 20


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
        if not -SEEDS <= self.seed < SEEDS:
            raise LrkvError(f"seed = {self.seed}: use a number below 2^63")


class LanguageModel:
    """A run, its tokenizer, and `context`, the number of tokens that it was trained to read.

    A prompt that is too long loses its beginning, but no BOS; `truncated` counts them. `done`
    counts the examples that have ended, and `progress` is called with it.
    """

    def __init__(self, run: TrainedRun, *, batch: int):
        self._run, self._batch = run, batch
        self.tokenizer, self.context = run.tokenizer, run.config.train.seq_len
        self.chat = ChatFormat(run.tokenizer)
        self.truncated, self.done = 0, 0.0
        self.progress: Callable[[float], None] = lambda done: None

    @cached_property
    def _engine(self) -> Engine:
        """The engine that answers everything; it is made when the first question comes."""
        # The last token of a continuation is predicted and never read.
        return Engine(self._run, batch=self._batch, length=self.context + 1)

    def check_chat(self) -> None:
        """Raise `LrkvError` for a model of too few ids to chat, and for one not trained to."""
        self.chat.check(self._run.config.model.vocabulary)
        if not self.chat.trained(self._run.config.data):
            raise LrkvError("the run was not trained to chat: midtrain it, or give it texts")

    def chat_prompt(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation up to the start of the answer.

        Raises `LrkvError` for a model without ids for a chat, and for no questions.
        """
        self.check_chat()
        return self.chat.prompt(conversation)

    def pair(
        self, context: str, continuation: str, head: Ids | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of a context and of a continuation, cut where the ids of the context alone end.

        The lm-evaluation-harness's rule: spaces that end the context go over to the continuation,
        and both are encoded together. An empty context is the tokenizer's prefix. With `head` the
        context comes after these ids, and begins no text.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if head is None and not context:
            return self.tokenizer.prompt(""), self.tokenizer(continuation)
        encode = self.tokenizer.prompt if head is None else self.tokenizer
        ids, start = encode(context + continuation), len(encode(context))
        return [*(head or ()), *ids[:start]], ids[start:]

    def log_likelihoods(self, queries: Sequence[tuple[Ids, Sequence[Ids]]]) -> list[list[Score]]:
        """Return, for each (context, continuations), the score of every continuation.

        The context is prefilled once, or for each if they are long and layers have windows. Raises
        `LrkvError` for a continuation that is empty or longer than what the model reads.
        """
        requests = []
        for i, (context, continuations) in enumerate(queries):
            longest = max(map(len, continuations))
            if longest > self.context:
                raise LrkvError(f"a continuation of {longest} tokens: give {self.context} at most")
            prompt = self._fitted(context, self.context + 1 - longest)
            count = len(continuations) if self._engine.scores_together(longest) else 1
            starts = range(0, len(continuations), count)
            requests += [(i, slice(start, start + count), prompt) for start in starts]

        def submit(number):
            i, part, prompt = requests[number]
            return self._engine.submit(prompt, continuations=queries[i][1][part])

        results: list[list[Any]] = [[None] * len(continuations) for _, continuations in queries]
        for number, sequence in self._each(len(requests), submit, examples=len(queries)):
            ends = np.cumsum([len(one) for one in sequence.request.continuations])[:-1]
            log_p, is_greedy = (
                np.split(np.concatenate(chunks), ends)
                for chunks in (sequence.result.log_p, sequence.result.is_greedy)
            )
            i, part, _ = requests[number]
            results[i][part] = [
                Score(float(own.sum(dtype=np.float64)), bool(greedy.all()))
                for own, greedy in zip(log_p, is_greedy, strict=True)
            ]
        return results

    def next_log_p(self, prompts: Sequence[Ids], ids: Sequence[Ids]) -> list[np.ndarray]:
        """Return the log p (float32) of each of an example's `ids` right after its prompt."""
        fitted = [self._fitted(prompt, self.context) for prompt in prompts]
        results: list[np.ndarray] = [np.empty(0)] * len(prompts)
        for i, sequence in self._each(
            len(prompts), lambda i: self._engine.submit(fitted[i], 1, forced=ids[i][:1])
        ):
            (logits_V,) = sequence.result.logits
            results[i] = np.asarray(jax.nn.log_softmax(logits_V))[np.asarray(ids[i])]
        return results

    def answers(
        self, prompts: Sequence[Ids], max_new_tokens: int, draws: Draws
    ) -> list[list[Answer]]:
        """Return `draws.samples` answers to each chat prompt.

        Each has up to `max_new_tokens`, the calculator's included; fewer where the context ends.
        """
        growing: dict[EngineSequence, Answering] = {}

        def is_over(sequence):
            if sequence not in growing:
                growing[sequence] = Answering(self._engine, self.chat, sequence)
            growing[sequence].take()
            return growing[sequence].over

        def answer(sequence):
            return growing.pop(sequence).answer

        stops = self.chat.stop_token_ids
        return self._drawn(
            prompts, max_new_tokens, draws, is_over, answer, stop_token_ids=stops, retain=True
        )

    def continuations(
        self, prompts: Sequence[Ids], max_new_tokens: int, until: Sequence[str], draws: Draws
    ) -> list[list[str]]:
        """Return `draws.samples` texts after each prompt, up to the first string of `until`."""

        def is_over(sequence):
            if sequence.done or not until:
                return sequence.done
            text = self.tokenizer.decode(sequence.output_ids)
            return text != cut(text, until)

        def text(sequence):
            return cut(self.tokenizer.decode(sequence.output_ids), until)

        stops = self.tokenizer.eos_token_ids
        return self._drawn(prompts, max_new_tokens, draws, is_over, text, stop_token_ids=stops)

    def _drawn(self, prompts, max_new_tokens, draws, is_over, result, **options):
        """For each prompt the `result` of each of its samples, as soon as it `is_over`."""
        fitted = self._with_room(prompts, max_new_tokens)

        def submit(place):
            i, sample = divmod(place, draws.samples)
            prompt, rng = fitted[i], RngStream(draws.seed, i + _EXAMPLES * sample)
            budget = min(max_new_tokens, self.context - len(prompt))
            return self._engine.submit(prompt, budget, sampling=draws.sampling, rng=rng, **options)

        found = [[None] * draws.samples for _ in prompts]
        for place, sequence in self._each(
            len(prompts) * draws.samples, submit, is_over, examples=len(prompts)
        ):
            i, sample = divmod(place, draws.samples)
            found[i][sample] = result(sequence)
        return found

    def _each(
        self,
        count: int,
        submit: Callable[[int], EngineSequence],
        is_over: Callable[[EngineSequence], bool] = lambda sequence: sequence.done,
        *,
        examples: int | None = None,
    ) -> Iterator[tuple[int, EngineSequence]]:
        """Submit requests, a few more than run at a time; yield (number, sequence) as they end.

        They are of so many examples; each of one, unless given.
        """
        engine, following = self._engine, iter(range(count))
        running: dict[int, EngineSequence] = {}
        try:
            while True:
                for number in islice(following, max(0, _QUEUED * engine.batch - len(running))):
                    running[number] = submit(number)
                if not running:
                    return
                engine.advance(watched=False)
                over = [number for number, sequence in running.items() if is_over(sequence)]
                for number in over:
                    yield number, running[number]
                    engine.cancel(running.pop(number))
                    self.done += (count if examples is None else examples) / count
                    self.progress(self.done)
        finally:  # one was refused, or nobody reads on
            for sequence in running.values():
                engine.cancel(sequence)

    def _with_room(self, prompts, max_new_tokens):
        """The prompts, cut so that each leaves room for an answer."""
        if max_new_tokens < 1 or max_new_tokens >= self.context:
            raise LrkvError(
                f"max_new_tokens (--tokens) = {max_new_tokens}: use 1 to {self.context - 1}"
            )
        # A prompt leaves the answer a quarter of the context, or all that it may take.
        reserved = min(max_new_tokens, self.context // 4)
        return [self._fitted(prompt, self.context - reserved) for prompt in prompts]

    def _fitted(self, prompt: Ids, limit: int) -> list[int]:
        """The last `limit` tokens of a prompt; a BOS that it begins with takes the first place."""
        if len(prompt) <= limit:
            return list(prompt)
        self.truncated += 1
        if prompt[0] != self.tokenizer.bos:
            return list(prompt[len(prompt) - limit :])
        return [self.tokenizer.bos, *prompt[len(prompt) - limit + 1 :]][-limit:]


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string that occurs in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]
