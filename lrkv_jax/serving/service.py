"""The service: a run, the thread of its engine, and the admission of requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from lrkv_jax import __version__
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import Conversation, text_message
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine
from lrkv_jax.inference.request import RngStream, check_tokens
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.serving.completion import Completion, TextDelta
from lrkv_jax.serving.engine_loop import EngineLoop
from lrkv_jax.serving.metrics import Metrics
from lrkv_jax.serving.request_schema import ChatRequest, CompletionRequest

# Seconds after which a call that has not ended counts as a hang.
HANG_SECONDS = 120.0
# The most of what is open that one address may have.
SHARE = 0.75


class FairQueue:
    """The open texts of each address, and the turn of its next one, so that addresses take turns.

    A text does not wait for all texts of a busier address: start-time fair queueing (Goyal, Vin and
    Cheng, 1996), with a text as the unit.

    An address's texts have ascending turns, one apart; its first comes after what is being decoded.
    So one address alone is served in the order of its requests, and several are served in turn.
    """

    def __init__(self) -> None:
        self.completions: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._now = 0  # the latest turn whose text was begun

    def opened(self, address: str, texts: int, tokens: int) -> list[int]:
        """Count texts of this address; the turn of each."""
        self.completions[address] += texts
        self.tokens[address] += tokens
        first = max(self._now, self._last.get(address, 0)) + 1
        self._last[address] = first + texts - 1
        return list(range(first, first + texts))

    def begun(self, turn: int) -> None:
        """A text of this turn has its first token."""
        self._now = max(self._now, turn)

    def closed(self, address: str, texts: int, tokens: int) -> None:
        """Count texts that ended; an address with none left is dropped."""
        self.completions[address] -= texts
        self.tokens[address] -= tokens
        if not self.completions[address]:
            del self.completions[address], self.tokens[address]
            self._last.pop(address, None)


@dataclass(frozen=True)
class ServiceLimits:
    """Limits for all clients together, and for each.

    completions: that are open at a time, with those that wait. tokens: of their prompts and new
    text. body: bytes of a request. bodies: of all that are being read. seconds: until a response
    has ended.
    """

    completions: int
    tokens: int
    body: int = 2 << 20
    bodies: int = 64 << 20
    seconds: float = 600.0


class APIError(Exception):
    """An answer other than 200: OpenAI's `type`, `code` and `param` next to the message."""

    def __init__(
        self, status: int, text: str, *, code: str | None = None, param: str | None = None,
        kind: str = "invalid_request_error", retry_after: int | None = None,
    ):  # fmt: skip
        super().__init__(text)
        self.status, self.code, self.param, self.kind = status, code, param, kind
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def overloaded(text: str) -> APIError:
    """The error of a request that comes while there is no room, and may come again."""
    return APIError(
        429, f"{text}: try again", kind="rate_limit_error", code="overloaded", retry_after=1
    )


