"""The processes of a build, of one thread each, that do its jobs."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from lrkv_jax.errors import LrkvError

# One core each: the tokenizers' threads would only wait for one another.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

Job = Callable[[], None]  # what can be pickled
RunJobs = Callable[[Sequence[Job], int], Iterator[int]]


def run_jobs(jobs: Sequence[Job], workers: int) -> Iterator[int]:
    """Do the jobs in up to `workers` processes; yield the number of each when it is done.

    Raises the first LrkvError of a job, after the jobs that run, and LrkvError where a process is
    killed. What jobs have completed on the disk stays.
    """
    if not jobs:
        return
    # Not a fork of a process that may hold JAX.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), spawn, initializer=_begin) as pool:
        numbers = {pool.submit(call, job): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(numbers):
                future.result()
                yield numbers[future]
        except BrokenProcessPool:
            raise LrkvError(
                "a process of the build was killed: run the same command again, with a smaller "
                "data.workers where memory is short; what is complete stays"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def run_here(jobs: Sequence[Job], workers: int) -> Iterator[int]:
    """Like `run_jobs`, in this process: a little text is done before a process has started."""
    for number, job in enumerate(jobs):
        job()
        yield number


def call(job: Job) -> None:
    """Do one job, wherever it was sent."""
    job()


def _begin() -> None:
    os.environ.update(_ONE_THREAD)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed takes no worker with it."""
    multiprocessing.parent_process().join()
    os._exit(1)
