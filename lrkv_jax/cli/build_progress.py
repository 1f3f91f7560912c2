"""How far a build of data is, on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lrkv_jax.data.records.staging import Done

_LINE_SECONDS = 10.0


def say(done: Done, seconds: float) -> str:
    """The state of a build in a line; seconds: since it began."""
    rate = (done.tokens - done.resumed) / max(seconds, 1e-3)
    parts = [
        f"{done.documents:,} documents",
        f"{done.tokens:,} tokens",
        f"{rate / 1e6:.2f} Mtok/s",
        f"{done.shards}/{done.of_shards} shards",
    ]
    if done.packed:
        parts[2] = f"{done.packed:,} packed"
    return ", ".join(parts)


@contextlib.contextmanager
def shown(source: str) -> Iterator[Callable[[Done], None]]:
    """A function to call with how far the build of `source` is, from any thread."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            yield _on_terminal(bar, source)
    else:
        yield _in_lines(console, source)


def _on_terminal(bar: Progress, source: str) -> Callable[[Done], None]:
    task = bar.add_task(f"building {source}", total=None)
    began = time.monotonic()

    def show(done: Done) -> None:
        line = f"building {source}: {say(done, time.monotonic() - began)}"
        if done.packed:  # the second stage
            bar.update(task, total=done.tokens, completed=done.packed, description=line)
        else:
            total = done.of_bytes or None
            bar.update(task, total=total, completed=done.bytes, description=line)

    return show


def _in_lines(console: Console, source: str) -> Callable[[Done], None]:
    began = last = time.monotonic()
    at_first: int | None = None
    lock = threading.Lock()

    def show(done: Done) -> None:
        nonlocal last, at_first
        with lock:
            now = time.monotonic()
            at_first = done.bytes if at_first is None else at_first
            if now - last < _LINE_SECONDS:
                return
            last = now
            share = (done.bytes - at_first) / max(done.of_bytes - at_first, 1)
            left = f", {(now - began) * (1 / share - 1):,.0f} s left" if 0 < share < 1 else ""
            line = f"building {source}: {say(done, now - began)}{left}"
            console.print(line, highlight=False, soft_wrap=True)

    return show


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with documents and bytes so far; a line every ten seconds."""
    console = Console(stderr=True)
    began = last = time.monotonic()

    def show(documents: int, size: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_SECONDS:
            last = now
            rate = size / 1e6 / (now - began)
            line = f"{what}: {documents:,} documents, {size / 1e6:,.0f} MB, {rate:.1f} MB/s"
            console.print(line, highlight=False, soft_wrap=True)

    yield show