class Service:
    """A run that is served under a name, by an engine whose programs are compiled."""

    def __init__(
        self,
        run: TrainedRun,
        name: str,
        *,
        batch: int,
        context: int,
        cache_bytes: int | None = None,
        queue: int = 256,
    ):
        """A service that decodes `batch` texts of up to `context` tokens and lets `queue` wait.

        Raises `LrkvError` for a cache that has no room for one text of the whole context.
        """
        engine = Engine(run, batch=batch, length=context, cache_bytes=cache_bytes)
        engine.warm()
        most = engine.batch + queue
        self.limits = ServiceLimits(most, most * context)
        self.run, self.name = run, name
        self.context, self.tokenizer = engine.length, run.tokenizer
        self._longest = int(run.tokenizer.token_bytes.max())  # bytes of a token
        self.engine_loop = EngineLoop(engine)
        chat, config = ChatFormat(run.tokenizer), run.config
        # Of a run that was not trained to chat the server completes texts alone.
        chats = chat.trained(config.data) and chat.vocabulary <= config.model.vocabulary
        self.chat = chat if chats else None
        self.metrics = Metrics(self.engine_loop, lambda: self.open)
        self.created = int(time.time())
        self.fingerprint = f"lrkv-{__version__}-step{run.step}"
        self.draining = False
        self._queue = FairQueue()
        self.open = self.open_tokens = 0  # completions, and what they may take

    @property
    def takes_system(self) -> bool:
        """Whether the chat format passes on a system message: a template may leave it out."""
        messages = text_message("system", "Be brief."), text_message("user", "Yes?")
        try:
            return self.chat is not None and "Be brief." in self.chat.shown(Conversation(messages))
        except LrkvError:  # the template refuses it
            return False

    def health(self) -> str:
        """Empty if the engine answers; else what is the matter."""
        if self.engine_loop.fault is not None:
            return str(self.engine_loop.fault)
        if self.draining:
            return "the server is shutting down"
        if self.engine_loop.seconds_in_call > HANG_SECONDS:
            return f"a call of the engine has not ended for {HANG_SECONDS:.0f} seconds"
        return ""

    def check(self, model: str | None) -> None:
        """Raise `APIError` for another model's name, and where nothing can be served."""
        if model is not None and model != self.name:
            text = f"model {model} is not served here: use {self.name}"
            raise APIError(404, text, code="model_not_found", param="model")
        if trouble := self.health():
            raise APIError(503, trouble, kind="server_error", code="unavailable", retry_after=5)

    # Requests.

    def completions_of(self, body: CompletionRequest | ChatRequest) -> tuple[list[Completion], int]:
        """Return the completions that are requested, and the seed of their sampling."""
        if isinstance(body, ChatRequest):
            self._check_number("n", body.n)
            return self._answers(body)
        prompts = body.prompts
        self._check_number("prompt", len(prompts) * body.n)
        for prompt in prompts:
            self._check_length("prompt", prompt)
        ids = [self._ids(number, prompt) for number, prompt in enumerate(prompts)]
        if not ids:
            raise APIError(400, "prompt: give one or more", param="prompt")
        ends = () if body.ignore_eos else self.tokenizer.eos_token_ids
        return self._completions(body, ids, body.most, ends, None, "prompt")

    def _answers(self, body):
        if self.chat is None:
            text = f"{self.name} was not trained to chat: use /v1/completions"
            raise APIError(400, text, code="no_chat")
        self._check_length("messages", "".join(m.plain["content"] for m in body.messages))
        prompt = self.chat.prompt(body.conversation())
        most = max(1, self.context - len(prompt)) if body.most is None else body.most
        ends = () if body.ignore_eos else self.chat.stop_token_ids
        return self._completions(body, [prompt], most, ends, self.chat, "messages")

    def _completions(self, body, prompts, most, ends, chat, param):
        """Completions of up to `most` tokens of each prompt, which came in the field `param`."""
        for prompt in prompts:
            if len(prompt) + most > self.context:
                text = (
                    f"the context is {self.context} tokens, and the prompt has {len(prompt)} and "
                    f"the text up to {most}: shorten either"
                )
                raise APIError(400, text, code="context_length_exceeded", param=param)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        n, sampling = body.n, body.sampling()
        self._check_ids("logit_bias", list(sampling.bias))
        self._check_ids("stop_token_ids", body.stop_token_ids)
        options = {
            "stop_token_ids": frozenset([*ends, *body.stop_token_ids]),
            "pauses": frozenset([chat.ids.python_end] if chat else []), "sampling": sampling,
            "min_tokens": body.min_tokens, "logprobs": body.logprob_count,
        }  # fmt: skip
        made = [
            Completion(
                self.tokenizer, index, prompts[index // n], most, chat=chat, stop=body.stop_strings,
                options={**options, "rng": RngStream(seed, index)},
            )
            for index in range(len(prompts) * n)
        ]  # fmt: skip
        return made, seed

    @property
    def _of_an_address(self):
        """Texts and tokens that one may have open: always one text of a whole context."""
        limits = self.limits
        return max(1, int(SHARE * limits.completions)), max(self.context, SHARE * limits.tokens)

    def _check_number(self, param, texts):
        """Refuse what will never have room, however few others are open."""
        most, _ = self._of_an_address
        if texts > most:
            text = f"{texts} texts are more than the {most} that may be open: ask for fewer"
            raise APIError(400, text, param=param)

    def _check_length(self, param, prompt):
        """Refuse, before any text is made into tokens, what is too long whatever its tokens are."""
        longest = self._longest if isinstance(prompt, str) else 1
        least = -(-(len(prompt.encode()) if isinstance(prompt, str) else len(prompt)) // longest)
        if least > self.context:
            text = f"the context is {self.context} tokens, and the prompt has {least} at least"
            raise APIError(400, f"{text}: shorten it", code="context_length_exceeded", param=param)

    def _ids(self, number, prompt):
        if isinstance(prompt, str):
            return self.run.ids(prompt)
        self._check_ids("prompt", prompt, f"prompt {number}")
        return prompt

    def _check_ids(self, param, ids, name=None):
        try:
            check_tokens(name or param, ids, self.run.config.model.vocabulary)
        except LrkvError as error:
            raise APIError(400, str(error), param=param) from None

    # Admission.

    async def deltas(
        self, completions: Sequence[Completion], address: str = ""
    ) -> AsyncGenerator[TextDelta]:
        """The deltas of each completion, as they come, until all have ended.

        address: whom they are for. Whatever ends the iteration ends the completions. Raises
        `APIError` at once where too many are open, and `TimeoutError` for what takes too long.
        """
        count = len(completions)
        tokens = sum(len(one.prompt) + one.max_tokens for one in completions)
        self._check_room(address, count, tokens)
        self.open += count
        self.open_tokens += tokens
        for one, turn in zip(completions, self._queue.opened(address, count, tokens), strict=True):
            one.turn = turn
        arrived: asyncio.Queue[TextDelta] = asyncio.Queue()
        left = set(range(count))
        try:
            for one in completions:
                self.engine_loop.add(one, arrived.put_nowait)
            # Each delta may be waited for by another task.
            end = asyncio.get_running_loop().time() + self.limits.seconds
            while left:
                if asyncio.get_running_loop().time() > end:  # what is there is not waited for
                    raise TimeoutError
                async with asyncio.timeout_at(end):
                    delta = await arrived.get()
                if delta.error is not None:
                    if self.engine_loop.fault is not None:  # the engine was given up
                        self.check(None)
                    raise delta.error
                self._queue.begun(completions[delta.index].turn)
                if delta.finish_reason:
                    left.discard(delta.index)
                yield delta
        finally:
            for index in left:
                self.engine_loop.cancel(completions[index])
            self.open -= count
            self.open_tokens -= tokens
            self._queue.closed(address, count, tokens)

    def _check_room(self, address, count, tokens):
        """Refuse what would be too much of all, or of this address while others have room."""
        of_address = self._queue.completions[address], self._queue.tokens[address]
        of_all = self.limits.completions, self.limits.tokens
        whose = (
            (self.open, self.open_tokens, *of_all, "are open"),
            (*of_address, *self._of_an_address, "of yours are open"),
        )
        for opened, open_tokens, most, most_tokens, what in whose:
            full = opened + count > most
            if full or open_tokens + tokens > most_tokens:
                number = f"{opened} texts" if full else f"{open_tokens} tokens"
                self.metrics.refused.inc()
                raise overloaded(f"too many requests, {number} {what}")
