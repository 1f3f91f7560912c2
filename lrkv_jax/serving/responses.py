"""OpenAI's response objects, whole or in chunks."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from lrkv_jax.inference.request import TokenLogprobs
from lrkv_jax.serving.completion import Completion, TextDelta
from lrkv_jax.serving.request_schema import ChatRequest, CompletionRequest
from lrkv_jax.serving.service import Service

# A number for −∞, which JSON does not have.
LEAST_LOG_P = -9999.0
# Of tokens that the calculator wrote, which nothing was drawn for.
_CERTAIN = TokenLogprobs(0.0, [])


class Responder:
    """The response to one request, made `whole` or as `events` from the deltas of its completions.

    completions, seed: as `Service.completions_of` gives them. began: of `time.monotonic`, when the
    request came.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest,
        completions: list[Completion],
        seed: int,
        began: float,
    ):
        self._service, self._body, self._completions = service, body, completions
        self._bytes, self._began = service.tokenizer.decode_bytes, began
        self._first: dict[int, float] = {}  # when each completion's first delta came
        self._chat = isinstance(body, ChatRequest)
        self._object = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
            "seed": seed,
        }

    async def whole(self, deltas: AsyncGenerator[TextDelta]) -> dict[str, Any]:
        """The response at once."""
        choices = [TextDelta(completion.index) for completion in self._completions]
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                self._measure(delta)
                choice = choices[delta.index]
                choice.text += delta.text
                choice.tokens += delta.tokens
                choice.finish_reason = delta.finish_reason
        made = [self._choice(choice) for choice in choices]
        return {**self._head, "object": self._object, "choices": made, "usage": self._usage()}

    async def events(self, deltas: AsyncGenerator[TextDelta]) -> AsyncGenerator[dict[str, Any]]:
        """The response in chunks."""
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                opens = delta.index not in self._first
                self._measure(delta)
                if opens and self._chat:
                    yield self._chunk(delta.index, {"role": "assistant", "content": ""})
                content = {"content": delta.text} if delta.text else {}
                text = content if self._chat else delta.text
                yield self._chunk(delta.index, text, **self._more(delta))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield {**self._chunk(0, ""), "choices": [], "usage": self._usage()}

    def _choice(self, delta):
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        content = {"message": message} if self._chat else {"text": delta.text}
        return {"index": delta.index, **content, **self._more(delta)}

    def _chunk(self, index, content, **more):
        choice = {"index": index, "delta" if self._chat else "text": content}
        choice |= {"logprobs": None, "finish_reason": None} | more
        kind = f"{self._object}.chunk" if self._chat else self._object
        return {**self._head, "object": kind, "choices": [choice]}

    def _more(self, delta):
        logprobs = None
        if self._body.logprob_count is not None:
            form = self._chat_logprobs if self._chat else self._completion_logprobs
            logprobs = form(delta.tokens)
        more = {"logprobs": logprobs, "finish_reason": delta.finish_reason or None}
        # The engine's thread may have found it while earlier deltas are still to be sent.
        stop_string = self._completions[delta.index].stop_string
        if delta.finish_reason and stop_string is not None:
            more["stop_reason"] = stop_string
        if self._body.return_token_ids:
            more["token_ids"] = [token.id for token in delta.tokens]
        return more

    def _chat_logprobs(self, tokens):
        content = []
        for token in tokens:
            logprob = token.logprob or _CERTAIN
            tops = [self._entry(*top) for top in logprob.tops]
            content.append({**self._entry(token.id, logprob.log_p), "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, tokens):
        logprobs = [token.logprob or _CERTAIN for token in tokens]
        return {
            "tokens": [self._spelled(token.id) for token in tokens],
            "token_logprobs": [_finite(logprob.log_p) for logprob in logprobs],
            "top_logprobs": [
                {self._spelled(i): _finite(log_p) for i, log_p in logprob.tops}
                for logprob in logprobs
            ],
            "text_offset": [token.start for token in tokens],
        }

    def _entry(self, token, log_p):
        piece = list(self._bytes([token]))
        return {"token": self._spelled(token), "logprob": _finite(log_p), "bytes": piece}

    def _spelled(self, token):
        """A token as OpenAI spells it: its text, bytes that are no text, or its id without any."""
        piece = self._bytes([token])
        try:
            return piece.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _usage(self):
        """Tokens of each prompt once, those that its first text found cached, and new ones."""
        firsts = self._completions[:: self._body.n]
        prompt = sum(len(completion.prompt) for completion in firsts)
        new = sum(completion.token_count for completion in self._completions)
        cached = sum(completion.sequence.result.cached_tokens for completion in firsts)
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def _measure(self, delta):
        metrics, now = self._service.metrics, time.monotonic()
        completion = self._completions[delta.index]
        if delta.index not in self._first:
            self._first[delta.index] = now
            metrics.first_token.observe(now - self._began)
            if delta.index % self._body.n == 0:
                metrics.prompt_tokens.inc(len(completion.prompt))
        metrics.generation_tokens.inc(len(delta.tokens))
        if delta.finish_reason:
            metrics.finished.labels(delta.finish_reason).inc()
            metrics.cached_tokens.inc(completion.sequence.result.cached_tokens)
            metrics.whole.observe(now - self._began)
            if completion.token_count > 1:
                after_first = now - self._first[delta.index]
                metrics.output_token.observe(after_first / (completion.token_count - 1))


def _finite(log_p):
    return log_p if math.isfinite(log_p) else LEAST_LOG_P
