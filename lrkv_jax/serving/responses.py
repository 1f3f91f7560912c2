"""OpenAI's response objects, whole or in chunks."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.inference.request import TokenLogprobs
from lrkv_jax.serving.completion import Completion, TextDelta, Token

# A number for −∞, which JSON does not have.
LEAST_LOG_P = -9999.0
# Of tokens that the calculator wrote, which nothing was drawn for.
_CERTAIN = TokenLogprobs(0.0, [])


class TokenNames:
    """Tokens as OpenAI spells them in `logprobs`."""

    def __init__(self, tokenizer: Tokenizer):
        self._bytes = tokenizer.decode_bytes

    def name(self, token: int) -> str:
        """A token's text; its bytes where they are no text, its id where it has none."""
        piece = self._bytes([token])
        try:
            return piece.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""
        content = []
        for token in tokens:
            logprob = token.logprob or _CERTAIN
            tops = [self._entry(*top) for top in logprob.tops]
            content.append({**self._entry(token.id, logprob.log_p), "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`logprobs` of a completion's choice."""
        logprobs = [token.logprob or _CERTAIN for token in tokens]
        return {
            "tokens": [self.name(token.id) for token in tokens],
            "token_logprobs": [_finite(logprob.log_p) for logprob in logprobs],
            "top_logprobs": [
                {self.name(i): _finite(log_p) for i, log_p in logprob.tops} for logprob in logprobs
            ],
            "text_offset": [token.start for token in tokens],
        }

    def _entry(self, token, log_p):
        piece = list(self._bytes([token]))
        return {"token": self.name(token), "logprob": _finite(log_p), "bytes": piece}


def _finite(log_p):
    return log_p if math.isfinite(log_p) else LEAST_LOG_P


class ResponseBuilder:
    """The objects of one response: `whole`, or a `chunk` for each delta and `last` for usage."""

    def __init__(
        self, *, chat: bool, model: str, fingerprint: str, seed: int, names: TokenNames,
        logprobs: bool, ids: bool,
    ):  # fmt: skip
        self._chat, self._names, self._logprobs, self._ids = chat, names, logprobs, ids
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            "seed": seed,
        }
        self._object = "chat.completion" if chat else "text_completion"

    def first(self, index: int) -> list[dict[str, Any]]:
        """The first chunk of a choice: a chat's role."""
        return [self._chunk(index, {"role": "assistant", "content": ""})] if self._chat else []

    def chunk(self, delta: TextDelta, completion: Completion) -> dict[str, Any]:
        """A delta of this completion, with how many tokens it is of."""
        content = {"content": delta.text} if delta.text else {}
        more = {**self._more(delta, completion), "tokens": len(delta.tokens)}
        return self._chunk(delta.index, content if self._chat else delta.text, **more)

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that reports the usage."""
        return {**self._head, "object": self._named(True), "choices": [], "usage": usage}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The response at once."""
        return {**self._head, "object": self._object, "choices": choices, "usage": usage}

    def choice(self, delta: TextDelta, completion: Completion) -> dict[str, Any]:
        """A choice of the whole response."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        content = {"message": message} if self._chat else {"text": delta.text}
        return {"index": delta.index, **content, **self._more(delta, completion)}

    def _more(self, delta, completion):
        logprobs = None
        if self._logprobs:
            form = self._names.chat if self._chat else self._names.completion
            logprobs = form(delta.tokens)
        more = {"logprobs": logprobs, "finish_reason": delta.finish_reason or None}
        # The engine's thread may have found it while earlier deltas are still to be sent.
        if delta.finish_reason and completion.stop_string is not None:
            more["stop_reason"] = completion.stop_string
        if self._ids:
            more["token_ids"] = [token.id for token in delta.tokens]
        return more

    def _named(self, chunk):
        return f"{self._object}.chunk" if self._chat and chunk else self._object

    def _chunk(self, index, content, **more):
        choice = {"index": index, "delta" if self._chat else "text": content}
        choice |= {"logprobs": None, "finish_reason": None} | more
        return {**self._head, "object": self._named(True), "choices": [choice]}


def usage(completions: Sequence[Completion], choices: int) -> dict[str, Any]:
    """Tokens of each prompt once, those that its first completion found cached, and new ones."""
    firsts = completions[::choices]
    prompt = sum(len(completion.prompt) for completion in firsts)
    new = sum(completion.token_count for completion in completions)
    cached = sum(one.sequence.result.cached_tokens for one in firsts if one.sequence)
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
