"""Run directories are read as they are, and only what may be compared is put together."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from support.written_runs import write_run, write_sweep

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.comparison.files import archive_runs, read_runs, read_sound_runs
from lrkv_jax.lab.report.comparison.runs import settings
from lrkv_jax.models.accounting.counts import cache_fraction


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("sweep") / "runs", seeds=(0, 1))


def test_a_folder_of_runs_is_searched_two_levels_deep_and_its_seeds_compared(sweep):
    runs = read_runs([sweep.parent])
    assert len(runs) == 14
    assert [run.path for run in read_runs([sweep])] == [run.path for run in runs]
    assert [run.path for run in read_runs([sweep / "mla-seed1"])] == [sweep / "mla-seed1"]
    assert len(read_runs([sweep, sweep / "mha-seed0", sweep.parent])) == 14  # each once
    (run,) = read_runs([sweep / "lrkv_r4-seed1"])
    assert (run.scale, run.variant, run.kind, run.size, run.label, run.seed) == (
        "quickstart", "lrkv_r4", "lrkv", 4, "LRKV-4", 1,
    )  # fmt: skip
    # (K + H·R) / (H·K) of H = 4, K = 32.
    assert cache_fraction(run.config.model) == (32 + 4 * 4) / (4 * 32)
    # Float32, 4 layers: shared and latents of both, padded to 8 of them, and 4 inverse norms.
    measured = run.evaluation["kv_cache_bytes_per_token"]
    assert measured == 4 * (4 * 2 * (32 + 4 * 8) + 4 * 4)
    assert run.finished and run.analysis is None
    (setting,) = settings(runs)
    assert setting.name == "quickstart"
    assert setting.labels == ["MHA", "GQA-2", "MQA", "MLA-32", "LRKV-2", "LRKV-4", "LRKV-8"]
    assert sorted(setting.seeds("LRKV-2")) == sorted(setting.main("lrkv")) == [0, 1]
    assert {run.label for run in setting.main("lrkv").values()} == {"LRKV-8"}


def test_a_path_or_a_line_without_a_run_is_named_in_one_line(tmp_path):
    for path, said in ((tmp_path, "holds no run"), (tmp_path / "absent", "is not there")):
        with pytest.raises(LrkvError, match=said):
            read_runs([path])
    file = tmp_path / "archive.jsonl"
    for line in ("{", "3", '{"run": "a", "rows": [], "history": 3}'):
        file.write_text(line + "\n")
        with pytest.raises(LrkvError, match="archive.jsonl, line 1 is not an archived run: delete"):
            read_runs([file])


def test_archived_runs_compare_as_their_directories_do(sweep, tmp_path):
    runs, file = read_runs([sweep]), tmp_path / "archive.jsonl"
    for run in runs:
        for row in run.rows:
            row["tokens_per_second"] = row["step"] ** 2
    for some in (runs[::2], runs[1::2], runs[:3]):  # added in any order, and again
        archive_runs(some, file)
    archived = read_runs([file])
    assert len(archived) == len(runs) and file.stat().st_size < 6_000 * len(runs)
    for ours, theirs in zip(archived, runs, strict=True):
        assert ours.path.name == theirs.path.name and ours.comparable == theirs.comparable
        assert ours.evaluation == theirs.evaluation and ours.history == theirs.history
        assert ours.finished and ours.bits_per_byte == theirs.bits_per_byte
        assert ours.tokens_per_second == theirs.tokens_per_second == 420.5  # of 20² and 21²
        for name in ("steps", "flops", "bits_per_byte"):
            np.testing.assert_array_equal(getattr(ours.curve, name), getattr(theirs.curve, name))


def test_sweeps_side_by_side_add_to_one_archive_in_turn(sweep, tmp_path):
    file, hold = tmp_path / "archive.jsonl", "import fcntl, sys; lock = open(sys.argv[1], 'a')"
    hold += "; fcntl.lockf(lock, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        ThreadPoolExecutor() as pool,
        subprocess.Popen([sys.executable, "-c", hold, f"{file}.lock"], **pipes) as other,
    ):
        other.stdout.readline()
        added = pool.submit(archive_runs, read_runs([sweep / "mha-seed0"]), file)
        with pytest.raises(TimeoutError):
            added.result(timeout=0.2)
        assert not file.exists()
    assert len(read_runs([file])) == 1


def test_a_curve_is_of_one_held_out_text(tmp_path):
    """The end is of the whole split, what comes before, and the end's `val_*_subset`, of a part."""
    part = write_run(tmp_path / "part", heldout=(1000, 9000))
    whole = write_run(tmp_path / "whole", heldout=(9000, 9000))
    ended, alike = (read_runs([path])[0] for path in (part, whole))
    np.testing.assert_array_equal(ended.curve.steps, [10, 20, 30])
    assert ended.curve.heldout_tokens == 1000
    np.testing.assert_array_equal(alike.curve.steps, [10, 20, 30, 40])
    assert ended.cross_entropy == alike.cross_entropy == 4.0
    (begun,) = read_runs([write_run(tmp_path / "begun", until=25)])
    assert not begun.finished and begun.cross_entropy is None and begun.bits_per_byte is None
    np.testing.assert_array_equal(begun.curve.steps, [10, 20])
    rows = [json.loads(line) for line in (part / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {"val_loss_subset": 4.25, "val_bpb_subset": 1.5}
    (part / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run,) = read_runs([part])
    archive_runs([run], tmp_path / "archive.jsonl")
    for one in (run, *read_runs([tmp_path / "archive.jsonl"])):
        np.testing.assert_array_equal(one.curve.steps, [10, 20, 30, 40])
        assert one.curve.cross_entropy[-1] == 4.25 and one.curve.bits_per_byte[-1] == 1.5
        assert one.curve.heldout_tokens == 1000 and one.cross_entropy == 4.0


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "attention: nothing\n"),
        ("evaluation.json", '{"kv_cache'),
        ("metrics.jsonl", "{\n"),
        ("metrics.jsonl", '{"step": 40, "validation_loss": 3.0}\n'),
        ("history.jsonl", '{"event": "change"}\n'),
        ("history.jsonl", "5\n"),
    ],
)
def test_a_broken_run_is_named_with_its_reason_and_others_are_read(tmp_path, file, text):
    sound, broken = (write_run(tmp_path / name) for name in ("sound", "broken"))
    (broken / file).write_text(text)
    runs, left_out = read_sound_runs([tmp_path])
    assert [run.path for run in runs] == [sound]
    ((folder, reason),) = left_out.items()
    assert folder == broken and reason and "\n" not in reason
    with pytest.raises(LrkvError, match=f"^{broken}: "):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    "key, schedule, apart",
    [("train.steps", "cosine", True), ("train.steps", "constant", False),
     ("train.max_checkpoints", "cosine", False)],
)  # fmt: skip
def test_a_run_whose_result_was_changed_on_the_way_is_not_compared(tmp_path, key, schedule, apart):
    for name in ("mha", "lrkv"):
        write_run(tmp_path / name, f"attention={name}", f"optimizer.schedule={schedule}")
    role = "rhythm" if key == "train.max_checkpoints" else "result"
    row = {"step": 20, "event": "change", "key": key, "role": role, "old": 1, "new": 2}
    (tmp_path / "mha" / "history.jsonl").write_text(json.dumps(row) + "\n")
    names = [setting.name for setting in settings(read_runs([tmp_path]))]
    assert [f"changed while training {key}" in name for name in names].count(True) == apart
    assert len(names) == 1 + apart


