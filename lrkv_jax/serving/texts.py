"""A text as the engine's thread makes it: submitted, grown call by call, and told in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lrkv_jax.data.chat import ChatFormat, Writer
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.inference import Engine
from lrkv_jax.inference.answers import Answering
from lrkv_jax.inference.request import Request, Told
from lrkv_jax.serving.words import Words


@dataclass(frozen=True)
class Token:
    """A token of a text: where its own characters begin, and what was told of it, if asked."""

    id: int
    start: int
    told: Told | None


@dataclass
class Piece:
    """What is new of a text. reason: why it ended (stop, length), empty while it goes on."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    reason: str = ""
    error: Exception | None = None


class Text:
    """One text after a prompt, up to `new_tokens`, a stop token or a stop string.

    chat: the format of an answer, which may call the calculator; None continues a plain text.
    asked: further keywords of the engine's request. What `grow` gives are pieces of one text,
    however the engine's calls fall.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        new_tokens: int,
        *,
        chat: ChatFormat | None = None,
        stops: list[str] | None = None,
        asked: dict[str, Any] | None = None,
    ):
        self.prompt, self.new_tokens = prompt, new_tokens
        self.tokens = 0  # new ones that the text has
        self.request: Request | None = None
        self.turn = 0
        self._chat, self._asked = chat, asked or {}
        if chat is None:
            self._words = Words(lambda token: tokenizer.decode_bytes([token]), stops=stops or ())
        else:
            writer = Writer(chat)
            self._words = Words(writer.piece, writer.rest, stops or ())
        self._waiting: list[Token] = []  # whose characters are held back
        self._answering: Answering | None = None

    def begin(self, engine: Engine) -> None:
        """Submit the request. Raises `LrkvError` for one that the engine cannot have."""
        keep = self._chat is not None
        asked = _in_turn(self._asked, self.turn)
        self.request = engine.submit(self.prompt, self.new_tokens, keep=keep, **asked)
        if self._chat is not None:
            self._answering = Answering(engine, self._chat, self.request, self.new_tokens)

    def grow(self) -> Piece | None:
        """What is new since the last call of the engine; None if nothing is."""
        ids, over = self._ids()
        piece = Piece()
        for token in ids[self.tokens :]:
            told = self.request.told.get(len(self.prompt) + self.tokens)
            self._waiting.append(Token(token, self._words.length, told))
            self.tokens += 1
            piece.text += self._words.read(token)
            if self.stopped is not None:
                break
        if self.stopped is not None:
            piece.reason = "stop"
            piece.tokens = [token for token in self._waiting if token.start < self._words.handed]
            return piece
        if over:
            piece.text += self._words.end()
            piece.reason = self._reason()
            piece.tokens, self._waiting = self._waiting, []
        while self._waiting and self._waiting[0].start < self._words.handed:
            piece.tokens.append(self._waiting.pop(0))
        return piece if piece.text or piece.tokens or piece.reason else None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended it."""
        return self._words.stopped

    def _ids(self):
        if self._answering is None:
            return self.request.said, self.request.done
        self._answering.take()
        return self._answering.answer.ids, self._answering.over

    def _reason(self):
        ended = self.request.reason if self._answering is None else self._answering.answer.ended
        return "stop" if ended in ("stop", True) else "length"


class Scored:
    """A prompt whose own tokens are told: each one's log p after those before it."""

    def __init__(self, prompt: list[int], tell: int, asked: dict[str, Any]):
        self.prompt, self.new_tokens = prompt, 0
        self.request: Request | None = None
        self.turn = 0
        self._tell, self._asked = tell, asked

    def begin(self, engine: Engine) -> None:
        """Submit the request."""
        choices = [self.prompt[1:]]
        self.request = engine.submit(
            self.prompt[:1], choices=choices, tell=self._tell, **_in_turn(self._asked, self.turn)
        )

    def grow(self) -> Piece | None:
        """All of it once it is done; places are filled in by who knows the text."""
        if not self.request.done:
            return None
        told = self.request.told
        tokens = [Token(token, 0, told.get(place)) for place, token in enumerate(self.prompt)]
        return Piece(tokens=tokens, reason="scored")


def _in_turn(asked, turn):
    """A request's keywords, whose priority counts from the turn of its address."""
    return {**asked, "priority": asked.get("priority", 0) + turn}
