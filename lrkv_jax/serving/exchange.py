"""One request: its texts in the engine, and the objects that tell of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

from lrkv_jax.inference.request import Told
from lrkv_jax.serving.asked import Chat, Completion
from lrkv_jax.serving.replies import Reply, Spelling, usage
from lrkv_jax.serving.service import News, Service
from lrkv_jax.serving.texts import Piece, Text, Token

Pieces = AsyncGenerator[News]


class Exchange:
    """What a client asked for, and what it gets: `pieces`, told by `whole` or by `events`.

    made: as `Service.texts_of` gives it. began: of `time.monotonic`, when the request came.
    address: whom it came from.
    """

    def __init__(
        self,
        service: Service,
        spelling: Spelling,
        asked: Completion | Chat,
        made: tuple[list[list[int]], list[Text], int],
        began: float,
        address: str,
    ):
        self._address = address
        self._service, self._asked, self._began = service, asked, began
        self._prompts, self._texts, seed = made
        self._echo = isinstance(asked, Completion) and bool(asked.echo)
        self._first: dict[int, float] = {}
        self._objects = Reply(
            chat=isinstance(asked, Chat), model=service.name, fingerprint=service.fingerprint,
            seed=seed, spelling=spelling, tells=asked.tell is not None, ids=asked.return_token_ids,
        )  # fmt: skip

    async def pieces(self) -> Pieces:
        """Pieces of the choices by number. An echo's first is its prompt."""
        n, metrics = self._asked.choices, self._service.metrics
        echoes = [await self._prompt(i) for i in range(len(self._prompts))] if self._echo else []
        texts = self._service.pieces(self._texts, self._asked.timeout, self._address)
        async with contextlib.aclosing(texts):
            # Where there is no room it says so before the reply's first byte, an echo's too.
            first = await anext(texts, None)
            metrics.prompt_tokens.inc(sum(map(len, self._prompts)))
            for number in range(n * len(echoes)):
                yield News(number, echoes[number // n])
            async for number, piece in _all(first, texts):
                self._measure(number, piece)
                if echoes:
                    start = len(echoes[number // n].text)
                    tokens = [replace(token, start=token.start + start) for token in piece.tokens]
                    piece = replace(piece, tokens=tokens)
                yield News(number, piece)

    async def _prompt(self, number):
        """A prompt as a piece, with what is to be told of its tokens."""
        service, prompt = self._service, self._prompts[number]
        told: list[Told | None] = [None] * len(prompt)
        for scored in service.scores_of(self._asked, prompt):
            pieces = service.pieces([scored], address=self._address)
            async with contextlib.aclosing(pieces):
                async for _, piece in pieces:
                    told = [token.told for token in piece.tokens]
        tokens, start = [], 0
        for token, of in zip(prompt, told, strict=True):
            tokens.append(Token(token, start, of))
            start += len(service.tokenizer.decode([token]))
        # A text's tokens are its own: that its sequence begins is not told.
        own = isinstance(self._asked.prompts[number], str)
        ended = "" if self._texts else "length"
        return Piece(service.tokenizer.decode(prompt), tokens[own:], ended)

    async def whole(self, first: News | None, pieces: Pieces) -> dict[str, Any]:
        """The reply at once, of the first piece and those that follow."""
        choices = [Piece() for _ in range(len(self._prompts) * self._asked.choices)]
        async for number, piece in _all(first, pieces):
            choice = choices[number]
            choice.text += piece.text
            choice.tokens += piece.tokens
            choice.reason = piece.reason
        told = [
            self._objects.choice(number, choice, self._text(number))
            for number, choice in enumerate(choices)
        ]
        return self._objects.whole(told, self._used())

    async def events(self, first: News | None, pieces: Pieces) -> AsyncIterator[dict[str, Any]]:
        """The reply in chunks."""
        opened: set[int] = set()
        async for number, piece in _all(first, pieces):
            if number not in opened:
                opened.add(number)
                for head in self._objects.first(number):
                    yield head
            yield self._objects.chunk(number, piece, self._text(number))
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            yield self._objects.last(self._used())

    def _text(self, number):
        return self._texts[number] if self._texts else None

    def _used(self):
        return usage(self._prompts, self._texts, self._asked.choices)

    def _measure(self, number, piece):
        metrics, now = self._service.metrics, time.monotonic()
        if number not in self._first:
            self._first[number] = now
            metrics.first.observe(now - self._began)
        metrics.new_tokens.inc(len(piece.tokens))
        if piece.reason:
            text = self._texts[number]
            metrics.ended.labels(piece.reason).inc()
            metrics.cached_tokens.inc(text.request.from_prefix)
            metrics.whole.observe(now - self._began)
            if text.tokens > 1:
                metrics.each.observe((now - self._first[number]) / (text.tokens - 1))


async def _all(first, pieces):
    async with contextlib.aclosing(pieces):
        if first is not None:
            yield first
            async for news in pieces:
                yield news
