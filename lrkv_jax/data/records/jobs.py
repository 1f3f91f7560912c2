"""The processes of a build, of one thread each: jobs and news go through pipes, as JSON lines.

`run_jobs` is the parent's side; `python -m lrkv_jax.data.records.jobs` is a worker. A worker is a
process of its own, not a fork of one that may hold JAX, and not one of multiprocessing's, which
would import the caller's main module. It ends when its input does, or when nobody reads its news,
so it does not outlive a parent that was killed.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.folders import unwritable
from lrkv_jax.data.records.streams import OnDisk, Piece, Report, build_stream, write_piece
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError

# One core each: the tokenizers' own threads would only wait for one another.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_NEWS_SECONDS = 0.2

News = Callable[[int, dict[str, int] | None], None]
RunJobs = Callable[[Sequence[dict[str, Any]], int, News], None]


def run_jobs(jobs: Sequence[dict[str, Any]], workers: int, news: News) -> None:
    """Do the jobs in up to `workers` processes.

    jobs: `kind` is "tokenise" (a shard's names) or "pack" (a file of records); `config` is the
    DataConfig's. news(job, totals): how far a job is, None when it is done; called from threads.
    Raises the first LrkvError of a job, and ends the other processes then. What jobs have completed
    on the disk stays.
    """
    numbers = iter(range(len(jobs)))
    processes: list[subprocess.Popen[str]] = []

    def work(process: subprocess.Popen[str]) -> None:
        for number in numbers:
            _ask(process, jobs[number], functools.partial(news, number))
            news(number, None)

    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for _ in range(min(workers, len(jobs))):
                    processes.append(_start())
                for ended in as_completed([pool.submit(work, process) for process in processes]):
                    ended.result()
            except BaseException:  # also an interrupt from the keyboard
                for process in processes:
                    process.kill()
                raise
    finally:
        for process in processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
            process.stdout.close()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lrkv_jax.data.records.jobs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | _ONE_THREAD,
        text=True,
    )


def _ask(
    process: subprocess.Popen[str], job: dict[str, Any], report: Callable[[dict[str, int]], None]
) -> None:
    with contextlib.suppress(BrokenPipeError):  # a process that has ended is reported below
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    for line in process.stdout:
        said = json.loads(line)
        if said is None:  # done
            return
        if isinstance(said, str):
            raise LrkvError(said)
        report(said)
    raise LrkvError(
        f"a process of the build ended early (code {process.wait()}; -9 often means too little "
        "memory): run the same command again, with a smaller data.workers; what is complete stays"
    )


def main() -> None:
    """Do the jobs on standard input until it ends."""
    # Whatever a library prints must not be taken for news.
    news = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(what: dict[str, int] | str | None) -> None:
        try:
            print(json.dumps(what), file=news, flush=True)
        except BrokenPipeError:
            os._exit(1)  # the parent is gone

    for line in sys.stdin:
        try:
            do(json.loads(line), tell)
            tell(None)
        except LrkvError as error:
            tell(str(error))


def do(job: dict[str, Any], report: Report = lambda totals: None) -> None:
    """Do one job, with news of how far it is. Raises LrkvError where it cannot be done."""
    config = DataConfig.model_validate(job["config"])
    try:
        {"tokenise": _tokenise, "pack": _pack}[job["kind"]](config, job, report)
    except OSError as error:
        raise unwritable(config.directory, error) from None


def _tokenise(config: DataConfig, job: dict[str, Any], tell: Report) -> None:
    last = 0.0
    totals = {"documents": 0, "tokens": 0, "place": 0}

    def report(so_far: dict[str, int]) -> None:
        nonlocal last, totals
        totals = so_far
        if time.monotonic() - last > _NEWS_SECONDS:
            last = time.monotonic()
            tell(totals)

    tell(totals)
    build_stream(config, job["names"], load_tokenizer(config.tokenizer), report)
    tell(totals)


def _pack(config: DataConfig, job: dict[str, Any], tell: Report) -> None:
    stream = _joined(json.dumps(job["parts"]))
    path, piece = Path(job["path"]), Piece(*job["piece"])
    write_piece(path, stream, piece, job["context"], job["padding"], job["vocabulary"])


@functools.lru_cache(maxsize=2)
def _joined(parts: str) -> OnDisk:
    """Opened once for the many files that are cut from it."""
    return OnDisk([(Path(folder), split) for folder, split in json.loads(parts)])


if __name__ == "__main__":
    main()
