"""A client of another address: what a server takes to answer it beside others, until stdin ends.

Run as a process, so that what the others do takes none of its time. Prints one line of JSON: the
seconds of the slowest answer to /live and of the slowest small text, and how many of each came.
"""

import http.client
import json
import sys
import threading
import time

BODY = json.dumps({"prompt": "We", "max_tokens": 2, "temperature": 0}).encode()


def answered(port, method, path, body=None):
    """Seconds until a new connection has its answer; raises where it is no 200."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=60, source_address=("127.0.0.2", 0)
    )
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} answers {answer.status}")
    return time.monotonic() - began


def main(port):
    """Ask until stdin ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    seconds = {"live": [], "text": []}
    failed = []
    while not over.wait(0.02):
        texts = len(seconds["live"]) % 10 == 0
        for kind, what in (("live", ("GET", "/live")), ("text", ("POST", "/v1/completions", BODY))):
            if kind == "live" or texts:
                try:
                    seconds[kind].append(answered(port, *what))
                except (OSError, RuntimeError, http.client.HTTPException) as error:
                    failed.append(f"{kind}: {error!r}")
    found = {kind: max(taken, default=0.0) for kind, taken in seconds.items()}
    counts = {f"{kind}_count": len(taken) for kind, taken in seconds.items()}
    print(json.dumps({**found, **counts, "failed": failed}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
