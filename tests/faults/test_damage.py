"""Whatever happens to checkpoints, the newest sound one is used, and nothing is loaded wrong."""

import io
import random
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from support.tiny import TINY

from lrkv_jax.config import load_config
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.state import abstract_state, checkpoint_items, resolve

pytestmark = pytest.mark.faults

ONE = {"devices": jax.devices()[:1]}
STEPS = (2, 4, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory, pages):
    """(configuration, directory) of a finished run with a checkpoint of each of `STEPS`."""
    directory = tmp_path_factory.mktemp("run") / "run"
    saves = "train.save_every=2", "train.max_checkpoints=3", "optimizer.muon.iterations=1"
    config = load_config("quickstart", [*TINY, *pages, *saves, f"run_dir={directory}"])
    train(config, console=Console(file=io.StringIO()), **ONE)
    return resolve(config), directory


@pytest.fixture(scope="module")
def truth(run):
    """What each checkpoint holds, as numpy, and the abstract items to restore into."""
    config, directory = run
    abstract = checkpoint_items(abstract_state(config, make_mesh(config.mesh, jax.devices()[:1])))
    with Checkpointer(directory / "checkpoints") as checkpoints:
        restored = {s: checkpoints.restore(abstract, s)[1] for s in STEPS}
    return jax.tree.map(np.asarray, restored), abstract


def files_in(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def filled_files(step):
    return [path for path in files_in(step) if path.stat().st_size]


def before(step):
    """The directory of the step before."""
    return step.parent / str(int(step.name) - 2)


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_in_data(step, rng):
    flip(max(files_in(step), key=lambda path: path.stat().st_size), rng)


def truncate(step, rng):
    path = rng.choice(filled_files(step))
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def extend(step, rng):
    with rng.choice(files_in(step)).open("ab") as file:
        file.write(b"\0" * rng.randrange(1, 99))


def reorder(step, rng):
    """Two files trade places."""
    one, other = rng.sample(filled_files(step), 2)
    while one.read_bytes() == other.read_bytes():
        one, other = rng.sample(filled_files(step), 2)
    keep = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(keep)


def another_steps_file(step, rng):
    """A file of the step before, in the place of this one's."""
    twins = [(path, before(step) / path.relative_to(step)) for path in files_in(step)]
    twins = [(path, twin) for path, twin in twins if twin.is_file()]
    path, twin = rng.choice([(a, b) for a, b in twins if a.read_bytes() != b.read_bytes()])
    path.write_bytes(twin.read_bytes())


def another_step(step, rng):
    """The whole step before, under this one's number."""
    shutil.rmtree(step)
    shutil.copytree(before(step), step)


def empty(step, rng):
    shutil.rmtree(step)
    step.mkdir()


def foreign(step, rng):
    """Something else altogether, in a directory with a number."""
    empty(step, rng)
    (step / "model.safetensors").write_bytes(rng.randbytes(1000))


def a_file(step, rng):
    shutil.rmtree(step)
    step.write_bytes(rng.randbytes(100))


def garbled_manifest(step, rng):
    texts = ["", "{}", "[]", "null", "[" * 100_000, '{"format": 1}', "\0" * 40]
    (step / "manifest.json").write_text(rng.choice(texts))


def delete_an_item(step, rng):
    shutil.rmtree(rng.choice([path for path in step.iterdir() if path.is_dir()]))


DAMAGES = {
    "a bit": lambda step, rng: flip(rng.choice(filled_files(step)), rng),
    "a file is gone": lambda step, rng: rng.choice(files_in(step)).unlink(),
    "no manifest": lambda step, rng: (step / "manifest.json").unlink(),
    "a bit of data": flip_in_data, "cut": truncate, "longer": extend, "an item": delete_an_item,
    "order": reorder, "another step's file": another_steps_file, "another step": another_step,
    "empty": empty, "foreign": foreign, "a file": a_file, "garbled manifest": garbled_manifest,
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_newest_sound_one_used(run, truth, tmp_path, kind):
    for seed in range(3):
        rng = random.Random(f"{kind} {seed}")
        there = tmp_path / str(seed) / "checkpoints"
        shutil.copytree(run[1] / "checkpoints", there)
        broken = STEPS[1:] if seed == 0 else STEPS[2:]
        for step in reversed(broken):
            DAMAGES[kind](there / str(step), rng)
        said = []
        with Checkpointer(there, warn=said.append) as checkpoints:
            step, items = checkpoints.restore_newest(truth[1])
            assert checkpoints.steps() == [s for s in STEPS if s not in broken]
        assert step == max(s for s in STEPS if s not in broken)
        jax.tree.map(np.testing.assert_array_equal, truth[0][step], items)
        assert len(said) == len(broken)
        for text, number in zip(sorted(said), broken, strict=True):
            assert f"checkpoints/{number} is damaged" in text and "set aside as" in text
            assert (there / f"damaged/{number}").exists()


def resumed(config, run, tmp_path, damage_all=False):
    """(result, printed text) of training on after the newest checkpoint was damaged."""
    shutil.copytree(run[1], tmp_path / "run")
    for step in STEPS if damage_all else STEPS[2:]:
        flip_in_data(tmp_path / f"run/checkpoints/{step}", random.Random(step))
    console = Console(file=io.StringIO(), width=300)
    here = config.model_copy(update={"run_dir": str(tmp_path / "run")})
    return train(here, console=console, **ONE), console.file.getvalue()


def test_training_goes_on_from_the_newest_sound_step_bit_for_bit(run, tmp_path):
    config, directory = run
    result, printed = resumed(config, run, tmp_path)
    assert result.step == 6 and "checkpoints/6 is damaged" in printed
    assert "resuming from step 4" in printed
    before, after = read_metrics(directory), read_metrics(tmp_path / "run")
    for key in ("step", "loss", "grad_norm", "bpb", "batch"):
        assert [row[key] for row in before] == [row[key] for row in after]
    folders = directory / "checkpoints", tmp_path / "run/checkpoints"
    one, other = (Checkpointer(folder).manifest(6)["arrays"] for folder in folders)
    assert one == other, "every array has the fingerprint it had"


def test_a_run_without_a_sound_checkpoint_stops_and_says_what_to_do(run, tmp_path):
    config, _ = run
    for _ in range(2):  # and says it again: nothing starts from scratch because it was tried twice
        with pytest.raises(LrkvError, match="no checkpoint under .* is sound") as error:
            resumed(config, run, tmp_path, damage_all=True)
        text = str(error.value)
        assert "\n" not in text and "step 6: " in text and "step 2: " in text
        assert "copy a sound one back, or delete the directory" in text
        assert {p.name for p in (tmp_path / "run/checkpoints").iterdir()} == {"2", "4", "6"}
        assert len(read_metrics(tmp_path / "run")) == 6, "the record of the run stays"
        shutil.rmtree(tmp_path / "run")


def test_a_step_that_is_asked_for_is_refused_when_damaged(run, truth, tmp_path):
    shutil.copytree(run[1] / "checkpoints", tmp_path / "checkpoints")
    flip_in_data(tmp_path / "checkpoints/4", random.Random(0))
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        with pytest.raises(LrkvError, match="checkpoints/4 is damaged: .* there are steps 2, 4, 6"):
            checkpoints.restore(truth[1], 4)
        assert checkpoints.restore(truth[1])[0] == 6
