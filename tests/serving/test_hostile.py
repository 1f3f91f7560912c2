"""Clients that mean harm: whatever they send, others are answered, and nothing of them is left."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from support import watch
from support.served import asks, get, post, raw, started, wait_until

# All that a server writes of itself; a slow machine also writes that it reads the run, and more.
LINES = r"(lrkv: (start|read|compil)ing.*\n)*ended: every accepted request was answered\n"
PLAIN = {"prompt": "We the people", "max_tokens": 8, "temperature": 0}


@contextlib.contextmanager
def watched(port):
    """What another client saw of the server meanwhile, once it is over."""
    watcher = subprocess.Popen(
        [sys.executable, watch.__file__, str(port)],
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    seen = {}
    time.sleep(0.5)  # it asks from now on
    yield seen
    out, _ = watcher.communicate("", timeout=60)
    seen.update(json.loads(out))


def held(process):
    """(bytes in memory, threads, open files) of a process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    files = len(os.listdir(f"/proc/{process.pid}/fd"))
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["Threads"]), files


def sent(port, path, body):
    """The status of a body, or 0 where the connection ended before it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
        except OSError:
            return 0
        answer = connection.getresponse()
        answer.read()
        return answer.status


@pytest.mark.faults
def test_hostile_clients_delay_nobody_and_leave_nothing(run):
    process, port, _ = started(run)
    try:
        right = post(port, "/v1/completions", PLAIN)[1]["choices"]
        for number, (path, body) in enumerate(mutated(60)):  # what is loaded once
            sent(port, path, body)
            if number % 10 == 0:
                hurry(port, 1, 40)
        before = held(process)
        phases = {
            "bodies": lambda: statuses(port, mutated(300), 4),
            "large": lambda: statuses(port, islice(large(), 0, None, 40), 2),
            "idle": lambda: idle_sockets(port),
            "clients": lambda: hurry(port, 5, 200),
        }
        for name, phase in phases.items():
            with watched(port) as seen:
                told = phase()
            print(name, told, seen, held(process), flush=True)
            assert not seen["failed"], (name, seen)
            assert seen["live"] < 1 and seen["live_count"] > 10, (name, seen)
            assert name == "clients" or seen["text"] < 1, (name, seen)
            wait_until(lambda: "num_requests_open 0.0" in get(port, "/metrics")[1])
        assert post(port, "/v1/completions", PLAIN)[1]["choices"] == right
        wait_until(lambda: held(process)[2] <= before[2] + 2, 60)
        after = held(process)
        print("held", before, after)
        assert after[0] <= 1.2 * before[0] and after[1] <= before[1] + 2
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and re.fullmatch(LINES, errors), errors[-2000:]


def statuses(port, bodies, at_a_time):
    """How often each status is the answer, none of which is the server's own fault."""
    with ThreadPoolExecutor(at_a_time) as pool:
        counts = Counter(pool.map(lambda one: sent(port, *one), bodies))
    assert set(counts) <= {200, 400, 404, 408, 413, 429}, counts
    return counts


def idle_sockets(port, count=2048):
    """Connections that say nothing, or half a request; how many were open."""
    there = []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            if number % 4 == 1:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
            if number % 4 == 2:
                one.sendall(asks(PLAIN)[:-2])
            there.append(one)
        time.sleep(3)
    return len(there)


def hurry(port, seconds, clients):
    """Clients that ask at once for so long, a tenth of whom go away in mid-answer; how it went.

    Whoever asks the same gets the same text.
    """
    end, texts = time.monotonic() + seconds, {}

    def client(number):
        rng, counts = np.random.default_rng([4, number]), Counter()
        while time.monotonic() < end:
            length = int(rng.integers(1, 20))
            body = {"prompt": "We the people " * length, "max_tokens": 16, "seed": length}
            if rng.integers(10) == 0:
                with raw(port, asks({**body, "stream": True, "n": 4})) as there:
                    time.sleep(rng.uniform(0, 0.2))
                    with contextlib.suppress(OSError):
                        there.recv(100)
                kind = "gone"
            else:
                status, answer, _ = post(port, "/v1/completions", body)
                assert status in (200, 429), status
                kind = "answered" if status == 200 else "refused"
                if status == 429:
                    time.sleep(0.2)
                else:
                    (choice,) = answer["choices"]
                    assert texts.setdefault(length, choice["text"]) == choice["text"]
            counts[kind] += 1
        return counts

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(client, range(clients)), Counter())


@pytest.mark.faults
def test_few_files_are_enough(run):
    """With 200 files the server answers beside 500 connections, and its log says nothing."""
    shell = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh"]
    process, port, _ = started(run, before=shell)
    try:
        with contextlib.ExitStack() as stack, watched(port) as seen:
            for _ in range(500):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            time.sleep(2)
            assert post(port, "/v1/completions", PLAIN)[0] == 200
        assert not seen["failed"] and seen["live"] < 1, seen
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and re.fullmatch(LINES, errors), errors[-2000:]


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
