"""The same build on Apache Beam, for a cluster: extra `beam`.

The two stages are a pipeline each, with the code of one machine's: the source's shards become
streams of tokens in `data.directory`, which all workers must see, and a TFDS Beam builder cuts the
streams into records.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.build import DESCRIPTION, OnTokens, Packing, Streams, Workers
from lrkv_jax.data.records.folders import NAME, token_features
from lrkv_jax.data.records.jobs import News
from lrkv_jax.data.records.streams import OnDisk, Piece, build_stream, records
from lrkv_jax.data.sources import SPLITS, Split
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError


def beam_workers(options: Sequence[str] = ()) -> Workers:
    """Beam's workers for `build_dataset`; options: a pipeline's, as its command line takes them.

    The runner on this machine is used unless they name another. Raises LrkvError where Beam is not
    installed.
    """
    try:
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError:
        raise LrkvError('--beam needs apache-beam: pip install -e ".[beam]"') from None
    given = PipelineOptions(list(options))

    def run(jobs: Sequence[dict[str, Any]], workers: int, news: News) -> list[Any]:
        _run(jobs, given)
        for number in range(len(jobs)):
            news(number, None)
        return []

    def write(
        folder: Path, config: DataConfig, streams: Streams, packing: Packing, packed: OnTokens
    ) -> None:
        parts = {split: stream.parts for split, stream in streams.items()}
        if not parts["train"]:
            raise LrkvError("--beam builds a folder of files: set data.source to one")
        builder = Records(data_dir=str(folder / "beam"), packing=packing, parts=parts)
        how = tfds.download.DownloadConfig(beam_options=given)
        builder.download_and_prepare(download_config=how)
        built = Path(builder.data_dir)
        for file in built.iterdir():
            file.rename(folder / file.name)
        shutil.rmtree(folder / "beam")

    return Workers(run, write, always=True)


def _run(jobs: Sequence[dict[str, Any]], options: Any) -> None:
    import apache_beam as beam

    if jobs:
        with beam.Pipeline(options=options) as pipeline:
            _ = pipeline | beam.Create(jobs) | beam.Reshuffle() | beam.Map(_tokenise)


def _tokenise(job: dict[str, Any]) -> str:
    """Build a shard's stream on any worker; the folder is complete or does not exist."""
    config = DataConfig.model_validate(job["config"])
    tokenizer = load_tokenizer(config.tokenizer)
    return str(build_stream(config, job["names"], tokenizer, lambda totals: None))


Parts = Sequence[tuple[Path, Split]]


class Records(tfds.core.BeamBasedBuilder, skip_registration=True):  # type: ignore[call-arg] # its base takes it
    """A TFDS Beam builder of the records that `write_records` writes, in its order."""

    VERSION = tfds.core.Version("1.0.0")
    # Where TFDS looks for checksums of downloads, of which there are none.
    code_path = None
    name = NAME

    def __init__(self, *, data_dir: str, packing: Packing, parts: dict[Split, Parts]):
        self._packing, self._parts = packing, parts
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=DESCRIPTION,
            features=token_features(self._packing.context + 1, self._packing.vocabulary),
            metadata=tfds.core.MetadataDict(self._packing.metadata),
            disable_shuffling=True,  # the numbers are the order
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: Split) -> Any:
        import apache_beam as beam

        dtype = np.dtype(self.info.features["tokens"].np_dtype)
        cut = _Cut(self._parts[split], self._packing.context, self._packing.padding(split), dtype)
        pieces = [tuple(piece) for piece in self._packing.pieces[split]]
        return beam.Create(pieces) | beam.Reshuffle() | beam.FlatMap(cut)

    def _log_download_bytes(self) -> None:
        """TFDS prints here, though nothing is downloaded."""

    _log_download_done = _log_download_bytes


class _Cut:
    """Turns a piece into its numbered records, on any worker."""

    def __init__(
        self,
        parts: Parts,
        context: int,
        padding: int | None,
        dtype: np.dtype,
    ):
        self._parts, self._context, self._padding, self._dtype = parts, context, padding, dtype

    def __call__(self, piece: tuple[int, int]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        found = records(OnDisk(self._parts), Piece(*piece), self._context, self._padding)
        for number, record in enumerate(found, piece[0]):
            yield number, {"tokens": record.astype(self._dtype)}
