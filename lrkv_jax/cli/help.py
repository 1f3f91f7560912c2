"""How the command line explains itself: its help pages, and one line for a command that is wrong.

Pages are plain text, as wide as the terminal up to 100 columns: no purpose is cut and no word is
broken. An option's help says what it does; its default is added from the code.
"""

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lrkv_jax.errors import LrkvError

WIDEST = 100
TERMS_WIDEST = 30  # width of the left column at most
# Typer has its own copy of click, or click itself, by version; its public name for this is a child.
UsageError: Any = typer.BadParameter.__base__


class Command(TyperCommand):
    """A command with such a help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(page(ctx))


class Group(TyperGroup):
    """Commands under one name, with such a help page."""

    format_help = Command.format_help

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _in_one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line():
            return super().invoke(ctx)


def page(context: Any) -> str:
    """The help page of a context's command."""
    command = context.command
    width = min(shutil.get_terminal_size().columns, WIDEST)
    params = [param for param in command.get_params(context) if not param.hidden]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    below = getattr(command, "commands", {})
    words = [context.command_path, "[OPTIONS]", *(_metavar(param) for param in arguments)]
    usage = " ".join([*words, *(["COMMAND ..."] if below else [])])
    purpose = [_wrapped(text, width) for text in (command.help or "").split("\n\n")]
    parts = [_wrapped(f"Usage: {usage}", width, after=7), *purpose]
    for title, rows in (
        ("Commands", [(name, _purpose(below[name])) for name in sorted(below)]),
        ("Arguments", [(_metavar(param), param.help or "") for param in arguments]),
        ("Options", [(_names(param), _help(param)) for param in options]),
    ):
        if rows:
            parts.append(f"{title}:\n" + "\n".join(_definitions(rows, width)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _purpose(command: Any) -> str:
    """What a command is for, in one sentence: the first paragraph of its help."""
    return (command.help or "").split("\n\n")[0]


def _metavar(param: Any) -> str:
    number = {int: "N", float: "X"}.get(type(param.default))
    return param.metavar or number or param.name.upper()


def _names(param: Any) -> str:
    names = ", ".join(sorted([*param.opts, *param.secondary_opts], key=len))
    return names if param.is_flag else f"{names} {_metavar(param)}"


def _help(param: Any) -> str:
    text = param.help or ""
    if param.is_flag or not isinstance(param.default, int | float | str | Path):
        return text
    return f"{text.rstrip('.')} (default: {param.default})."


def _definitions(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    rows = list(rows)
    left = min(max(len(term) for term, _ in rows), TERMS_WIDEST)
    for term, text in rows:
        lines = _wrapped(text, width - left - 4).splitlines() or [""]
        if len(term) > left:
            yield f"  {term}"
            term = ""
        yield f"  {term:{left}}  {lines[0]}".rstrip()
        yield from (f"  {'':{left}}  {line}" for line in lines[1:])


def _wrapped(text: str, width: int, after: int = 0) -> str:
    """Lines of whole words; all but the first are indented by `after` columns."""
    return textwrap.fill(
        " ".join(text.split()), width, subsequent_indent=" " * after,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Turn an error of usage into an `LrkvError` of one line that names the help page."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        path = error.ctx.command_path if error.ctx else "lrkv"
        said = error.format_message().rstrip(".")
        option = getattr(error, "option_name", None)
        if setting := option and _setting_named(option):
            raise LrkvError(f"{option} is no option of {path}: write {setting}") from None
        raise LrkvError(f"{said[:1].lower()}{said[1:]}: see {path} --help") from None


def _setting_named(option: str) -> str | None:
    """`train.steps=3` for `--steps 3` and `--train.steps=3`; None where no setting is called so."""
    from lrkv_jax.config.reference import all_settings

    name = option.lstrip("-").replace("-", "_")
    found = [one.key for one in all_settings()]
    found = [key for key in found if name in (key, key.rpartition(".")[2])]
    if not found:
        return None
    words = " ".join(sys.argv).partition(option)[2].lstrip(" =").split()
    return f"{found[0]}={words[0] if words and not words[0].startswith('-') else '...'}"
