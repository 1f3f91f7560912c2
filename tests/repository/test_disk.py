"""Whatever a result is written to, it is there whole, and what stood there keeps its kind."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from lrkv_jax import files
from lrkv_jax.errors import LrkvError

LONE = "before \ud800 after é"


def test_a_file_is_replaced_whole_or_not_at_all_and_keeps_its_mode(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "out"
    path.write_text("before")
    path.chmod(0o640)
    reader = path.open()  # of what stood there
    files.write(path, "after")
    assert (path.read_text(), reader.read()) == ("after", "before")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    monkeypatch.setattr("os.fchmod", full)
    with pytest.raises(OSError, match="No space"):
        files.write(path, "later")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["out"]


def test_two_writers_of_one_file_share_no_temporary_name(tmp_path, monkeypatch):
    """The second moved the first one's file away, and the first raised FileNotFoundError."""
    path, replace = tmp_path / "out.json", Path.replace

    def overtaken(fresh, target):
        monkeypatch.setattr(Path, "replace", replace)
        files.write_json(path, "of the other")
        return fresh.replace(target)

    monkeypatch.setattr(Path, "replace", overtaken)
    files.write_json(path, "ours")
    assert path.read_text() == '"ours"\n' and os.listdir(tmp_path) == ["out.json"]


def test_a_name_of_as_many_bytes_as_a_file_may_have_is_written(tmp_path):
    path = tmp_path / ("文" * 85)
    files.write(path, "text")
    assert path.read_text() == "text" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "data").mkdir()
    link = tmp_path / "out"
    link.symlink_to("data/real")
    for text in ("first", "second"):  # what it names need not be there yet
        files.write(link, text)
        assert link.is_symlink() and (tmp_path / "data/real").read_text() == text
    assert os.listdir(tmp_path / "data") == ["real"]


@pytest.mark.parametrize("through", ["pipe", "link"])
def test_what_is_no_file_is_written_through(tmp_path, through):
    """As root in a container, /dev/null itself was replaced by a file. A pipe stands for it."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("pipe")
    files.check_writable(tmp_path / through)  # and nobody has to read yet
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    files.write(tmp_path / through, "text")
    reader.join(timeout=30)
    assert read == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_text_that_utf8_has_no_bytes_for_is_escaped_as_in_json(tmp_path):
    """It was a UnicodeEncodeError, after hours of decoding."""
    files.write(tmp_path / "x", json.dumps({"text": LONE}, ensure_ascii=False))
    data = (tmp_path / "x").read_bytes()
    assert b"\\ud800" in data and "é".encode() in data
    assert json.loads(data) == {"text": LONE}


def test_a_number_that_json_lacks_is_null(tmp_path):
    files.write_json(tmp_path / "x", {"loss": float("nan"), "steps": (1, 2.5)})
    assert json.loads((tmp_path / "x").read_bytes()) == {"loss": None, "steps": [1, 2.5]}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/out", "No such file"), (".", "Is a directory"), ("file/out", "Not a directory"),
        ("a\0b", "null byte"), ("x" * 300, "File name too long"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_named_before_the_work(tmp_path, name, reason):
    (tmp_path / "file").write_text("")
    with pytest.raises(LrkvError, match=reason) as error:
        files.check_writable(tmp_path / name)
    assert "\n" not in str(error.value)
    with pytest.raises((OSError, ValueError), match=reason) as error:
        files.write(tmp_path / name, "text")
    assert getattr(error.value, "filename", None) in (str(tmp_path / name), None)
    assert os.listdir(tmp_path) == ["file"]
