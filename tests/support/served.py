"""Small services, and clients of a server, on whatever connection they like."""

import contextlib
import http.client
import json
import os
import queue
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from support.hand_built import a_run, calling_run
from support.variants import random_params

from lrkv_jax.serving.server import bound, serve
from lrkv_jax.serving.service import Service

ENVIRONMENT = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def served(run, name="tiny", queue=60, **more):
    """Every service has the same shapes, so that its programs are compiled once."""
    return Service(run, name, batch=4, context=256, queue=queue, **more)


def random_run():
    config = calling_run().config.model
    return a_run(config, random_params(config, 3), context=256, chats=True)


@contextlib.contextmanager
def serving(service, key=None, *, port=0, drain=30.0, **how):
    """The port of a server in a thread of this process; raises what ended it."""
    listener = bound("127.0.0.1", port, key)
    port = listener.getsockname()[1]
    leaves = queue.SimpleQueue()
    with ThreadPoolExecutor(1, "server") as pool:
        ended = pool.submit(serve, service, listener, key, drain=drain, ready=leaves.put, **how)
        ended.add_done_callback(lambda _: leaves.put(None))
        leave = leaves.get()  # None if it ended before it was ready
        try:
            if leave is not None:
                yield port
        finally:
            if leave is not None:
                leave()
            ended.result()


def idle(service):
    """Whether nothing is left of any request."""
    engine = service.engine_loop.engine
    free = sum(pool.free for pool in engine.scheduler.pools)
    return not service.open and free == engine.pages


def wait_until(true, seconds=30.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def slow(service, monkeypatch):
    """Until it is undone, calls of the service's engine take a tenth of a second more."""
    calls = service.engine_loop.engine.calls
    read = calls.read
    monkeypatch.setattr(calls, "read", lambda ahead: (time.sleep(0.1), read(ahead))[1])


def post(port, path, body, **headers):
    """(status, JSON, headers) of a request whose body is JSON or bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(connection):
        connection.request("POST", path, data, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def raw(port, data: bytes, source="127.0.0.1") -> socket.socket:
    """A connection from this address on which these bytes were sent."""
    there = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))
    there.sendall(data)
    return there


def asks(body, path="/v1/completions") -> bytes:
    """A request as it is on the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data


def started(run, *options, before=()):
    """(the process, its port, what it printed) once `lrkv serve` is ready, after `before`."""
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "lrkv_jax.cli", "serve", str(run), "--port", "0", *options],
        env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    printed = ""
    while "ready at" not in printed:
        line = process.stdout.readline()
        assert line, process.communicate()
        printed += line
    return process, int(re.search(r"ready at http://127.0.0.1:(\d+)/", printed)[1]), printed