def test_how_a_run_was_carried_out_sets_nothing_apart_and_what_it_trained_with_does(tmp_path):
    write_run(tmp_path / "one", "attention=mha")
    write_run(
        tmp_path / "other", "attention=lrkv", "train.grad_accum_steps=2", "train.save_every=7",
        "model.unroll=1", "mesh.data=2", "data.directory=elsewhere", "name=quickstart_ranks",
    )  # fmt: skip
    (setting,) = settings(read_runs([tmp_path]))
    assert setting.name == "quickstart" and len(setting.runs) == 2
    write_run(tmp_path / "ablation", rank=8)  # names a size again, which counts once
    (setting,) = settings(read_runs([tmp_path]))
    assert [run.variant for run in setting.runs] == ["mha", "lrkv"]
    write_run(tmp_path / "attempt", "attention=mha", until=20)  # read before "one", which has ended
    (setting,) = settings(read_runs([tmp_path]))
    assert [run.path.name for run in setting.runs] == ["one", "other"]
    write_run(tmp_path / "longer", "attention=lrkv", "train.steps=50")
    write_run(tmp_path / "slower", "attention=lrkv", "optimizer.matrix_lr=0.01")
    names = [setting.name for setting in settings(read_runs([tmp_path]))]
    assert len(names) == 3
    (run,) = read_runs([tmp_path / "one"])
    for cautious, changed in ((False, []), (True, ["train.steps"])):
        how = {"schedule": "constant", "cautious_decay": cautious}
        optimizer = run.config.optimizer.model_copy(update=how)
        longer = {"event": "change", "key": "train.steps", "role": "semantics"}
        config = run.config.model_copy(update={"optimizer": optimizer})
        assert replace(run, config=config, history=(longer,)).changed == changed
    for told in ("tokens 102,400", "optimizer.matrix_lr 0.01"):
        assert [told in name for name in names].count(True) == 1


def test_other_runs_of_one_label_and_seed_are_not_mixed(tmp_path):
    for width in (8, 16):
        chosen = "attention=mla", f"attention.qk_rope_head_dim={width}"
        write_run(tmp_path / f"rope {width}", *chosen)
    with pytest.raises(LrkvError, match="are both MLA-.* of seed 0, and differ in model.attention"):
        settings(read_runs([tmp_path]))
    shutil.rmtree(tmp_path / "rope 8")
    write_run(tmp_path / "shuffled", *chosen, "data.shuffle_seed=7")
    with pytest.raises(LrkvError, match="data.shuffle_seed: compare them apart"):
        settings(read_runs([tmp_path]))


def test_the_variant_named_as_its_kind_stands_for_it_and_else_one_named_by_its_mode(tmp_path):
    for number, name in enumerate(("lrkv_latent", "lrkv")):
        write_run(tmp_path / str(number), f"attention={name}")
        write_run(tmp_path / f"rank {number}", f"train.seed={number}", rank=2)
        (setting,) = settings(read_runs([tmp_path]))
        assert {run.variant for run in setting.main("lrkv").values()} == {name}
    assert list(setting.beside) == ["LRKV-8", "LRKV-8 rope latent"]
