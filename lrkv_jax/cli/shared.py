"""The parts that commands share: the application, and how their arguments are written."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lrkv_jax import __version__
from lrkv_jax.errors import LrkvError

if TYPE_CHECKING:
    from lrkv_jax.training.restore import TrainedRun

HELP = ["-h", "--help"]


def _version(requested: bool) -> None:
    if requested:
        print(f"lrkv {__version__}")
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP},
)  # fmt: skip


@app.callback()
def lrkv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Train, evaluate and decode MHA, GQA, MQA, MLA and LRKV on equal terms."""


def group(name: str, purpose: str) -> typer.Typer:
    """Commands under one name, as in `lrkv bench decode`."""
    commands = typer.Typer(help=purpose, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(commands, name=name)
    return commands


Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one.")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, as in train.steps=100."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of sampling")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def names(text: str | None) -> tuple[str, ...] | None:
    """The parts of a list with commas; None of an option that was not given."""
    return text if text is None else tuple(p.strip() for p in text.split(",") if p.strip())


def at_least(least: int) -> Callable[[str | int], int]:
    """The parser of options that count tokens or steps, as in 2048, 50e9 or 50B."""

    def count(text: str | int) -> int:
        from lrkv_jax.config.frozen import whole_number

        found = int(text) if str(text).isdecimal() else whole_number(text)
        if not isinstance(found, int) or found < least:
            raise typer.BadParameter(
                f"{text}: use a whole number from {least} on, as in 4096 or 1e6"
            )
        return found

    return count


count = at_least(1)


def sizes(text: str) -> tuple[int, ...]:
    """The parser of lists of numbers with commas, as in 1,4."""
    return tuple(map(at_least(0), names(text)))


def step_named(text: str) -> int | str:
    try:
        return text if text == "best" else at_least(0)(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text}: use a number, or best") from None


Step = Annotated[
    Any,
    typer.Option(
        parser=step_named, metavar="N|best", help="Which checkpoint (default: the newest)."
    ),
]


def seconds_of(text: str) -> int:
    """HH:MM:SS or MM:SS, as Slurm writes a time limit."""
    parts = [int(part) for part in text.split(":") if part.isascii() and part.isdecimal()]
    if len(parts) not in (2, 3) or len(parts) != text.count(":") + 1 or not any(parts):
        raise LrkvError(f"--time-limit {text}: write HH:MM:SS or MM:SS, as in 03:55:00")
    hours, minutes, seconds = [0, *parts][-3:]
    return 3600 * hours + 60 * minutes + seconds


@contextlib.contextmanager
def working(what: str, *, plain: bool = True) -> Iterator[Callable[..., None]]:
    """Show on stderr what this block does: in a line that changes on a terminal; elsewhere in plain
    lines, if `plain`, one for each activity that takes a second.

    The function given takes (activity, done, all) during the work, and shows the remaining time; an
    `all` of None is an unknown number. The block prints nothing itself.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    status = console.status(what) if console.is_terminal else None
    began = before = time.monotonic()
    last, shown = 0.0, ""
    timer = threading.Timer(1, lambda: None)

    def show(activity: str, done: float = 0.0, total: int | None = None) -> None:
        nonlocal began, before, last, shown, timer
        if done < last:  # the next of several tasks
            began = before
        before, last, text = time.monotonic(), done, activity
        if done or total:
            text += f", {done:,.0f}" + (f" of {total:,}" if total else "")
        if done and total:
            left = timedelta(seconds=round((before - began) / done * (total - done)))
            text += f", {left} left"
        if status:
            status.update(text)
        elif plain and activity != shown:
            timer.cancel()
            timer = threading.Timer(
                1, print, [f"lrkv: {text}"], {"file": sys.stderr, "flush": True}
            )
            timer.daemon, shown = True, activity
            timer.start()

    with status or contextlib.nullcontext():
        show(what)
        try:
            yield show
        finally:
            timer.cancel()


def note(line: str) -> None:
    """Print a line of a command next to what it prints on stdout."""
    print(f"lrkv: {line}", file=sys.stderr, flush=True)


def start_alone(command: str) -> None:
    """Import JAX and start this process's devices for a command that one process does."""
    with working("starting, for some seconds"):
        from lrkv_jax.distributed import start

        start(command=f"lrkv {command}")


def loaded(run: str, step: int | str | None, overrides: list[str] | None) -> TrainedRun:
    """The run that a command decodes with, once this process has its devices."""
    with working("reading the run"):
        from lrkv_jax.training.restore import load_run

        return load_run(run, step=step, overrides=overrides or [])
