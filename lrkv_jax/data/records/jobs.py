"""The processes of a build, of one thread each, that do its jobs (`lrkv_jax.distributed.child`)."""

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.folders import unwritable
from lrkv_jax.data.records.streams import OnDisk, Piece, Report, build_stream, write_piece
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.distributed.child import Child, ChildEnded, answer_jobs
from lrkv_jax.errors import LrkvError

# One core each: the tokenizers' threads would only wait for one another.
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

    def work(child: Child) -> None:
        for number in numbers:
            _ask(child, jobs[number], functools.partial(news, number))
            news(number, None)

    # The processes end before the pool waits for its threads, also after an interrupt.
    with ThreadPoolExecutor(workers) as pool, ExitStack() as stack:
        count = min(workers, len(jobs))
        children = [stack.enter_context(_worker()) for _ in range(count)]
        for ended in as_completed([pool.submit(work, child) for child in children]):
            ended.result()


def _worker() -> Child:
    child = Child("lrkv_jax.data.records.jobs", os.environ | _ONE_THREAD)
    child.start()
    return child


def _ask(child: Child, job: dict[str, Any], report: Report) -> None:
    try:
        mistake = child.ask(job, report)
    except ChildEnded as ended:
        raise LrkvError(
            f"a process of the build {ended}: run the same command again, with a smaller "
            "data.workers where memory is short; what is complete stays"
        ) from None
    if mistake is not None:
        raise LrkvError(mistake)


def _answer(job: dict[str, Any], news: Report) -> str | None:
    """Nothing once a job is done, or what is wrong with it."""
    try:
        do(job, news)
    except LrkvError as error:
        return str(error)
    return None


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
    answer_jobs(_answer)
