"""`lrkv serve` as a process: it is told to end, it is killed, and it says what is wrong."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.command import lrkv
from support.served import ENVIRONMENT, asks, get, post, raw, started, wait_until

from lrkv_jax.errors import EXIT_UNAVAILABLE

LONG = {"prompt": "We", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@pytest.mark.faults
def test_sigterm_answers_what_was_accepted_and_a_killed_server_starts_again(run):
    process, port, _ = started(run, "--batch", "2")
    other = [sys.executable, "-m", "lrkv_jax.cli", "serve", str(run), "--port", str(port)]
    taken = subprocess.run(other, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert taken.returncode == EXIT_UNAVAILABLE
    assert "Address already in use; use another --port" in taken.stderr

    whole = post(port, "/v1/completions", LONG)[1]["choices"][0]["text"]
    texts, connections = [], [raw(port, asks(LONG)) for _ in range(8)]
    readers = [threading.Thread(target=lambda c=c: texts.append(text_of(c))) for c in connections]
    for reader in readers:
        reader.start()
    wait_until(lambda: "num_requests_open 8.0" in get(port, "/metrics")[1])
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    for reader in readers:
        reader.join(60)
    assert process.returncode == 0 and texts == [whole] * 8, errors
    with pytest.raises(ConnectionRefusedError):
        raw(port, b"")

    process, port, _ = started(run, "model.kv_cache_dtype=int8")
    with raw(port, asks({**LONG, "stream": True})) as there:
        assert there.recv(100).startswith(b"HTTP/1.1 200")
        process.kill()
        process.communicate(timeout=60)
    process, port, _ = started(run)
    assert post(port, "/v1/completions", LONG)[1]["choices"][0]["text"] == whole
    there = [raw(port, asks({**LONG, "temperature": 1, "n": 16})) for _ in range(4)]
    wait_until(lambda: "num_requests_open 64.0" in get(port, "/metrics")[1])
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.splitlines()[-1] == "ended: 4 requests were cut short" and "Error" not in errors
    assert process.returncode == 0
    for one in there:
        one.close()


def text_of(connection):
    with connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200
        return json.loads(answer.read())["choices"][0]["text"]


WRONG = [
    (["--host", "0.0.0.0"], "lets others in: give --key-file FILE"),
    (["--key-file", "{run}"], "Is a directory"),
    (["--cache", "1x"], "--cache 1x: use a size, as in 512MB or 2GiB"),
    (["--cache", "20k"], "a request of 256 tokens needs .* bytes of cache"),
    (["--host", "nowhere.invalid"], "no such address"),
    (["--context", "2"], "2: use a whole number from 3 on"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_cannot_be_served_is_one_line(options, message, run, capsys, monkeypatch):
    options = [option.format(run=run) for option in options]
    code, _, errors = lrkv(capsys, monkeypatch, "serve", run, "--port", "0", *options)
    # A slow machine also prints that it reads the run, or compiles.
    told = [line for line in errors.splitlines() if not re.match("lrkv: (read|compil)ing", line)]
    assert code == 2 and len(told) == 1 and re.search(message, told[0])
