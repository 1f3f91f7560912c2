"""The GPU's first day: stages that resume, end in time and fail alone, and the pages' tables."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lrkv_jax.doctor.child import Check

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "first_light.py"


@pytest.fixture
def light(experiment, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    module = experiment("first_light")
    monkeypatch.setattr(module, "WHERE", "planted_items:where")
    return module


@pytest.fixture
def works(tmp_path):
    """A function (name) → an item that notes in a file that it ran; `works.ran()` reads that."""

    def item(name):
        return Check(name, "planted_items:works", 10, "", {"name": name, "log": str(log)})

    log = tmp_path / "log"
    item.ran = lambda: log.read_text() if log.exists() else ""
    return item


HANGS = Check("hangs", "planted_items:hangs", 0.5, "report it")
CRASHES = Check("crashes", "planted_items:crashes", 10, "report it")


def rows(tmp_path, name="c"):
    content = json.loads((tmp_path / f"{name}.json").read_text())
    return {row["name"]: row for row in content["rows"]}


def test_what_hangs_or_crashes_is_a_row_the_next_item_runs_and_what_did_not_hang_is_tried_again(
    light, works, tmp_path
):
    def run(*items):
        return light.run(light.Stage("c", tmp_path, False), lambda facts: iter(items), 60)

    hung = "c: hangs: did not answer within 0 s (last begun: a kernel)"
    amiss = run(works("1"), HANGS, works("2"), CRASHES, works("3"))
    found = rows(tmp_path)
    assert works.ran() == "123" and list(found) == ["1", "hangs", "2", "crashes", "3"]
    assert amiss == [hung, "c: crashes: ended with 3"]
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["where"]["device"] == "a device" and found["1"]["date"].endswith("Z")
    # The same items, all of which would work by now.
    assert run(*map(works, ("1", "hangs", "2", "crashes", "3"))) == [hung]
    assert works.ran() == "123crashes" and rows(tmp_path)["crashes"]["verdict"] == "ok"


def test_a_stage_ends_in_time_and_resumes_with_what_is_missing(light, works, tmp_path):
    long = Check("long", "planted_items:hangs", 100, "")
    seen = []

    def items(facts, *more):
        yield works("1")
        seen.append(dict(facts["1"]))
        yield from more

    stage = light.Stage("c", tmp_path, False)
    assert light.run(stage, lambda facts: items(facts, long, works("2")), 1.0) == [
        "c: left out: long, and what follows it"
    ]
    assert list(rows(tmp_path)) == ["1"]
    stage = light.Stage("c", tmp_path, False)
    assert light.run(stage, lambda facts: items(facts, works("2")), 60) == []
    # What the first item measured is known to what follows it, though it did not run again.
    assert works.ran() == "12" and seen == [{"name": "1"}] * 2


def test_rows_of_another_device_or_of_a_dry_run_are_not_mixed(light, works, tmp_path, monkeypatch):
    def run(name, dry):
        return light.run(light.Stage("c", tmp_path, dry), lambda facts: iter([works(name)]), 60)

    assert run("1", False) == []
    before = (tmp_path / "c.json").read_text()
    (line,) = run("2", True)
    assert "c.json is of a device: " in line
    monkeypatch.setattr(light, "WHERE", "planted_items:elsewhere")
    (line,) = run("2", False)
    assert "c.json is of another place (device: a device)" in line
    assert works.ran() == "1" and (tmp_path / "c.json").read_text() == before


def test_a_stage_whose_process_does_not_start_says_so_and_the_next_one_runs(
    light, works, tmp_path, monkeypatch
):
    monkeypatch.setattr(light, "WHERE", "planted_items:crashes")
    (line,) = light.run(light.Stage("b", tmp_path, False), lambda facts: iter([works("1")]), 60)
    assert line == "b: ended with 3" and not works.ran()


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
        (["--stages", "a,h", "--out", "DIR"], "--stages h: use a,b,c,d,e,f,g"),
        ([], "name a folder (--out DIR)"),
        (["--out", "DIR", "--limit", "900"], "at most 480 seconds"),
        (["--out", "DIR", "--carried", "none.zip"], "--carried none.zip: no such file"),
    ],
)
def test_bad_input_is_said_with_code_2(light, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["first_light.py", *arguments])
    with pytest.raises(SystemExit) as end:
        light.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_the_best_mha_of_the_run_may_be_pytorchs(experiment, monkeypatch):
    from lrkv_jax.bench import decode
    from lrkv_jax.bench.decode_table import Row

    def row(variant, rope, us, **more):
        shape = ("attention", "quickstart", variant, rope, "xla", 2, 64, False, 128, "float32")
        return Row(*shape, us=us, **more)

    stages = experiment("first_light_stages")
    wrong = row("lrkv", "latent", None, status="wrong", reason="differs")
    rows = [row("mha", None, 80.0), row("lrkv", "full", 30.0), wrong]
    monkeypatch.setattr(decode, "run", lambda settings, progress: {"rows": rows})
    answer = {"rows": [{"name": "SDPA, flash", "us": 60.0}, {"name": "FlashInfer", "us": None}]}
    asked = []
    monkeypatch.setattr(stages, "_torch", lambda *how: asked.append(how) or answer)
    settings = {"scales": ["quickstart"], "batches": [2], "lengths": [64], "samples": 3}
    found = stages.decode(settings, None)
    assert asked == [([2, 4, 4, 32, 64], 3)]
    assert found.measured["best_mha"] == "PyTorch SDPA, flash"
    assert found.says == (
        "lrkv latent by xla: differs; MHA 60.0 µs by PyTorch SDPA, flash; "
        "lrkv full xla 30.0 µs, 0.50 of it"
    )
    assert found.verdict == "wrong"
    ours = found.measured["report"]["rows"]
    assert [one["time_over_best_mha"] for one in ours] == [80 / 60, 0.5, None]


WHERE = {"device": "NVIDIA H200", "versions": {"jax": "0.11.2", "torch": "2.11.0"}}


def plant(folder, name, *found, dry=False):
    """A stage's file with rows of (name, verdict, measured)."""
    of = [
        {"item": n, "name": n, "verdict": v, "says": "it was so", "measured": m,
         "date": "2026-12-01T08:00:00Z"}
        for n, v, m in found
    ]  # fmt: skip
    content = {"stage": name, "dry": dry, "where": WHERE, "left_out": [], "rows": of}
    (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def docs(tmp_path):
    for page in ("decode.md", "performance.md"):
        shutil.copy(ROOT / "docs" / page, tmp_path / page)
    return tmp_path


def block(page, name):
    text = page.read_text()
    return text.partition(f"<!-- first light: {name} -->")[2].partition("<!-- end of")[0].strip()


def test_tables_come_from_the_files_with_device_date_and_versions(experiment, tmp_path, docs):
    decoded = {"variant": "lrkv", "rope": "full", "implementation": "mosaic", "us": 60.0,
               "bytes_over_mha": 0.5, "share_of_copy": 0.8}  # fmt: skip
    report = {"rows": [{**decoded, "variant": "mha", "us": 200.0}, decoded]}
    best = {"best_mha": "PyTorch SDPA, flash", "best_mha_us": 120.0, "report": report}
    plant(tmp_path, "b", ("the tests", "ok", {}), ("t1", "ok", {}), ("t2", "wrong", {}))
    plant(tmp_path, "c", ("128m, batch 8, 8192 tokens", "ok", best), ("hung", "wrong", {}))
    plant(tmp_path, "d", ("128m lrkv full, table", "ok", {"ratio": 0.9, "choice": {"ring": 6}}))
    step = {"variant": "lrkv", "rope": "full", "ms": 90.0, "tokens_per_second": 364000.0,
            "mfu_of_datasheet": 0.45, "mfu_of_ceiling": 0.6,
            "time_over_mha": 1.04, "peak_bytes": 3e10}  # fmt: skip
    curves = [
        (f"{d}", "ok", {"variant": "lrkv", "scale": "128m", "dtype": d, "losses": [4.0, last]})
        for d, last in (("bfloat16", 2.0), ("float32", 2.25))
    ]
    plant(tmp_path, "e", ("128m", "ok", {"report": {"rows": [step]}}), *curves)
    run = {
        "scale": "128m", "variant": "lrkv", "steps": 300, "losses": [9.0, 3.5],
        "evaluation": {"bpb": {"bpb": 1.234}, "agreement": {"max_relative_error": 2e-3}},
        "train_tokens_per_second": 3e5, "decode_tokens_per_second": 9e3, "decode_batch": 32,
    }  # fmt: skip
    plant(tmp_path, "f", ("lrkv", "ok", run))
    experiment("first_light_tables").write(tmp_path, docs)
    decoding, training = (
        re.sub(" +", " ", block(docs / page, name))  # without what aligns the columns
        for page, name in (("decode.md", "decoding"), ("performance.md", "training"))
    )
    place = "(NVIDIA H200, jax 0.11.2, torch 2.11.0, 2026-12-01.)"
    assert decoding.count(place) == 3 and training.count(place) == 2
    for line in (
        "1 right, 1 wrong, 0 not run",
        "- t2: it was so",
        "| 128m, batch 8, 8192 tokens | 120.0 (PyTorch SDPA, flash) | lrkv full | mosaic | 60.0 "
        "| 0.50 | 0.50 | 80% |",
        "- hung: it was so",
        "| 128m lrkv full | 0.900 | ring 6 |",
    ):
        assert line in decoding
    for line in (
        "| 128m | lrkv full | 90.0 | 364,000 | 45.0% | 60.0% | 1.04 | 30.0 |",
        "| 128m lrkv | 2 | 3.0000 | 3.1250 | 0.250 |",
        "| 128m lrkv | 300 | 3.500 | 1.234 | 2.0e-03 | 300,000 | 9,000 (batch 32) |",
    ):
        assert line in training


def test_without_files_or_with_a_dry_runs_the_pages_say_that_nothing_was_measured(
    experiment, tmp_path, docs
):
    plant(tmp_path, "b", ("t1", "ok", {}), dry=True)
    plant(tmp_path, "e")
    experiment("first_light_tables").write(tmp_path, docs)
    for page, name in (("decode.md", "decoding"), ("performance.md", "training")):
        says = block(docs / page, name)
        assert says == "Not measured on a GPU yet (`python experiments/first_light.py`)."
        # As in the repository, until it is measured.
        assert says == block(ROOT / "docs" / page, name)


# What a machine with JAX and PyTorch lacks, but for what `--carry` packs for stages a to e.
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
def test_a_dry_run_executes_every_stage_and_a_to_e_without_the_data_libraries(tmp_path, docs):
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "sitecustomize.py").write_text(BLOCK.format(absent=ABSENT))
    out = tmp_path / "out"

    def run(stages, **environment):
        return subprocess.run(
            [sys.executable, SCRIPT, "--dry", "--out", out, "--docs", docs, "--stages", stages],
            env={**os.environ, "TMPDIR": str(tmp_path), **environment}, capture_output=True,
            text=True, timeout=900,
        )  # fmt: skip

    first = run("a,b,c,d,e", PYTHONPATH=str(tmp_path / "block"))
    assert first.returncode == 0, first.stdout + first.stderr
    second = run("f,g")
    assert second.returncode == 0, second.stdout + second.stderr
    for name in "abcdef":
        content = json.loads((out / f"{name}.json").read_text())
        assert content["rows"] and content["where"]["versions"]["jax"] and not content["left_out"]
        assert {row["verdict"] for row in content["rows"]} <= {"ok", "not here", "slow"}
    (table,) = out.glob("tuned-*.json")
    assert json.loads(table.read_text())["device"] == "cpu"
    assert "Not measured on a GPU yet" in block(docs / "decode.md", "decoding")
