"""One completion as the engine's thread makes it: submitted, then read as deltas of its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lrkv_jax.data.chat import ChatFormat, Writer
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.inference import Engine
from lrkv_jax.inference.answers import Answering
from lrkv_jax.inference.request import Sequence, TokenLogprobs
from lrkv_jax.serving.detokenizer import Detokenizer


@dataclass(frozen=True)
class Token:
    """A token of a completion, where its characters begin, and its log p if requested."""

    id: int
    start: int
    logprob: TokenLogprobs | None


@dataclass
class TextDelta:
    """New text of completion `index`. finish_reason: stop or length, empty until it ends."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = ""
    error: Exception | None = None


class Completion:
    """One text after a prompt, up to `max_tokens`, a stop token or a stop string.

    index: its place among the choices of the response. chat: the format of an answer, which may
    call the calculator; None continues a plain text. options: further keywords of the engine's
    request. The deltas make one text, however the engine's calls fall.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        prompt: list[int],
        max_tokens: int,
        *,
        chat: ChatFormat | None = None,
        stop: list[str] | None = None,
        options: dict[str, Any] | None = None,
    ):
        self.index, self.prompt, self.max_tokens = index, prompt, max_tokens
        self.token_count = 0  # new ones that the text has
        self.sequence: Sequence | None = None
        self.turn = 0  # as `FairQueue` gives it
        self._chat, self._options = chat, options or {}
        if chat is None:
            piece = tokenizer.decode_bytes
            self._text = Detokenizer(lambda token: piece([token]), stops=stop or ())
        else:
            writer = Writer(chat)
            self._text = Detokenizer(writer.piece, writer.rest, stop or ())
        self._waiting: list[Token] = []  # whose characters are held back
        self._answering: Answering | None = None

    def submit(self, engine: Engine) -> None:
        """Submit the request. Raises `LrkvError` for one that the engine cannot have."""
        chat = self._chat
        self.sequence = engine.submit(
            self.prompt, self.max_tokens, retain=chat is not None, priority=self.turn,
            **self._options,
        )  # fmt: skip
        if chat is not None:
            self._answering = Answering(engine, chat, self.sequence)

    def delta(self) -> TextDelta | None:
        """The delta since the last call of the engine; None if there is none."""
        ids, done = self._output_ids()
        delta = TextDelta(self.index)
        for token in ids[self.token_count :]:
            logprob = self.sequence.result.logprobs.get(len(self.prompt) + self.token_count)
            self._waiting.append(Token(token, self._text.length, logprob))
            self.token_count += 1
            delta.text += self._text.read(token)
            if self.stop_string is not None:
                break
        if done:
            delta.text += self._text.end()  # a cut character may complete a stop string
        if self.stop_string is not None:
            delta.finish_reason = "stop"
            delta.tokens = [token for token in self._waiting if token.start < self._text.emitted]
            return delta
        if done:
            delta.finish_reason = self._finish_reason()
            delta.tokens, self._waiting = self._waiting, []
        while self._waiting and self._waiting[0].start < self._text.emitted:
            delta.tokens.append(self._waiting.pop(0))
        return delta if delta.text or delta.tokens or delta.finish_reason else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return self._text.stop_string

    def _output_ids(self):
        if self._answering is None:
            return self.sequence.output_ids, self.sequence.done
        self._answering.take()
        return self._answering.answer.ids, self._answering.over

    def _finish_reason(self):
        stopped = self.sequence.result.finish_reason == "stop"
        if self._answering is not None:
            stopped = self._answering.answer.ended
        return "stop" if stopped else "length"
