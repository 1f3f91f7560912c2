"""Runners of a build's jobs: processes of this machine, of one thread each, or Apache Beam.

On Beam (extra `beam`) the jobs are a pipeline's elements: the source's shards become
streams of ids in `data.directory`, which all workers must see, and records are cut from
them. Each job makes one folder or one file, which appears whole, so a runner may repeat
any of them. There is no shuffle and no sink: a runner needs only a map.
"""

import multiprocessing
import os
import re
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

    Raises the first LrkvError of a job, after the jobs that run, and LrkvError where a
    process is killed. What jobs have completed on the disk stays.
    """
    if not jobs:
        return
    # Not a fork of a process that may hold JAX.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), spawn, initializer=_begin) as pool:
        numbers = {pool.submit(job): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(numbers):
                future.result()
                yield numbers[future]
        except BrokenProcessPool:
            raise LrkvError(
                "a process of the build was killed or did not start: run the same command again, "
                "with a smaller data.workers where memory is short; a script that builds needs "
                "if __name__ == '__main__'; what is complete stays"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def run_here(jobs: Sequence[Job], workers: int) -> Iterator[int]:
    """Like `run_jobs`, in this process: a little text is done before a process has started."""
    for number, job in enumerate(jobs):
        job()
        yield number


def _begin() -> None:
    os.environ.update(_ONE_THREAD)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed takes no worker with it."""
    multiprocessing.parent_process().join()
    os._exit(1)


def beam_jobs(options: Sequence[str] = ()) -> RunJobs:
    """Like `run_jobs`, on Beam; options: a pipeline's, as its command line takes them.

    The runner on this machine is used unless they name another. Raises LrkvError where
    Beam is not installed; the function that it returns raises one where a job or the
    runner fails.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError:
        raise LrkvError('--beam needs apache-beam: pip install -e ".[beam]"') from None
    parsed = PipelineOptions(list(options))

    def run(jobs: Sequence[Job], workers: int) -> Iterator[int]:
        try:
            if jobs:
                do = beam.Map(lambda job: job())
                with beam.Pipeline(options=parsed) as pipeline:
                    _ = pipeline | beam.Create(jobs) | beam.Reshuffle() | do
        except LrkvError:
            raise
        except Exception as error:  # each runner has different classes
            raise _failed(error) from error
        yield from range(len(jobs))

    return run


def _failed(error: Exception) -> LrkvError:
    """The job's error where the runner's text has one, else the runner's first line."""
    text = str(error)
    if found := re.findall(r"LrkvError: (.+?)(?: \[while running .*)?$", text, re.MULTILINE):
        return LrkvError(found[-1])
    reason = (text.strip().splitlines() or [type(error).__name__])[0][:300]
    return LrkvError(
        f"the Beam pipeline failed ({reason}): check --beam-options and the cluster, then run the "
        "same command again; what is complete in data.directory stays"
    )
