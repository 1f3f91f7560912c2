"""A conversation with a trained run: answers are streamed, and no turn is read twice."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Generator
from typing import Any

from lrkv_jax.data.chat import ChatFormat, Writer
from lrkv_jax.data.conversation import conversation_from, without_empty_answers
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine, Sampling
from lrkv_jax.inference.answers import Answering
from lrkv_jax.inference.request import RngStream, Sequence
from lrkv_jax.inference.trained_run import TrainedRun


class Chat:
    """Turns with one run, in one cache.

    sampling, max_new_tokens: of the answers from now on; they may be set between turns. messages:
    those so far, as [{role, content}]. Raises `LrkvError` for a model without ids for a chat.
    """

    def __init__(
        self, run: TrainedRun, *, sampling: Sampling, seed: int = 0, max_new_tokens: int = 256
    ):
        self.run, self.sampling, self.max_new_tokens = run, sampling, max_new_tokens
        self._format = ChatFormat(run.tokenizer)
        self._format.check(run.config.model.vocabulary)
        self.context = run.config.train.seq_len
        self._engine = Engine(run, batch=1)
        self._seed = seed
        self._sequence: Sequence | None = None
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages: list[dict[str, str]] = []
        if self._sequence is not None:
            self._engine.cancel(self._sequence)
        self._sequence = None
        self._unfinished = False

    @property
    def used(self) -> int:
        """Tokens of the context that the conversation takes."""
        return len(self._sequence.tokens) if self._sequence else 0

    def say(self, text: str) -> Generator[str]:
        """The answer to the user's next message, in pieces of text as it is decoded.

        Only the new message is prefilled. Raises `LrkvError`, and leaves the conversation as it is,
        for an empty message, for one that the context has no room for, and for no new tokens.
        """
        if not text.strip():
            raise LrkvError("the message is empty: say something")
        if self.max_new_tokens < 1:
            raise LrkvError(f"max_new_tokens = {self.max_new_tokens}: use 1 or more")
        retained, turn = self._turn(text)
        room = self.context - retained - len(turn)
        if room < 1:
            raise LrkvError(
                f"the context of {self.context} tokens is full ({retained} used, {len(turn)} "
                "asked): /reset starts anew"
            )
        if self._sequence is not None and retained < self.used:
            self._engine.cancel(self._sequence, retain=retained)
            self._sequence = self._sequence if retained else None
        going = self._answering(turn, min(self.max_new_tokens, room))
        self.messages.append({"role": "user", "content": text})
        writer, shown = Writer(self._format), 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            while not going.over or shown < len(going.answer.ids):
                if shown == len(going.answer.ids):
                    self._engine.advance()
                    going.take()
                    continue
                shown += 1
                if piece := decoder.decode(writer.piece(going.answer.ids[shown - 1])):
                    yield piece
            if piece := decoder.decode(writer.rest(), final=True):
                yield piece
        finally:
            going.leave(shown)
            self._unfinished = not going.answer.ended
            content = going.answer.text(self._format)
            self.messages.append({"role": "assistant", "content": content})

    def _turn(self, text: str) -> tuple[int, list[int]]:
        """How many of the cached tokens stay, and the ids to append to them.

        A template writes the whole conversation again, and may change earlier turns.
        """
        chat = self._format
        if chat.template is not None:
            messages = [*self.messages, {"role": "user", "content": text}]
            prompt_ids = chat.prompt(conversation_from(without_empty_answers(messages)))
            cached_ids = self._sequence.tokens if self._sequence else []
            pairs = enumerate(zip(cached_ids, prompt_ids, strict=False))
            same = next((at for at, (one, other) in pairs if one != other), len(cached_ids))
            same = min(same, len(prompt_ids) - 1)
            return same, prompt_ids[same:]
        turn = chat.turn(text)
        turn[:0] = [] if self.messages else chat.start
        used = self.used
        if used and (self._unfinished or self._sequence.tokens[-1] != chat.ids.assistant_end):
            # An answer that was cut short has no end, or another than training's: a text's.
            used -= not self._unfinished
            turn.insert(0, chat.ids.assistant_end)
        return used, turn

    def _answering(self, turn: list[int], budget: int) -> Answering:
        """Append a turn to the conversation, and start its answer."""
        options: dict[str, Any] = {"sampling": self.sampling, "rng": RngStream(self._seed)}
        if self._sequence is None:
            stops = frozenset(self._format.stop_token_ids)
            self._sequence = self._engine.submit(
                turn, budget, stop_token_ids=stops, retain=True, **options
            )
        else:
            self._sequence.request = dataclasses.replace(self._sequence.request, **options)
            self._engine.append(self._sequence, turn, budget)
        return Answering(self._engine, self._format, self._sequence)
