"""OpenAI's objects: what a client gets, whole or in pieces."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.inference.request import Told
from lrkv_jax.serving.texts import Piece, Text, Token

# What JSON has in place of −∞.
LEAST_LOG_P = -9999.0


class Spelling:
    """Tokens as OpenAI spells them."""

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
            told = token.told or _CERTAIN
            tops = [self._entry(*top) for top in told.tops]
            content.append({**self._entry(token.id, told.log_p), "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`logprobs` of a completion's choice."""
        tops = []
        for token in tokens:
            told = token.told
            tops.append(told and {self.name(i): _finite(log_p) for i, log_p in told.tops})
        return {
            "tokens": [self.name(token.id) for token in tokens],
            "token_logprobs": [token.told and _finite(token.told.log_p) for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.start for token in tokens],
        }

    def _entry(self, token, log_p):
        piece = list(self._bytes([token]))
        return {"token": self.name(token), "logprob": _finite(log_p), "bytes": piece}


# Of tokens that the calculator wrote, which nothing was drawn for.
_CERTAIN = Told(0.0, [])


def _finite(log_p):
    return log_p if math.isfinite(log_p) else LEAST_LOG_P


class Reply:
    """The objects of one reply: `whole`, or a `chunk` for each piece and `last` for usage."""

    def __init__(
        self, *, chat: bool, model: str, fingerprint: str, seed: int, spelling: Spelling,
        tells: bool, ids: bool,
    ):  # fmt: skip
        self._chat, self._spelling, self._tells, self._ids = chat, spelling, tells, ids
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            "seed": seed,
        }
        self._object = "chat.completion" if chat else "text_completion"

    def first(self, index: int) -> list[dict[str, Any]]:
        """What opens a choice: a chat's role."""
        return [self._chunk(index, {"role": "assistant", "content": ""})] if self._chat else []

    def chunk(self, index: int, piece: Piece, text: Text | None) -> dict[str, Any]:
        """A piece of choice `index`, which is this text, with how many tokens it is of."""
        content = {"content": piece.text} if piece.text else {}
        more = {**self._more(piece, text), "tokens": len(piece.tokens)}
        return self._chunk(index, content if self._chat else piece.text, **more)

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that says what was used."""
        return {**self._head, "object": self._named(True), "choices": [], "usage": usage}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The reply at once."""
        return {**self._head, "object": self._object, "choices": choices, "usage": usage}

    def choice(self, index: int, piece: Piece, text: Text | None) -> dict[str, Any]:
        """A choice of the whole reply."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        content = {"message": message} if self._chat else {"text": piece.text}
        return {"index": index, **content, **self._more(piece, text)}

    def _more(self, piece, text):
        told = None
        if self._tells:
            spell = self._spelling.chat if self._chat else self._spelling.completion
            told = spell(piece.tokens)
        more = {"logprobs": told, "finish_reason": piece.reason or None}
        if text is not None and text.stopped is not None:
            more["stop_reason"] = text.stopped
        if self._ids:
            more["token_ids"] = [token.id for token in piece.tokens]
        return more

    def _named(self, chunk):
        return f"{self._object}.chunk" if self._chat and chunk else self._object

    def _chunk(self, index, content, **more):
        choice = {"index": index, "delta" if self._chat else "text": content}
        choice |= {"logprobs": None, "finish_reason": None} | more
        return {**self._head, "object": self._named(True), "choices": [choice]}


def usage(prompts: Sequence[Sequence[int]], texts: Sequence[Text], n: int) -> dict[str, Any]:
    """What a reply took: each prompt once, what its first text found cached, and all new tokens."""
    asked, new = sum(map(len, prompts)), sum(text.tokens for text in texts)
    cached = sum(text.request.from_prefix for text in texts[::n] if text.request is not None)
    return {
        "prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
