"""What is served: a run, its engine's thread, and who may still come in."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

from lrkv_jax import __version__
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine
from lrkv_jax.inference.request import Draw, check_tokens
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.serving.asked import Chat, Completion, Generation
from lrkv_jax.serving.metrics import Metrics
from lrkv_jax.serving.runner import Runner, Work
from lrkv_jax.serving.texts import Piece, Scored, Text
from lrkv_jax.serving.turns import SHARE, Turns

# Seconds after which a call that has not ended is called a hang.
HANGS = 120.0


@dataclass(frozen=True)
class Limits:
    """What clients may take together and each.

    texts: that are open at a time, with those that wait. tokens: of their prompts and new text.
    body: bytes of a request. bodies: of all that are being read. seconds: until a reply has ended.
    """

    texts: int
    tokens: int
    body: int = 4 << 20
    bodies: int = 64 << 20
    seconds: float = 600.0


class Refused(Exception):
    """An answer other than 200: OpenAI's `type`, `code` and `param` beside the line."""

    def __init__(
        self, status: int, text: str, *, code: str | None = None, param: str | None = None,
        kind: str = "invalid_request_error", after: int | None = None,
    ):  # fmt: skip
        super().__init__(text)
        self.status, self.code, self.param, self.kind, self.after = status, code, param, kind, after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def overloaded(text: str) -> Refused:
    """What a client is told that comes while there is no room, and may try again."""
    return Refused(429, f"{text}: try again", kind="rate_limit_error", code="overloaded", after=1)


class News(NamedTuple):
    """A piece of the text with this number."""

    number: int
    piece: Piece


