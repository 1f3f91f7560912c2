"""Help pages cut no purpose at 80 columns; a wrong command line is answered in one line."""

import os
import subprocess
import sys

import pytest
import typer
from support.command import lrkv

from lrkv_jax import __version__
from lrkv_jax.cli import app, main
from lrkv_jax.distributed.processes import HERE
from lrkv_jax.errors import LrkvError

COMMAND = typer.main.get_command(app)


def every(command=COMMAND, path=()):
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every(below, (*path, name))


ALL = dict(every())


@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "lrkv")
def test_a_help_page_says_what_each_thing_is_and_cuts_no_purpose(capsys, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    code, page, _ = lrkv(capsys, monkeypatch, *path, "-h")
    assert code == 0 and max(map(len, page.splitlines())) <= 80
    words, command = " ".join(page.split()), ALL[path]
    assert " ".join(command.help.split("\n\n")[0].split()) in words
    for name, below in getattr(command, "commands", {}).items():
        assert f"{name} {below.help.split(chr(10))[0]}" in words
    for param in command.params:
        assert param.help, f"{path} {param.name} says nothing"


def test_a_group_without_a_verb_shows_its_page(capsys, monkeypatch):
    code, out, err = lrkv(capsys, monkeypatch, "bench")
    assert code == 2 and "decode" in out + err and "lrkv:" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "quickstart", "--steps", "3"), "settings have no dashes, as in train.steps=100"),
        (("train", "--nonsense"), "no such option: --nonsense"),
        (("train",), "missing argument 'CONFIG': see lrkv train --help"),
        (("plan", "128m", "--devices", "many"), "'--devices'"),
        (("trian",), "Did you mean 'train'"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_that_says_what_to_write(
    capsys, monkeypatch, arguments, said
):
    code, out, err = lrkv(capsys, monkeypatch, *arguments)
    assert code == 2 and not out and err.startswith("lrkv: ") and err.count("\n") == 1
    assert said in err


def test_the_version_is_the_packages(capsys, monkeypatch):
    assert lrkv(capsys, monkeypatch, "--version") == (0, f"lrkv {__version__}\n", "")


def test_a_shell_completes_verbs():
    asked = {"_LRKV_COMPLETE": "complete_bash", "COMP_WORDS": "lrkv tr", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['lrkv']; from lrkv_jax.cli import app; app(prog_name='lrkv')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True
    )
    assert done.stdout.split() == ["train"]


@pytest.mark.parametrize(
    ("error", "option", "code"),
    [
        (LrkvError("a setting"), "train", 2), (LrkvError("a setting"), "--debug", 1),
        (FileNotFoundError(2, "No such file", "x"), "train", 2), (OSError("no number"), "train", 1),
        (ValueError("a fault"), "train", 1),
    ],
)  # fmt: skip
def test_one_of_several_processes_leaves_at_once_whatever_ends_it(monkeypatch, error, option, code):
    """With --debug, or an OSError without a number, it waited in JAX's exit for the others."""

    def fail(**_):
        raise error

    def leave(code):
        raise SystemExit(f"left with {code}")

    monkeypatch.setattr("lrkv_jax.cli.app", fail)
    monkeypatch.setattr(HERE, "count", 2)
    monkeypatch.setattr(HERE, "leave", leave)
    monkeypatch.setattr(sys, "argv", ["lrkv", option])
    with pytest.raises(SystemExit, match=f"left with {code}"):
        main()
