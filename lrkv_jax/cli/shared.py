"""What commands have in common: the application, and how their arguments are written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

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
Step = Annotated[
    str | None, typer.Option(metavar="N|best", help="Which checkpoint (default: the newest).")
]
Seed = Annotated[int, typer.Option(help="Seed of sampling")]
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


def sizes(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(count(part) for part in names(text))
    except typer.BadParameter:
        raise LrkvError(f"{option} {text}: use whole numbers, as in 1,4") from None


def fractions(option: str, text: str) -> tuple[float, ...]:
    """Two numbers above 0 and at most 1; one stands for both."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) not in (1, 2) or not all(0 < one <= 1 for one in found):
        raise LrkvError(f"{option} {text}: use one or two numbers of at most 1, as in 0.3,0.5")
    return found if len(found) == 2 else 2 * found


def step_named(text: str | None) -> int | str | None:
    if text is None or text == "best":
        return text
    try:
        return at_least(0)(text)
    except typer.BadParameter:
        raise LrkvError(f"--step {text}: use a number, or best") from None


def seconds_of(text: str) -> int:
    """HH:MM:SS or MM:SS, as Slurm writes a time limit."""
    parts = [int(part) for part in text.split(":") if part.isascii() and part.isdecimal()]
    if len(parts) not in (2, 3) or len(parts) != text.count(":") + 1 or not any(parts):
        raise LrkvError(f"--time-limit {text}: write HH:MM:SS or MM:SS, as in 03:55:00")
    hours, minutes, seconds = [0, *parts][-3:]
    return 3600 * hours + 60 * minutes + seconds


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal's stderr that this block is working, while it prints nothing."""
    console = Console(stderr=True)
    with console.status(f"{what} ...") if console.is_terminal else contextlib.nullcontext():
        yield


def start_alone(command: str) -> None:
    """Import JAX and start this process's devices for a command that one process does."""
    with working("starting"):
        from lrkv_jax.distributed import start

        start(command=f"lrkv {command}")


def loaded(command: str, run: str, step: str | None, overrides: list[str] | None) -> TrainedRun:
    """The run that a command decodes with, once this process has its devices."""
    start_alone(command)
    with working("reading the run"):
        from lrkv_jax.training.restore import load_run

        return load_run(run, step=step_named(step), overrides=overrides or [])


@contextlib.contextmanager
def batches_bar() -> Iterator[Callable[[str, float, int | None], None]]:
    """Give a function (name, done, all) that moves a progress bar on a terminal's stderr.

    Until it is called, the bar only moves. None says that nobody knows how much there is.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    console = Console(stderr=True, markup=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left()
    tasks = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        waiting = bar.add_task("working", total=None)

        def show(name: str, done: float, total: int | None) -> None:
            if name not in tasks:
                bar.update(waiting, visible=False)
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=int(done), total=total)

        yield show
