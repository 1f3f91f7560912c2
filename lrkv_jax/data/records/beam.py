"""The same build on Apache Beam, for a cluster: extra `beam`.

The jobs of one machine's processes are a pipeline's elements: the source's shards become streams of
tokens in `data.directory`, which all workers must see, and records are cut from them.
"""

from collections.abc import Sequence
from typing import Any

from lrkv_jax.data.records.jobs import News, RunJobs, do
from lrkv_jax.errors import LrkvError


def beam_jobs(options: Sequence[str] = ()) -> RunJobs:
    """Like `run_jobs`, on Beam; options: a pipeline's, as its command line takes them.

    The runner on this machine is used unless they name another. Raises LrkvError where Beam is not
    installed.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError:
        raise LrkvError('--beam needs apache-beam: pip install -e ".[beam]"') from None
    given = PipelineOptions(list(options))

    def run(jobs: Sequence[dict[str, Any]], workers: int, news: News) -> None:
        if jobs:
            with beam.Pipeline(options=given) as pipeline:
                _ = pipeline | beam.Create(jobs) | beam.Reshuffle() | beam.Map(do)
        for number in range(len(jobs)):
            news(number, None)

    return run
