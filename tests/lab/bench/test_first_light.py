"""The GPU's first day: stages that resume, end in time and fail alone, and the pages' tables."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "experiments" / "first_light.py"


@pytest.fixture
def light(experiment, monkeypatch, tmp_path):
    """The script, with the stages of `support.planted_items`."""
    module = experiment("first_light")
    monkeypatch.setattr(module, "PROGRAM", ROOT / "tests" / "support" / "planted_items.py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "experiments"))
    monkeypatch.setenv("LIGHT_LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    monkeypatch.setenv("LIGHT_PLACE", "a device")
    return module


@pytest.fixture
def measure(light, monkeypatch, tmp_path):
    """A function (items) that measures them, and gives what is amiss."""

    def run(items, seconds=60, dry=False):
        monkeypatch.setenv("LIGHT_ITEMS", items)
        return light.run(light.Stage("decoding", tmp_path, dry), seconds)

    return run


def test_what_hangs_crashes_or_raises_is_a_row_and_the_next_item_runs(measure, tmp_path):
    amiss = [
        "decoding: hangs: did not answer within 0 s (last begun: a kernel)",
        "decoding: crashes: ended with 3",
        "decoding: raises: ValueError: no such kernel",
    ]
    assert measure("1 hangs 2 crashes raises 3") == amiss
    content = json.loads((tmp_path / "decoding.json").read_text())
    names = [row["name"] for row in content["rows"]]
    assert names == ["1", "hangs", "2", "crashes", "raises", "3"]
    assert content["where"]["device"] == "a device" and content["rows"][0]["date"].endswith("Z")
    # What did not hang is measured again, and nothing else.
    assert measure("1 hangs 2 crashes raises 3 4")[0] == amiss[0]
    assert (tmp_path / "log").read_text() == "1234"


def test_a_stage_ends_in_time_and_resumes_with_what_is_missing(measure, tmp_path):
    assert measure("1 long 2", 4.0) == ["decoding: left out: long, and what follows it"]
    assert (tmp_path / "log").read_text() == "1"
    assert measure("1 2") == []
    assert (tmp_path / "log").read_text() == "12"


def test_rows_of_another_device_or_of_a_dry_run_are_not_mixed(measure, tmp_path, monkeypatch):
    assert measure("1") == []
    before = (tmp_path / "decoding.json").read_text()
    (line,) = measure("2", dry=True)
    assert "decoding.json is of a device: " in line
    monkeypatch.setenv("LIGHT_PLACE", "another device")
    (line,) = measure("2")
    assert "decoding.json is of another place (device: a device)" in line
    assert (tmp_path / "decoding.json").read_text() == before
    monkeypatch.setenv("LIGHT_PLACE", "nowhere")
    assert measure("2") == ["decoding: ended with 3"]  # its process does not start
    assert (tmp_path / "log").read_text() == "1"


def test_packages_are_packed_and_found(light, tmp_path, monkeypatch):
    packed = tmp_path / "packed" / "carried.zip"
    monkeypatch.setattr(light, "CARRIED", ("toml",))
    light.carry(packed)
    names = zipfile.ZipFile(packed).namelist()
    assert "toml/__init__.py" in names and any(n.endswith(".dist-info/METADATA") for n in names)
    monkeypatch.setattr(sys, "path", list(sys.path))
    light.find_packages(packed)
    folder = Path(sys.path[0])
    assert (folder / "toml" / "decoder.py").is_file()
    assert os.environ["PYTHONPATH"].split(os.pathsep)[:2] == [str(folder), str(ROOT)]
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stages runs,all", "--stages all: use kernels,decoding,training,runs,tables"),
        ("", "name a folder (--out DIR)"),
        ("--out DIR --limit 900", "at most 480 seconds"),
        ("--out DIR --carried none.zip", "--carried none.zip: no such file"),
    ],
)
def test_bad_input_is_said_with_code_2(light, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["first_light.py", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        light.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_the_best_mha_of_the_run_may_be_pytorchs(experiment, monkeypatch):
    from lrkv_jax.lab.bench import decode

    def row(variant, us, **more):
        shape = ("quickstart", variant, "xla", 2, 64, False, 128, "float32")
        return decode.DecodeTiming(*shape, us=us, **more)

    stages = experiment("first_light_stages")
    wrong = row("lrkv_latent", None, status="wrong", reason="differs")
    rows = [row("mha", 80.0), row("lrkv", 30.0), wrong]
    monkeypatch.setattr(decode, "run", lambda settings, progress: {"rows": rows})
    answer = {"rows": [{"name": "SDPA, flash", "us": 60.0}, {"name": "FlashInfer", "us": None}]}
    asked = []
    monkeypatch.setattr(stages, "_torch", lambda *how: asked.append(how) or answer)
    settings = {"scales": ("quickstart",), "batches": (2,), "lengths": (64,), "samples": 3}
    found = stages.decode("here", settings)
    assert asked == [([2, 4, 4, 32, 64], 3)]
    assert found.measured["best_mha"] == "PyTorch SDPA, flash"
    assert found.text == (
        "lrkv_latent by xla: differs; MHA 60.0 µs by PyTorch SDPA, flash; "
        "lrkv xla 30.0 µs, 0.50 of it"
    )
    assert found.verdict == "wrong"
    best = "60.0 (PyTorch SDPA, flash)"
    assert found.cells == [["here", best, "lrkv", "xla", "30.0", "0.50", "", ""]]


@pytest.fixture
def docs(tmp_path):
    for page in ("decode.md", "performance.md"):
        shutil.copy(ROOT / "docs" / page, tmp_path / page)
    return tmp_path


def block(page, name):
    text = page.read_text()
    return text.partition(f"<!-- first light: {name} -->")[2].partition("<!-- end of")[0].strip()


def test_tables_are_of_the_files_or_say_that_nothing_was_measured(light, tmp_path, docs):
    def plant(name, *found, dry=False):
        """A stage's file with rows of (name, verdict, lines of the table)."""
        rows = [
            {"name": n, "verdict": v, "text": "it was so", "measured": {}, "cells": cells,
             "date": "2026-12-01T08:00:00Z"}
            for n, v, cells in found
        ]  # fmt: skip
        where = {"device": "NVIDIA H200", "versions": {"jax": "0.11.2", "torch": "2.11.0"}}
        content = {"stage": name, "dry": dry, "where": where, "left_out": [], "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    plant("kernels", ("t1", "ok", []), dry=True)
    plant("training")
    light.write_tables(tmp_path, docs)
    for page, name in (("decode.md", "decoding"), ("performance.md", "training")):
        text = block(docs / page, name)
        assert text == "Not measured on a GPU yet (`python experiments/first_light.py`)."
        # As in the repository, until it is measured.
        assert text == block(ROOT / "docs" / page, name)
    plant("kernels", ("t1", "ok", []), ("t2", "wrong", []))
    line = ["128m", "120.0 (SDPA)", "lrkv full", "mosaic", "60.0", "0.50", "0.50", "80%"]
    plant("decoding", ("128m", "ok", [line]), ("hung", "wrong", []))
    plant("training", ("128m", "ok", [["128m", "mha"], ["128m", "lrkv full"]]))
    light.write_tables(tmp_path, docs)
    decoding, training = block(docs / "decode.md", "decoding"), block(docs / page, "training")
    place = "(NVIDIA H200, jax 0.11.2, torch 2.11.0, 2026-12-01.)"
    assert decoding.count(place) == 2 and training.count(place) == 1
    for line in (
        "1 right, 1 wrong, 0 not run.",
        "- t2: it was so",
        "| 128m | 120.0 (SDPA) | lrkv full | mosaic | 60.0 | 0.50 | 0.50 | 80% |",
        "- hung: it was so",
    ):
        assert line in decoding
    assert "| 128m | mha |\n| 128m | lrkv full |" in training


# What a machine with JAX and PyTorch lacks, except for what `--carry` packs for all but the runs.
ABSENT = ("grain", "tensorflow_datasets", "array_record", "tensorboardX", "tree", "promise", "toml")
BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_a_dry_run_executes_every_stage_and_only_the_runs_need_the_data_libraries(tmp_path, docs):
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "sitecustomize.py").write_text(BLOCK.format(absent=ABSENT))
    out = tmp_path / "out"

    def run(stages, **environment):
        return subprocess.run(
            [sys.executable, SCRIPT, "--dry", "--out", out, "--docs", docs, "--stages", stages],
            env={**os.environ, "TMPDIR": str(tmp_path), **environment}, capture_output=True,
            text=True, timeout=900,
        )  # fmt: skip

    first = run("kernels,decoding,training", PYTHONPATH=str(tmp_path / "block"))
    assert first.returncode == 0, first.stdout + first.stderr
    second = run("runs,tables")
    assert second.returncode == 0, second.stdout + second.stderr
    for name in ("kernels", "decoding", "training", "runs"):
        content = json.loads((out / f"{name}.json").read_text())
        assert content["rows"] and content["where"]["versions"]["jax"] and not content["left_out"]
        assert {row["verdict"] for row in content["rows"]} == {"ok"}
    assert "Not measured on a GPU yet" in block(docs / "decode.md", "decoding")
