"""`lrkv evaluate`: held-out loss of a trained run, its cache's honesty, and the five benchmarks."""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lrkv_jax.config import RunConfig
from lrkv_jax.config.differences import differences
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.loader import heldout_batches
from lrkv_jax.data.sources import docstring_rows
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.agreement import ROWS, decode_agreement
from lrkv_jax.evaluation.benchmark import Benchmark, BenchmarkSettings, Questions, questions
from lrkv_jax.evaluation.tasks import check_allowed, gsm8k, humaneval, multiple_choice
from lrkv_jax.files import check_writable, read_json, write_json
from lrkv_jax.inference import Engine
from lrkv_jax.inference.language_model import LanguageModel
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.training.checkpointing.layout import versions
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.run_dir import read_run
from lrkv_jax.training.token_batch import BatchFormat
from lrkv_jax.training.validate import make_validation

BENCHMARKS: dict[str, Benchmark] = {
    "arc_easy": multiple_choice,
    "arc_challenge": multiple_choice,
    "mmlu": multiple_choice,
    "gsm8k": gsm8k,
    "humaneval": humaneval,
}
SPLIT = "test"  # of all five
# What an earlier evaluation must have in common with this one for its results to be kept.
_SAME = ("step", "dtype", "kv_cache_dtype", "changed_settings")

# A benchmark's name, the examples done, and the examples in all.
OnProgress = Callable[[str, float, int], None]


