"""The progress of a build of data on standard error: a bar on a terminal, else plain lines."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lrkv_jax.data.records.build import BuildProgress

_LINE_SECONDS = 10.0


def say(done: BuildProgress, seconds: float) -> str:
    """The state of a build in one line, `seconds` after it began."""
    rate = (done.tokens - done.resumed) / max(seconds, 1e-3)
    parts = [
        f"{done.documents:,} documents",
        f"{done.tokens:,} tokens",
        f"{rate / 1e6:.2f} Mtok/s",
        f"{done.parts}/{done.of_parts} parts",
    ]
    if done.packed:
        parts[2] = f"{done.packed:,} packed"
    return ", ".join(parts)


def _place(done: BuildProgress) -> tuple[int, int]:
    """How much is done, of how much: bytes of the source, or sets of a mixture."""
    return (done.bytes, done.of_bytes) if done.of_bytes else (done.parts, done.of_parts)


@contextlib.contextmanager
def shown(source: str) -> Iterator[Callable[[BuildProgress], None]]:
    """Give a function that shows the progress of the build of `source`, from any thread."""
    console = Console(stderr=True, markup=False)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            yield _on_terminal(bar, source)
    else:
        yield _in_lines(console, source)


def _on_terminal(bar: Progress, source: str) -> Callable[[BuildProgress], None]:
    task = bar.add_task(f"building {source}", total=None)
    began = time.monotonic()

    def show(done: BuildProgress) -> None:
        line = f"building {source}: {say(done, time.monotonic() - began)}"
        if done.packed:  # the second stage
            bar.update(task, total=done.tokens, completed=done.packed, description=line)
        else:
            place, total = _place(done)
            bar.update(task, total=total or None, completed=place, description=line)

    return show


def _in_lines(console: Console, source: str) -> Callable[[BuildProgress], None]:
    began = last = time.monotonic()
    at_first: int | None = None
    lock = threading.Lock()

    def show(done: BuildProgress) -> None:
        nonlocal last, at_first
        with lock:
            now = time.monotonic()
            place, total = _place(done)
            at_first = place if at_first is None else at_first
            if now - last < _LINE_SECONDS:
                return
            last = now
            share = (place - at_first) / max(total - at_first, 1)
            left = f", {(now - began) * (1 / share - 1):,.0f} s left" if 0 < share < 1 else ""
            line = f"building {source}: {say(done, now - began)}{left}"
            console.print(line, highlight=False, soft_wrap=True)

    return show


def counted(what: str) -> Callable[[int, int], None]:
    """A function that shows documents and bytes so far, in a line every ten seconds."""
    console = Console(stderr=True, markup=False)
    began = last = time.monotonic()

    def show(documents: int, size: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_SECONDS:
            last = now
            rate = size / 1e6 / (now - began)
            line = f"{what}: {documents:,} documents, {size / 1e6:,.0f} MB, {rate:.1f} MB/s"
            console.print(line, highlight=False, soft_wrap=True)

    return show
