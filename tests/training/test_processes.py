"""A run of two processes with four devices each is the run of one process with eight."""

import io
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from support.several import ends, several
from support.tiny import TINY

from lrkv_jax.config import load_config
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.restore import load_run

# Minutes each: every process traces and compiles the whole step, on the same two cores.
pytestmark = pytest.mark.slow

LIMIT = 300


def settings(pages, run_dir, *overrides):
    return [*TINY, "model.dtype=float32", "train.steps=10", "train.log_every=5",
            "model.heads=8", "model.head_width=4", "train.validate_every=4", "train.save_every=4",
            "train.max_checkpoints=3", "optimizer.muon.iterations=1", *pages, f"run_dir={run_dir}",
            *overrides]  # fmt: skip


def train_in_one(pages, run_dir, *overrides):
    config = load_config("configs/quickstart.yaml", settings(pages, run_dir, *overrides))
    train(config, console=Console(file=io.StringIO()))  # on the eight devices of the tests
    return read_metrics(run_dir)


def in_two(pages, run_dir, *overrides):
    arguments = settings(pages, run_dir, *overrides)
    with several(["-m", "lrkv_jax.cli", "train", "configs/quickstart.yaml", *arguments]) as running:
        return ends(running, LIMIT)


def with_a_folder_each(pages, tmp_path, edit=False):
    """The settings for a copy of the text in a folder of each process; `edit` that of process 1."""
    source = pages[0].removeprefix("data.source=")
    folders = [shutil.copytree(source, tmp_path / place / "texts") for place in "01"]
    if edit:
        page = folders[1] / "03.txt"
        page.write_text(page.read_text().swapcase())
    each = tmp_path / "{process}"
    return *pages, f"data.source={each / 'texts'}", f"data.directory={each / 'data'}"


def column(rows, name):
    return np.array([row[name] for row in rows])


def assert_alike(rows, alone):
    """The rows of two processes are those that one process wrote first, of the same batches."""
    assert [row["batch"] for row in rows] == [row["batch"] for row in alone][: len(rows)]
    for name in ("loss", "bpb", "grad_norm"):
        got, expected = column(rows, name), column(alone, name)[: len(rows)]
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(got, expected, rtol=1e-4)


def assert_near(params, others):
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        # As a whole: Adam turns a rounding of an entry that has no gradient into a whole step.
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, pages):
    """The directory of a run of one process, which two repeat."""
    folder = tmp_path_factory.mktemp("alone")
    train_in_one(pages, folder / "run", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    return folder / "run"


def test_two_processes_learn_what_one_learns(tmp_path, pages, alone):
    """Both hold parts of the same sequences, and read the same rows."""
    mesh = "mesh.fsdp=1", "mesh.tensor=8"
    first, second = in_two(pages, tmp_path, *mesh, "train.sample_tokens=8", "train.save_every=0")
    assert (first.code, second.code) == (0, 0), (first, second)
    rows, expected = read_metrics(tmp_path), read_metrics(alone)
    assert list(column(rows, "step")) == list(range(1, 11))
    assert_alike(rows, expected)
    assert np.ptp(column(rows, "loss")) > 1e-2, "nothing was learnt"
    final = [of[-1]["validation_loss"] for of in (rows, expected)]
    np.testing.assert_allclose(*final, rtol=1e-5)
    assert rows[-1]["validation_tokens"] == expected[-1]["validation_tokens"]
    # Text is process 0's: the other said nothing, and nothing is there twice.
    assert second.out == "" and second.err == ""
    assert first.out.count("step 10/10") == 1
    assert len(list((tmp_path / "events").iterdir())) == 1
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-00000010.txt"]
    # What two have written, one reads.
    assert_near(load_run(tmp_path).params, load_run(alone).params)


def test_one_process_goes_on_from_the_checkpoint_of_two(tmp_path, pages, alone):
    """Each of the two reads other rows, process 1 from copied records without their text."""
    mesh = "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"
    copies, run_dir = with_a_folder_each(pages, tmp_path), tmp_path / "run"
    first = [setting.replace("{process}", "0") for setting in copies]
    build_dataset(load_config("configs/quickstart.yaml", settings(first, run_dir)).data, 32)
    shutil.copytree(tmp_path / "0/data", tmp_path / "1/data")
    shutil.rmtree(tmp_path / "1/texts")
    both = in_two(copies, run_dir, *mesh, "--until", "4")
    assert [ended.code for ended in both] == [0, 0] and not both[1].err, both
    rows, expected = read_metrics(run_dir), read_metrics(alone)
    assert len(rows) == 4
    assert_alike(rows, expected)
    np.testing.assert_allclose(*(of[3]["validation_loss"] for of in (rows, expected)), rtol=1e-5)
    assert_near(load_run(run_dir).params, load_run(alone, step=4).params)
    rows = train_in_one(pages, run_dir, "mesh.data=4", "mesh.fsdp=2")
    assert list(column(rows, "step")) == list(range(1, 11))
    assert_alike(rows, expected)


def test_a_run_directory_that_is_not_shared_is_named(tmp_path, pages):
    first, second = in_two(pages, tmp_path / "run-{process}")
    assert (first.code, second.code) == (2, 2)
    assert first.err.count("\n") == 1 and first.err.startswith("lrkv: process 1 on ")
    assert str(tmp_path / "run-0") in first.err and "file system that all hosts share" in first.err
    assert second.err == "" and first.out == second.out == ""


def test_a_process_with_another_setting_or_other_text_is_named(tmp_path, pages):
    for edit, setting, differs in (
        (False, "optimizer.matrix_lr=0.0{process}2", "optimizer.matrix_lr = 0.012, and 0.002 in"),
        (True, "mesh.fsdp=8", "the hash of data.source = "),
    ):
        place = tmp_path / str(edit)
        both = in_two(with_a_folder_each(pages, place, edit), place / "run", setting)
        for ended in both:
            assert ended.code == 2, both
            *building, refused = ended.out.splitlines() + ended.err.splitlines()
            assert refused.startswith("lrkv: process 1 on ") and differs in refused
            assert ["building the records of " in line for line in building] == [True] * edit
        assert not (place / "run").exists()


def test_a_run_without_a_sound_step_is_told_once(tmp_path, finished_run):
    """Every process printed the line."""
    run = shutil.copytree(finished_run.directory, tmp_path / "run")
    (run / "checkpoints/6/manifest.json").write_text("")
    command = "train", run / "config.yaml", f"run_dir={run}", "mesh.fsdp=8"
    with several(["-m", "lrkv_jax.cli", *command]) as running:
        first, second = ends(running, LIMIT)
    assert (first.code, second.code) == (2, 2)
    assert first.err.count("\n") == 1 and "is sound (step 6" in first.err and second.err == ""


def test_a_command_of_one_process_refuses_to_be_several(tmp_path):
    with several(["-m", "lrkv_jax.cli", "evaluate", tmp_path]) as running:
        both = ends(running, LIMIT)
    for ended in both:
        assert ended.code == 2 and "lrkv evaluate runs in one process" in ended.err
        assert ended.err.count("\n") == 1
