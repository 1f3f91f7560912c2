"""Clients of a server, on whatever connection they like."""

import contextlib
import http.client
import json
import socket


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