def evaluate(
    run: str | Path | TrainedRun,
    *,
    tasks: Sequence[str] = ("bpb", "agreement"),
    batch: int | None = None,
    step: int | str | None = None,
    settings: BenchmarkSettings | None = None,
    overrides: Sequence[str] = (),
    progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Evaluate a run, or the run of a directory; writes the result to `evaluation.json` in its
    directory, and each benchmark's records to `evaluations/`.

    They are written as those of the run's step, whatever `run.params` holds: give parameters that
    you changed a copy of its directory.

    What the file has of other tasks stays there, and in the result, if it is of this step, dtype
    and cache, without other overrides; of benchmarks, if they were asked by the same `settings`.

    `bpb` is cross-entropy and bits per byte over the whole held-out split, the same whatever
    `batch` (the run's unless given); `docstrings` is the same on docstrings of Python's
    standard library, a text unlike the embedded corpus; `agreement` compares cached decoding with
    the whole-sequence forward on held-out text; the others are benchmarks, run in a chat
    by `settings`, and `combined` the mean of all five where all are there.

    Raises `LrkvError`, before anything is computed, for an unknown task, a missing
    set, settings that do not fit the run, a run that cannot be read, and a directory that cannot
    be written.
    """
    if batch is not None and batch < 1:
        raise LrkvError(f"batch = {batch}: use 1 or more")
    if isinstance(tasks, str):
        tasks = [name for task in tasks.split(",") if (name := task.strip())]
    config = run.config if isinstance(run, TrainedRun) else read_run(run, overrides)
    chosen, settings = questions_of(config, tasks, settings)
    if not isinstance(run, TrainedRun):
        run = load_run(run, step=step, overrides=overrides)
    elif step is not None or overrides:
        raise LrkvError("step and overrides choose what load_run reads: give it them")
    if run.directory is None:
        raise LrkvError("the run has no directory for evaluation.json: give one that load_run read")
    batch = int(batch or run.config.train.global_batch_size)
    report = run.directory / "evaluation.json"
    check_writable(report)
    about = _about(run)
    result = dict(about)
    asked = settings.asked
    how = {"batch": batch, "versions": versions()}
    how |= {"devices": [device.device_kind for device in jax.devices()]}
    for task in tasks:
        if task in TASKS:
            result[task] = TASKS[task](run, batch)
    for name, questions_ in chosen.items():
        model = LanguageModel(run, batch=batch)
        if progress is not None:
            model.progress = partial(_report, progress, name, len(questions_.examples))
        began = time.monotonic()
        outcome = asdict(BENCHMARKS[name](model, questions_, settings))
        records = outcome.pop("records")
        result[name] = outcome | {
            "examples": len(records),
            "truncated_prompts": model.truncated,
            "seconds": time.monotonic() - began,
            "dataset": questions_.dataset,
            "settings": asked,
        }
        path = run.directory / "evaluations" / f"{name}-step{run.step}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, {**about, **how, **result[name], "records": records})
    result = about | _earlier(report, about, asked) | result
    if BENCHMARKS.keys() <= result.keys():
        result["combined"] = sum(result[name]["score"] for name in BENCHMARKS) / len(BENCHMARKS)
    write_json(report, result)
    return result


def questions_of(
    config: RunConfig, tasks: Sequence[str], settings: BenchmarkSettings | None = None
) -> tuple[dict[str, Questions], BenchmarkSettings]:
    """Questions of the benchmarks among the tasks, and the settings, by default such a run's.

    Raises `LrkvError` for an unknown task, one that is not permitted, settings that the
    run cannot answer to, and a set that is not there.
    """
    known = {**TASKS, **BENCHMARKS}
    unknown = [task for task in tasks if task not in known]
    if unknown or not tasks:
        wrong = f"unknown task {', '.join(unknown)}: use" if unknown else "no task: name a task of"
        raise LrkvError(f"{wrong} {', '.join(known)}")
    settings = settings or BenchmarkSettings()
    if "humaneval" in tasks:
        check_allowed(settings)
    context = config.train.seq_len
    if "agreement" in tasks and context < 2:
        raise LrkvError(f"train.seq_len = {context}: agreement needs 2 or more, leave it out")
    if {"gsm8k", "humaneval"} & set(tasks) and settings.max_new_tokens >= context:
        raise LrkvError(
            f"max_new_tokens (--tokens) = {settings.max_new_tokens}: use 1 to {context - 1}"
        )
    if BENCHMARKS.keys() & set(tasks):
        chat = ChatFormat(load_tokenizer(config.data.tokenizer))
        chat.check(config.model.vocabulary)
        if not chat.trained(config.data):
            raise LrkvError(
                "the run was not trained to chat, and benchmarks are asked in one: midtrain it, or "
                "use lrkv harness RUN --tasks NAMES"
            )
    chosen = {name: questions(name, SPLIT, settings) for name in tasks if name in BENCHMARKS}
    return chosen, settings


def _earlier(path: Path, about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The results in this file that are of the same weights, computed and asked alike."""
    before = None
    with contextlib.suppress(LrkvError):  # what is garbled is made again
        before = read_json(path, "delete it")
    if not before or any(before.get(key) != about[key] for key in _SAME):
        return {}
    return {
        name: found
        for name, found in before.items()
        if name in TASKS or (name in BENCHMARKS and found.get("settings") == settings)
    }


def _report(progress: OnProgress, name: str, total: int, done: float) -> None:
    progress(name, done, total)


def _about(run: TrainedRun) -> dict[str, Any]:
    """Describe what was evaluated, with the measured size of its cache."""
    config, report = run.config, Engine(run, batch=1).report()
    cache = config.model.kv_cache_dtype
    return {
        "run": str(run.directory),
        "attention": config.model.attention.kind,
        "step": int(run.step),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
        "kv_cache_bytes_per_token": report.cache_bytes_per_token,
        "kv_cache_bytes_per_token_formula": report.cache_bytes_per_token_formula,
        "kv_cache_dtype": config.model.dtype + " (rows in int8)" * (cache == "int8"),
        # As the quickstart, the plan and the model card have it.
        "kv_cache_bytes_per_token_bfloat16": cache_allocated_bytes_per_token(config.model),
        "dtype": config.model.dtype,
        "changed_settings": list(map(str, differences(read_run(run.directory), config))),
    }


def _held_out(run: TrainedRun, batch: int) -> dict[str, float]:
    config = run.config
    return _loss_on(run, heldout_batches(config.data, config.train.seq_len, batch))


def _docstrings(run: TrainedRun, batch: int) -> dict[str, float]:
    rows = docstring_rows(run.tokenizer, run.config.train.seq_len)
    # Filled up with rows of no targets: a smaller last batch would need a separate program.
    filled = np.pad(rows, ((0, -len(rows) % batch), (0, 0)), constant_values=~run.tokenizer.bos)
    return _loss_on(run, (filled[at : at + batch] for at in range(0, len(filled), batch)))


def _loss_on(run: TrainedRun, batches: Iterable[np.ndarray]) -> dict[str, float]:
    config = run.config
    token_bytes_V = run.tokenizer.token_bytes_up_to(config.model.vocabulary)
    validate = make_validation(
        config.model, run.mesh, token_bytes_V,
        chunk=config.train.loss_chunk, batch_format=BatchFormat.of(config, run.tokenizer.bos),
    )  # fmt: skip
    return asdict(validate(run.params, batches))


def _agreement(run: TrainedRun, batch: int) -> dict[str, float]:
    """Compare on the first held-out records."""
    del batch
    config = run.config
    rows = BatchFormat.of(config, run.tokenizer.bos)
    tokens_BU = next(heldout_batches(config.data, config.train.seq_len, ROWS, filled=False))
    tokens_BT = np.asarray(rows.ids(jax.numpy.asarray(tokens_BU[:, : config.train.seq_len])))
    return asdict(decode_agreement(run, tokens_BT))


TASKS = {"bpb": _held_out, "docstrings": _docstrings, "agreement": _agreement}
