"""The same build on Apache Beam, for a cluster: extra `beam`.

The jobs of one machine's processes are a pipeline's elements: the source's shards become streams of
ids in `data.directory`, which all workers must see, and records are cut from them. Each job makes
one folder or one file, which appears whole, so a runner may repeat any of them. There is no shuffle
and no sink: a runner needs nothing but a map.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from lrkv_jax.data.records.jobs import Job, RunJobs, call
from lrkv_jax.errors import LrkvError

_DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"


def beam_jobs(options: Sequence[str] = ()) -> RunJobs:
    """Like `run_jobs`, on Beam; options: a pipeline's, as its command line takes them.

    The runner on this machine is used unless they name another. Raises LrkvError where Beam, or
    Dask for its runner, is not installed; the function that it returns raises one where a job or
    the runner fails.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
    except ImportError:
        raise LrkvError('--beam needs apache-beam: pip install -e ".[beam]"') from None
    parsed = PipelineOptions(list(options))
    standard = parsed.view_as(StandardOptions)
    if standard.runner in ("DaskRunner", _DASK):
        standard.runner = _DASK  # the one runner that Beam does not know by its short name
        _one_job_to_a_task(parsed)

    def run(jobs: Sequence[Job], workers: int) -> Iterator[int]:
        try:
            if jobs:
                with beam.Pipeline(options=parsed) as pipeline:
                    _ = pipeline | beam.Create(jobs) | beam.Reshuffle() | beam.Map(call)
        except LrkvError:
            raise
        except Exception as error:  # each runner has its own
            raise _failed(error) from error
        yield from range(len(jobs))

    return run


def _one_job_to_a_task(parsed: Any) -> None:
    """Unless the options say how the jobs are divided: by default 128 share a task, so a worker."""
    try:
        from apache_beam.runners.dask.dask_runner import DaskOptions
    except (ImportError, AttributeError):  # the latter is how the module misses dask
        raise LrkvError('--runner=DaskRunner needs dask: pip install -e ".[beam]"') from None
    dask = parsed.view_as(DaskOptions)
    if dask.npartitions is None and dask.partition_size is None:
        dask.partition_size = 1


def _failed(error: Exception) -> LrkvError:
    """The job's own error where the runner's text has one, else the runner's first line."""
    text = str(error)
    if found := re.findall(r"LrkvError: (.+?)(?: \[while running .*)?$", text, re.MULTILINE):
        return LrkvError(found[-1])
    reason = (text.strip().splitlines() or [type(error).__name__])[0][:300]
    return LrkvError(
        f"the Beam pipeline failed ({reason}): check --beam-options and the cluster, then run the "
        "same command again; what is complete in data.directory stays"
    )
