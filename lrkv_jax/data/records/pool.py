"""Jobs of a build, done by processes of one thread each."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lrkv_jax.errors import LrkvError

# One core each: the tokenizers' own threads would only wait for one another.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

News = Callable[[int, dict[str, int] | None], None]
Run = Callable[[Sequence[dict[str, Any]], int, News], list[Any]]


def run_jobs(jobs: Sequence[dict[str, Any]], workers: int, news: News) -> list[Any]:
    """The results of the jobs (`lrkv_jax.data.records.worker`), in their order.

    news(job, totals): how far a job is; totals is None when it is done. Called from threads.
    Raises the first LrkvError that a job ends with; the other processes are ended then. What jobs
    have completed on the disk stays.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)
    results: list[Any] = [None] * len(jobs)
    errors: list[Exception] = []
    processes: list[subprocess.Popen[str]] = []
    started = threading.Lock()

    def work() -> None:
        try:
            with started:
                if errors:
                    return
                process = _start()
                processes.append(process)
            while not errors:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    break
                results[number] = _do(process, jobs[number], lambda t, n=number: news(n, t))
                news(number, None)
            process.stdin.close()
            process.wait()
        except Exception as error:
            with started:
                errors.append(error)
                _end(processes)

    threads = [threading.Thread(target=work) for _ in range(min(workers, len(jobs)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupt from the keyboard
        with started:
            errors.append(KeyboardInterrupt())
            _end(processes)
        raise
    finally:
        for process in processes:
            process.wait()
            process.stdout.close()
    if errors:
        raise errors[0]
    return results


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lrkv_jax.data.records.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | _ONE_THREAD,
        text=True,
    )


def _do(
    process: subprocess.Popen[str], job: dict[str, Any], tell: Callable[[dict[str, int]], None]
) -> Any:
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it is told below
    for line in process.stdout:
        said = json.loads(line)
        if "done" in said:
            return said["done"]
        if "error" in said:
            raise LrkvError(said["error"])
        tell(said["progress"])
    raise LrkvError(
        f"a process of the build ended early (code {process.wait()}; -9 is often want of memory): "
        "run the same command again, with a smaller data.workers; what is complete stays"
    )


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
