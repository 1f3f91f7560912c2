"""A server of a tiny model in this process, and clients that behave badly."""

import contextlib
import http.client
import json
import socket
import threading

from lrkv_jax.serve.server import bound, serve
from lrkv_jax.serve.service import Service


@contextlib.contextmanager
def serving(service: Service, key: str | None = None):
    """Serve in a thread of this process; yields the port."""
    there = bound("127.0.0.1", 0, key)
    port, ready = there.getsockname()[1], threading.Event()
    servers, wrong = [], []

    def run():
        try:
            serve(
                service, there, key, drain=20,
                ready=lambda leave: (servers.append(leave), ready.set()),
            )  # fmt: skip
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield port
    finally:
        servers[0]()
        thread.join(60)
        assert not thread.is_alive()
        if wrong:
            raise wrong[0]


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


def raw(port, data: bytes) -> socket.socket:
    """A connection on which these bytes were sent."""
    there = socket.create_connection(("127.0.0.1", port), timeout=60)
    there.sendall(data)
    return there


def asks(body, path="/v1/completions") -> bytes:
    """A request as it is on the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data
