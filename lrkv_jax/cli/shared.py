"""What commands have in common: the application, and how their arguments are written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from lrkv_jax.errors import LrkvError

app = typer.Typer(
    help="Train, evaluate and decode five attention variants on equal terms.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def group(name: str, purpose: str) -> typer.Typer:
    """Commands under one name, as in `lrkv bench decode`."""
    commands = typer.Typer(help=purpose, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(commands, name=name)
    return commands


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file or a shipped scale")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="a run's directory")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings to change")
]


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def sizes(option: str, text: str) -> tuple[int, ...]:
    parts = names(text)
    if not all(part.isdigit() for part in parts):
        raise LrkvError(f"{option} {text}: use whole numbers, as in 1,4")
    return tuple(int(part) for part in parts)


def step_named(text: str | None) -> int | str | None:
    if text is None or text == "best":
        return text
    if not text.isdigit():
        raise LrkvError(f"--step {text}: use a number, or best")
    return int(text)


def seconds_of(text: str) -> int:
    """HH:MM:SS or MM:SS, as Slurm writes a time limit."""
    parts = text.split(":")
    fit = len(parts) in (2, 3) and all(p.isascii() and p.isdecimal() and len(p) < 6 for p in parts)
    if not fit or not any(map(int, parts)):
        raise LrkvError(f"--time-limit {text}: write HH:MM:SS or MM:SS, as in 03:55:00")
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds


@contextlib.contextmanager
def batches_bar(hidden: bool = False) -> Iterator[Callable[[str, float, int], None]]:
    """A bar on a terminal's stderr for what is done in batches: a function (name, done, all)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left()
    tasks = {}
    with Progress(*columns, console=console, disable=hidden or not console.is_terminal) as bar:

        def show(name: str, done: float, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=int(done))

        yield show
