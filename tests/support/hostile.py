"""Bodies that a server has no use for: mutations of good ones, and ones of megabytes."""

import json

import numpy as np

GOOD = [
    ("/v1/completions", {"prompt": "We the people", "max_tokens": 4, "temperature": 0}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "n": 2, "logprobs": 1}),
    ("/v1/completions", {"prompt": "We", "max_tokens": 3, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "How much?"}]}),
    ("/tokenize", {"prompt": "We the people"}),
]
FIELDS = (
    "prompt", "messages", "tokens", "max_tokens", "max_completion_tokens", "min_tokens", "n",
    "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "stop", "presence_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "stream",
    "stream_options", "logprobs", "top_logprobs", "echo", "return_token_ids", "cache_salt",
    "priority", "timeout",
    "user", "model", "tools", "response_format", "best_of", "suffix", "chat_template", "\u0000",
)  # fmt: skip
VALUES = (
    2**31 - 1, 2**31, 2**63, 2**64, -1, -(2**63), 10**400, 0, 1e308, 1e-308, -0.0, 0.5, 1, 15, True,
    None, "", "\u0000", "\ud800", "a" * 3000, "%s%n{}", [], {}, [[]], [None], [[[[[[]]]]]],
    ["a", 1], [1, "a"], [2**31], [-1], [0] * 300, ["x"] * 17, [""], {"0": 1e9}, {"-1": 0},
    {"9" * 400: 1}, {"4999": -100}, {str(i): 1 for i in range(299)}, {"include_usage": "yes"},
    [{"role": "user", "content": [{"type": "text", "text": "a"}] * 50}],
    [{"role": "user", "content": None}], [{"role": "\u202e", "content": "a"}],
    [{"role": "system", "content": "a"}] * 40, float("nan"), float("inf"),
)  # fmt: skip


def mutated(count):
    """So many (path, bytes) of bodies, always the same."""
    rng = np.random.default_rng(33)
    for _ in range(count):
        path, body = GOOD[rng.integers(len(GOOD))]
        body = dict(body)
        for _ in range(rng.integers(1, 3)):
            body[FIELDS[rng.integers(len(FIELDS))]] = VALUES[rng.integers(len(VALUES))]
        data = bytearray(json.dumps(body).encode())
        kind = rng.integers(12)
        if kind == 0:  # cut short
            del data[rng.integers(len(data)) :]
        if kind == 1:  # a byte changed
            data[rng.integers(len(data))] = rng.integers(256)
        if kind == 2:  # a stretch twice
            start, end = sorted(rng.integers(0, len(data), 2))
            data[end:end] = data[start:end]
        yield path, bytes(data)


def large(size=2 << 20):
    """(path, bytes) of bodies near this size, each of many equal pieces."""
    pieces = {
        "[": "", "[[],": "", '{"a":': "", '[{"a":': "", "[1,": "", "[],": "", "{},": "", "1,": "",
        '"a",': "", "[1],": "", '{"role":"user","content":"a"},': "", "null,": "", "9": "", "a": "",
        "\\u0000": "", " ": "", "1e9,": "", "\\ud83d\\ude00": "", '{"a":[],"b":{}},': "",
    }  # fmt: skip
    for piece in pieces:
        many = piece * ((size - 200) // len(piece))
        yield "/v1/completions", many.encode()
        inner = (
            f'"{many}"' if piece in ("a", "\\u0000", "\\ud83d\\ude00") else f"[{many.rstrip(',')}]"
        )
        for path, field in (
            ("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"),
            ("/v1/completions", "stop"),
        ):  # fmt: skip
            yield path, f'{{"prompt": "a", "{field}": {inner}}}'.encode()
    many = ",".join(f'"{number}":1' for number in range(size // 12))
    yield "/v1/completions", f'{{"prompt": "a", "logit_bias": {{{many}}}}}'.encode()
    yield "/v1/completions", f'{{"prompt": "a", {many}}}'.encode()
