"""A save that fails stops no run, costs no checkpoint, is told, counted and tried again."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.fault_runs import ENVIRONMENT, STEPS, command

from lrkv_jax.training.checkpointing.inspect import entries, verify
from lrkv_jax.training.metrics import read_metrics

LIMIT = 100
# A file system of its own, that only this process and its children see.
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
# The ballast leaves room for the log and for no checkpoint.
FULL = 'head -c 49M /dev/zero > "$DISK/ballast"'


@pytest.fixture(scope="module")
def mounts():
    able = (
        shutil.which("unshare")
        and not subprocess.run(
            [*OWN_MOUNTS, "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True
        ).returncode
    )
    if not able:
        pytest.skip("this system lets nobody mount a file system of their own")


def script(
    pages, tmp_path, before: str, meanwhile: str, after: str = ""
) -> subprocess.CompletedProcess:
    """Train on a disk of 50 MB with what the shell does to it before, meanwhile and after.

    In the shell, DISK is the disk, RUN the run on it, LOG what it says, and `until_ TEST` waits.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = command(pages, disk / "run", "attention=mha", "train.validate_every=0")
    train = [sys.executable, "-m", "lrkv_jax.cli", *arguments]
    quoted = " ".join(f"'{part}'" for part in train)
    lines = f"""
DISK='{disk}'; RUN='{disk}/run'; LOG='{tmp_path}/log'; ERR='{tmp_path}/err'
mount -t tmpfs -o size=50m tmpfs "$DISK"
train() {{ {quoted} >> "$LOG" 2>> "$ERR"; echo "code $?" >> "$LOG"; }}
until_() {{ for i in $(seq 6000); do if "$@"; then return; fi; sleep 0.01; done; }}
{before}
( {meanwhile} ) > /dev/null 2>&1 &
train
kill $! 2> /dev/null
{after}
cat "$LOG"; cat "$ERR" >&2
cp -r "$RUN" '{tmp_path}/kept'
"""
    return subprocess.run(
        [*OWN_MOUNTS, "bash", "-c", lines], capture_output=True, text=True, timeout=LIMIT,
        env=ENVIRONMENT,
    )  # fmt: skip


def sound(run: Path) -> list[int]:
    return [entry.step for entry in entries(run) if verify(entry).damage is None]


def steps(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run)]


@pytest.mark.slow
def test_a_full_disk_loses_no_step_and_the_next_interval_tries_again(mounts, pages, tmp_path):
    ended = script(
        pages, tmp_path,
        FULL,
        'until_ grep -q "2 failed so far" "$LOG"; rm "$DISK/ballast"',
    )  # fmt: skip
    text = ended.stdout
    assert "code 0" in text, text + ended.stderr
    assert "CHECKPOINT OF STEP 4 FAILED" in text and "No space left" in text
    assert "training continues, there is none yet; 1 failed so far" in text
    kept = tmp_path / "kept"
    assert steps(kept) == list(range(1, STEPS + 1))
    assert read_metrics(kept)[-1]["failed_saves"] >= 1
    assert sound(kept) == [56, 60]


@pytest.mark.faults
def test_a_stop_whose_save_fails_does_not_end_as_one_that_is_saved(mounts, pages, tmp_path):
    """A supervisor that starts what ended with 75 again would do so for ever."""
    ended = script(
        pages, tmp_path,
        FULL,
        'until_ grep -q "1 failed so far" "$LOG"; pkill -TERM -P $$ python',
        'rm "$DISK/ballast"',
    )  # fmt: skip
    assert "code 69" in ended.stdout, ended.stdout + ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert "could not be saved: the same command resumes from step" in last


@pytest.mark.faults
def test_a_disk_that_stays_full_keeps_the_last_sound_step_and_says_where_it_goes_on(
    mounts, pages, tmp_path
):
    ended = script(
        pages, tmp_path, "",
        # Again and again: a save that fails gives its room back.
        'until_ test -e "$RUN/checkpoints/12"; '
        'while true; do cat /dev/zero >> "$DISK/ballast"; sleep 0.05; done',
        'find "$DISK" -name ".*" | grep -v "^$DISK$" >> "$LOG"; rm "$DISK/ballast"; train',
    )  # fmt: skip
    first, _, second = ended.stdout.partition("code 69")
    assert second, ended.stdout + ended.stderr
    assert "FAILED" in first and "No space left" in first and "the newest is of step" in first
    assert f"{tmp_path}/disk/run/checkpoints/." not in second, "Orbax has left something"
    newest = int(first.rpartition("the newest is of step ")[2].partition(";")[0])
    assert newest >= 12
    assert "metrics.jsonl CANNOT BE WRITTEN (No space left on device)" in first
    last = ended.stderr.strip().splitlines()[-1]
    assert f"lrkv: step {STEPS} could not be saved" in last
    assert f"resumes from step {newest}, once" in last
    assert f"resuming from step {newest}" in second and "code 0" in second
    assert steps(tmp_path / "kept") == list(range(1, STEPS + 1))
