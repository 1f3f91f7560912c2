"""One request of a client: its completions in the engine, and the responses that report them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from lrkv_jax.serving.completion import Completion, TextDelta
from lrkv_jax.serving.request_schema import ChatRequest, CompletionRequest
from lrkv_jax.serving.responses import ResponseBuilder, TokenNames, usage
from lrkv_jax.serving.service import Service

Deltas = AsyncGenerator[TextDelta]


class Handler:
    """Serves one request: `deltas` of its completions, reported by `response` or by `events`.

    completions, seed: as `Service.completions_of` gives them. began: of `time.monotonic`, when the
    request came. address: whom it came from.
    """

    def __init__(
        self,
        service: Service,
        names: TokenNames,
        body: CompletionRequest | ChatRequest,
        completions: list[Completion],
        seed: int,
        began: float,
        address: str,
    ):
        self._service, self._body, self._completions = service, body, completions
        self._began, self._address = began, address
        self._first: dict[int, float] = {}
        self._responses = ResponseBuilder(
            chat=isinstance(body, ChatRequest), model=service.name,
            fingerprint=service.fingerprint, seed=seed, names=names,
            logprobs=body.logprob_count is not None, ids=body.return_token_ids,
        )  # fmt: skip

    async def deltas(self) -> Deltas:
        """The deltas of each completion, as they come."""
        deltas = self._service.deltas(self._completions, self._address)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                self._measure(delta)
                yield delta

    async def response(self, first: TextDelta, deltas: Deltas) -> dict[str, Any]:
        """The response at once, of the first delta and those that follow."""
        choices = [TextDelta(completion.index) for completion in self._completions]
        async for delta in _all(first, deltas):
            choice = choices[delta.index]
            choice.text += delta.text
            choice.tokens += delta.tokens
            choice.finish_reason = delta.finish_reason
        pairs = zip(choices, self._completions, strict=True)
        made = [self._responses.choice(*pair) for pair in pairs]
        return self._responses.whole(made, self._usage())

    async def events(self, first: TextDelta, deltas: Deltas) -> AsyncIterator[dict[str, Any]]:
        """The response in chunks."""
        opened: set[int] = set()
        async for delta in _all(first, deltas):
            if delta.index not in opened:
                opened.add(delta.index)
                for head in self._responses.first(delta.index):
                    yield head
            yield self._responses.chunk(delta, self._completions[delta.index])
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield self._responses.last(self._usage())

    def _usage(self):
        return usage(self._completions, self._body.choices)

    def _measure(self, delta):
        metrics, now = self._service.metrics, time.monotonic()
        completion = self._completions[delta.index]
        if delta.index not in self._first:
            self._first[delta.index] = now
            metrics.first_token.observe(now - self._began)
            if delta.index % self._body.choices == 0:
                metrics.prompt_tokens.inc(len(completion.prompt))
        metrics.generation_tokens.inc(len(delta.tokens))
        if delta.finish_reason:
            metrics.finished.labels(delta.finish_reason).inc()
            metrics.cached_tokens.inc(completion.sequence.result.cached_tokens)
            metrics.whole.observe(now - self._began)
            if completion.token_count > 1:
                after_first = now - self._first[delta.index]
                metrics.output_token.observe(after_first / (completion.token_count - 1))


async def _all(first, deltas):
    async with contextlib.aclosing(deltas):
        yield first
        async for delta in deltas:
            yield delta