class Service:
    """A run that is served under a name, by an engine whose programs are compiled."""

    @classmethod
    def of(
        cls,
        run: TrainedRun,
        name: str,
        *,
        batch: int,
        context: int,
        cache_bytes: int | None = None,
        queue: int = 256,
        seconds: float = 600.0,
        drafts: int = 0,
    ) -> Self:
        """A service that decodes `batch` texts of up to `context` tokens and lets `queue` wait.

        drafts: as for `Engine`.

        Raises `LrkvError` for a cache that has no room for one text of the whole context.
        """
        engine = Engine(
            run.config.model, run.params,
            batch=batch, length=context, cache_bytes=cache_bytes, drafts=drafts, mesh=run.mesh,
        )  # fmt: skip
        engine.warm()
        texts = engine.batch + queue
        return cls(run, engine, name, Limits(texts, texts * context, seconds=seconds))

    def __init__(self, run: TrainedRun, engine: Engine, name: str, limits: Limits):
        self.run, self.name, self.limits = run, name, limits
        self.context, self.tokenizer = engine.length, run.tokenizer
        self._longest = int(run.tokenizer.token_bytes.max())  # bytes of a token
        self.runner = Runner(engine)
        self.chat: ChatFormat | None = ChatFormat(run.tokenizer)
        try:
            self.chat.check(run.config.model.vocabulary)
        except LrkvError:
            self.chat = None
        self.metrics = Metrics(self.runner, lambda: self.texts, lambda: self.tokens)
        self.began = int(time.time())
        self.fingerprint = f"lrkv-{__version__}-step{run.step}"
        self.draining = False
        self._turns = Turns()
        self.texts = self.tokens = 0  # open ones, and what they may take

    def health(self) -> str:
        """Empty if the engine answers; else what is the matter."""
        if self.runner.fault is not None:
            return str(self.runner.fault)
        if self.draining:
            return "the server is shutting down"
        if self.runner.silent > HANGS:
            return f"a call of the engine has not ended for {self.runner.silent:.0f} seconds"
        return ""

    def check(self, model: str | None) -> None:
        """Raise `Refused` for another model's name, and where nothing can be served."""
        if model is not None and model != self.name:
            text = f"model {model} is not served here: use {self.name}"
            raise Refused(404, text, code="model_not_found", param="model")
        if trouble := self.health():
            raise Refused(503, trouble, kind="server_error", code="unavailable", after=5)

    # Works.

    def texts_of(self, asked: Completion | Chat) -> tuple[list[list[int]], list[Text], int]:
        """Return the prompts' ids, the texts that are asked for, and the seed of their draws."""
        if isinstance(asked, Chat):
            return self._answers(asked)
        self._check_size(asked)
        prompts = [self._ids(number, prompt) for number, prompt in enumerate(asked.prompts)]
        if not prompts:
            raise Refused(400, "prompt: give one or more", param="prompt")
        most = asked.most
        if most == 0 and not asked.echo:
            raise Refused(400, "max_tokens: use 1 or more, or 0 with echo", param="max_tokens")
        end = () if asked.ignore_eos else self.tokenizer.ends
        return self._texts(asked, prompts, most, end, None, "prompt")

    def scores_of(self, asked: Completion, prompt: list[int]) -> list[Scored]:
        """What tells of a prompt's own tokens: nothing if it is not asked, or is one token."""
        if asked.tell is None or len(prompt) < 2:
            return []
        return [Scored(prompt, asked.tell, _place_of(asked))]

    def _answers(self, asked):
        if self.chat is None:
            text = f"{self.name} was not trained to chat: use /v1/completions"
            raise Refused(400, text, code="no_chat")
        self._check_length("messages", "".join(m.plain["content"] for m in asked.messages))
        prompt = self.chat.prompt(asked.conversation())
        most = max(1, self.context - len(prompt)) if asked.most is None else asked.most
        stops = () if asked.ignore_eos else self.chat.stops
        return self._texts(asked, [prompt], most, stops, self.chat, "messages")

    def _texts(self, asked, prompts, most, ends, chat, param):
        """Texts of up to `most` tokens after each prompt, which came in the field `param`."""
        for prompt in prompts:
            if len(prompt) + most > self.context:
                text = (
                    f"the context is {self.context} tokens, and the prompt has {len(prompt)} and "
                    f"the text up to {most}: shorten either"
                )
                raise Refused(400, text, code="context_length_exceeded", param=param)
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        sampling, n = asked.sampling(), asked.choices
        how = {
            "stops": frozenset([*ends, *asked.stop_token_ids]), "least": asked.min_tokens,
            "tell": asked.tell, **_place_of(asked),
        }  # fmt: skip
        texts = [
            Text(
                self.tokenizer, prompts[number // n], most, chat=chat, stops=asked.stops,
                asked={**how, "draw": Draw(sampling, seed, number)},
            )
            for number in range(len(prompts) * n if most else 0)
        ]  # fmt: skip
        return prompts, texts, seed

    def _check_size(self, asked):
        """Refuse, before any text is made into tokens, what is too much whatever its tokens are."""
        texts, most = len(asked.prompts) * asked.choices, self.limits.texts
        if texts > most:
            what = f"prompt: {len(asked.prompts)} prompts of {asked.choices} texts each"
            raise Refused(400, f"{what} are more than {most}: send fewer at a time", param="prompt")
        for prompt in asked.prompts:
            self._check_length("prompt", prompt)

    def _check_length(self, param, prompt):
        longest = self._longest if isinstance(prompt, str) else 1
        least = -(-(len(prompt.encode()) if isinstance(prompt, str) else len(prompt)) // longest)
        if least > self.context:
            text = f"the context is {self.context} tokens, and the prompt has {least} at least"
            raise Refused(400, f"{text}: shorten it", code="context_length_exceeded", param=param)

    def _ids(self, number, prompt):
        if isinstance(prompt, str):
            return self.run.ids(prompt)
        try:
            check_tokens(f"prompt {number}", prompt, self.run.config.model.vocabulary)
        except LrkvError as error:
            raise Refused(400, str(error), param="prompt") from None
        return prompt

    # Admission.

    async def pieces(
        self, works: Sequence[Work], seconds: float | None = None, address: str = ""
    ) -> AsyncGenerator[News]:
        """What is new of each, as it comes, until all have ended, within so many seconds.

        address: whom they are for. Whatever ends the iteration ends the works. Raises `Refused` at
        once where too many are open, and `TimeoutError` for what takes too long.
        """
        texts, tokens = len(works), sum(len(work.prompt) + work.new_tokens for work in works)
        self._check_room(address, texts, tokens)
        self.texts += texts
        self.tokens += tokens
        for work, turn in zip(works, self._turns.opened(address, texts, tokens), strict=True):
            work.turn = turn
        arrived: asyncio.Queue[News] = asyncio.Queue()
        left = set(range(texts))
        try:
            for number, work in enumerate(works):
                self.runner.ask(work, partial(_put, arrived, number))
            # Each piece may be waited for by another task.
            most = self.limits.seconds if seconds is None else min(seconds, self.limits.seconds)
            end = asyncio.get_running_loop().time() + most
            while left:
                async with asyncio.timeout_at(end):
                    news = await arrived.get()
                if news.piece.error is not None:
                    self.check(None)  # of an engine that was given up
                    raise news.piece.error
                self._turns.begun(works[news.number].turn)
                if news.piece.reason:
                    left.discard(news.number)
                yield news
        finally:
            for number in left:
                self.runner.drop(works[number])
            self.texts -= texts
            self.tokens -= tokens
            self._turns.closed(address, texts, tokens)

    def _check_room(self, address, texts, tokens):
        """Refuse what would be too much of all, or of this address while others have room."""
        whose = (
            (self.texts, self.tokens, 1.0, "are open"),
            (self._turns.texts[address], self._turns.tokens[address], SHARE, "of yours are open"),
        )
        for open_texts, open_tokens, share, what in whose:
            # What one request may ask for is never too much of an address that has nothing open.
            if share < 1 and not open_texts:
                continue
            full = open_texts + texts > share * self.limits.texts
            if full or open_tokens + tokens > share * self.limits.tokens:
                count = f"{open_texts} texts" if full else f"{open_tokens} tokens"
                self.metrics.refused.inc()
                raise overloaded(f"too many requests, {count} {what}")


def _place_of(asked: Generation) -> dict[str, Any]:
    """Whom a request comes before, and whose pages it may share."""
    return {"priority": asked.priority, "salt": asked.cache_salt.encode("utf-8", "replace")}


def _put(arrived, number, piece):
    arrived.put_nowait(News(number, piece))
