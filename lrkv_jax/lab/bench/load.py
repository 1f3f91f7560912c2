"""Load on an OpenAI-compatible server, from outside: how long clients wait, and what comes out.

`python -m lrkv_jax.lab.bench.load URL '{"requests": 64, ...}'` prints JSON. It is a process of its
own, so that clients take no time from the server's interpreter. Times are those of `vllm bench
serve`.
"""

from __future__ import annotations

import dataclasses
import datetime
import http.client
import json
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from lrkv_jax.errors import LrkvError
from lrkv_jax.files import write_json

CONNECT_SECONDS = 30.0
# Of what clients may wait, of those that `goodput` counts.
FIRST_SECONDS, TOKEN_SECONDS = 1.0, 0.1


@dataclass(frozen=True)
class Load:
    """What is asked. clients: of a closed loop, each of which asks again when it has an answer.

    rate: instead, requests a second that arrive by a Poisson process, whoever is waiting. Prompts
    and texts have log-normal lengths around these medians of tokens, drawn from the seed; ids are
    drawn too, below `vocabulary`. key: sent as a bearer's.
    """

    requests: int = 64
    clients: int = 8
    rate: float | None = None
    prompt: int = 64
    new_tokens: int = 64
    longest: int = 256
    vocabulary: int = 1000
    seed: int = 0
    model: str | None = None
    key: str | None = None

    def __post_init__(self):
        sizes = (self.requests, self.clients, self.prompt, self.new_tokens, self.vocabulary - 2)
        if min(sizes) < 1 or self.longest < 2 or (self.rate is not None and self.rate <= 0):
            raise LrkvError("a load needs requests, clients, tokens and a rate above 0")


def trace(load: Load) -> list[tuple[list[int], int]]:
    """(prompt ids, new tokens) of each request, the same for the same load."""
    random = np.random.default_rng(load.seed)
    shapes = ((load.prompt, 0.7), (load.new_tokens, 0.9))
    most = load.longest // 2
    lengths = [
        np.clip(random.lognormal(np.log(median), sigma, load.requests), 1, most).astype(int)
        for median, sigma in shapes
    ]
    return [
        (random.integers(1, load.vocabulary, prompt).tolist(), int(new))
        for prompt, new in zip(*lengths, strict=True)
    ]


def save(found: dict[str, Any], url: str, load: Load, folder: str | Path) -> Path:
    """Write what `run` found, where and of what load, to serve_load.json in a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    asked = dataclasses.asdict(load)
    del asked["key"]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"benchmark": "serve_load", "url": url, "date": date, "load": asked}
    path = Path(folder) / "serve_load.json"
    write_json(path, about | found)
    return path


def run(url: str, load: Load) -> dict[str, Any]:
    """Ask a server for the load's texts. Raises `LrkvError` for one that cannot be asked."""
    place = urlsplit(url if "//" in url else f"http://{url}")
    if place.scheme not in ("http", "https") or not place.hostname:
        raise LrkvError(f"{url} is no address: use http://HOST:PORT")
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    asked, done = trace(load), []
    gaps = np.random.default_rng([load.seed, 1]).exponential(size=len(asked))
    arrivals = [0.0] * len(asked) if load.rate is None else np.cumsum(gaps / load.rate).tolist()

    def client() -> None:
        connection = kinds[place.scheme](place.hostname, place.port, timeout=CONNECT_SECONDS * 20)
        while (turn := waiting.get()) is not None:
            number, arrived = turn
            done.append(_ask(connection, place.path.rstrip("/"), load, asked[number], arrived))
        connection.close()

    clients = load.clients if load.rate is None else min(len(asked), 256)
    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    for number, arrival in enumerate(arrivals):
        time.sleep(max(0.0, began + arrival - time.perf_counter()))
        waiting.put((number, None if load.rate is None else began + arrival))
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if wrong := [one["error"] for one in done if one["error"]]:
        raise LrkvError(f"{url}: {len(wrong)} of {len(asked)} requests failed: {wrong[0]}")
    return summary(done, seconds)


def _ask(connection, path, load, asked, arrived):
    """One request: when its first and last tokens came, and how many."""
    prompt, new = asked
    body = {
        "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"content-type": "application/json"}
    if load.model is not None:
        body["model"] = load.model
    if load.key is not None:
        headers["authorization"] = f"Bearer {load.key}"
    began, moments, tokens, error = arrived or time.perf_counter(), [], 0, ""
    try:
        connection.request("POST", f"{path}/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            error = f"{answer.status} {answer.read(300).decode('utf-8', 'replace')}"
        while not error and (line := answer.readline()):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                error = str(event["error"].get("message"))
            elif event["choices"]:
                moments.append(time.perf_counter())
            else:
                tokens = event["usage"]["completion_tokens"]
    except (OSError, http.client.HTTPException, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
        connection.close()
    return {"began": began, "moments": moments, "tokens": tokens, "error": error}


def summary(done: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Rates, and quantiles of what clients wait: seconds."""
    firsts = [one["moments"][0] - one["began"] for one in done]
    wholes = [one["moments"][-1] - one["began"] for one in done]
    each = [
        (whole - first) / (one["tokens"] - 1)
        for one, first, whole in zip(done, firsts, wholes, strict=True)
        if one["tokens"] > 1
    ]
    gaps = [gap for one in done for gap in np.diff(one["moments"])]
    good = sum(
        first <= FIRST_SECONDS and (whole - first) <= TOKEN_SECONDS * max(one["tokens"] - 1, 1)
        for one, first, whole in zip(done, firsts, wholes, strict=True)
    )
    tokens = sum(one["tokens"] for one in done)
    return {
        "requests": len(done), "seconds": seconds, "tokens": tokens,
        "tokens_per_second": tokens / seconds, "requests_per_second": len(done) / seconds,
        "goodput": good / seconds,
        **{
            f"{name}_{word}": float(np.quantile(values or [0.0], share))
            for name, values in (("ttft", firsts), ("tpot", each), ("gap", gaps), ("e2e", wholes))
            for word, share in (("p50", 0.5), ("p99", 0.99))
        },
    }  # fmt: skip


if __name__ == "__main__":
    fields = {field.name for field in dataclasses.fields(Load)}
    given = json.loads(sys.argv[2])
    assert given.keys() <= fields
    print(json.dumps(run(sys.argv[1], Load(**given))))
