"""Runs as files: directories of `lrkv train`, and archives of many runs without checkpoints."""

import contextlib
import fcntl
import json
from collections.abc import Iterable
from pathlib import Path

from lrkv_jax import files
from lrkv_jax.config.history import read_history
from lrkv_jax.config.load import as_settings, config_from
from lrkv_jax.config.old_names import metrics_of_today
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import read_json
from lrkv_jax.lab.report.comparison.runs import RunRecord, order
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.run_dir import read_run


def read_runs(paths: Iterable[str | Path]) -> list[RunRecord]:
    """The runs at these paths: a run's directory, a folder of them, or an archive.

    A folder may be up to two levels above its runs. Raises `LrkvError` for a path that
    holds no run, and for a run whose files are damaged.
    """
    runs, broken = read_sound_runs(paths)
    for folder, reason in broken.items():
        raise LrkvError(f"{folder}: {reason}")
    return runs


def read_sound_runs(paths: Iterable[str | Path]) -> tuple[list[RunRecord], dict[Path, str]]:
    """The runs at these paths, and those with damaged files, as {directory: reason}."""
    found: dict[Path, None] = {}
    archived: list[RunRecord] = []
    for path in map(Path, paths):
        if path.is_file():
            archived += read_archive(path)
            continue
        here = _runs_in(path)
        if not here:
            what = "holds no run" if path.is_dir() else "is not there"
            raise LrkvError(
                f"{path} {what}: give a run's directory, a folder of runs, or an archive"
            )
        found |= dict.fromkeys(folder.resolve() for folder in here)
    sound, broken = list(archived), {}
    for folder in found:
        try:
            sound.append(read_run_record(folder))
        except LrkvError as error:
            broken[folder] = str(error).replace(f"{folder}/", "")
    sound.sort(key=lambda run: (run.scale, order(run), run.seed, str(run.path)))
    return sound, broken


def _runs_in(path: Path) -> list[Path]:
    # A sweep's runs lie one level below those of `lrkv train`.
    patterns = ("config.yaml", "*/config.yaml", "*/*/config.yaml")
    return sorted({file.parent for pattern in patterns for file in path.glob(pattern)})


def read_run_record(folder: Path) -> RunRecord:
    """The run in this directory; raises `LrkvError` if there is none, or a file is damaged."""
    run = RunRecord(
        folder,
        read_run(folder),
        tuple(read_metrics(folder)),
        read_json(folder / "evaluation.json", "delete it and evaluate the run again"),
        read_json(folder / "analysis.json", "delete it and analyze the run again"),
        tuple(read_history(folder)),
    )
    try:
        # What comparisons read of its rows must be there.
        _ = run.curve, run.changed
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise LrkvError(
            f"metrics.jsonl or history.jsonl has a row that `lrkv train` did not write ({what}): "
            "delete that row"
        ) from error
    return run


# What comparisons read of a row of metrics.
_COLUMNS = ("step", "loss", "tokens", "flops", "skipped",
            "validation_loss", "validation_bpb", "validation_tokens",
            "val_loss_subset", "val_bpb_subset")  # fmt: skip


def archived_by_name(file: str | Path) -> dict[str, RunRecord]:
    """The runs of a file that `archive_runs` writes, or none if it is not there yet."""
    runs = read_archive(file) if Path(file).is_file() else []
    return {run.path.name: run for run in runs}


def read_archive(file: str | Path) -> list[RunRecord]:
    """The runs that `archive_runs` wrote into a file of JSON lines, in its order.

    Raises `LrkvError` for a file that is not there, and for a line that is not such a run.
    """
    runs = []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LrkvError(f"{file} cannot be read: give an archive") from error
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            archived = json.loads(line)
            rows = [metrics_of_today(row) for row in archived["rows"]]
            history = [dict(one) for one in archived["history"]]
            config = config_from(archived["config"], where)
            run = RunRecord(
                Path(file) / archived["run"],
                config.model_copy(update={"run_dir": archived["run"]}),
                tuple(rows), archived["evaluation"], None, tuple(history),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            raise LrkvError(f"{where} is not an archived run: delete it") from error
        runs.append(run)
    return runs


def archive_runs(runs: Iterable[RunRecord], file: str | Path) -> None:
    """Add finished runs to a file of JSON lines, one a line, sorted by name.

    It has the configuration, each validation, the history and the evaluation: what comparisons
    read, without checkpoints. A run that the file has under this name is replaced.
    """
    with Path(f"{file}.lock").open("a") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(lock, fcntl.LOCK_EX)  # another sweep may add its runs now
        known = archived_by_name(file) | {run.path.name: run for run in runs}
        files.write(file, "".join(_archived(*one) for one in sorted(known.items())))


def _archived(name: str, run: RunRecord) -> str:
    """A run's line in an archive."""
    rows = [r for r in run.rows if r.get("validation_loss") is not None or r is run.rows[-1]]
    rows = [{key: row[key] for key in _COLUMNS if key in row} for row in rows]
    if speed := run.tokens_per_second:  # of all its steps, most of which are left out
        rows[-1]["tokens_per_second"] = speed
    archived = {
        "run": name,
        "config": as_settings(run.config.model_copy(update={"run_dir": None})),
        "rows": rows,
        "history": list(run.history),
        "evaluation": run.evaluation,
    }
    return json.dumps(archived) + "\n"
