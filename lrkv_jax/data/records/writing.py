"""The second stage of a build: records cut from the streams, as a TFDS dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.packing import Piece, write_piece
from lrkv_jax.data.records.pool import run_jobs
from lrkv_jax.data.records.staging import Tally, Tokenised
from lrkv_jax.data.records.store import Written, describe, file_name, token_features
from lrkv_jax.data.sources import SPLITS, Split
from lrkv_jax.data.tokenizer import usable_cores

DESCRIPTION = "Records of context + 1 tokens for language modelling."


@dataclass(frozen=True)
class Plan:
    """What the records of a dataset are. pieces: of each split, in order."""

    context: int
    vocabulary: int
    bos: int
    pieces: dict[Split, list[Piece]]
    metadata: dict[str, Any]

    def padding(self, split: Split) -> int | None:
        """What fills a split's last record; None drops it."""
        return self.bos if split == "heldout" else None


def write_dataset(
    folder: Path, config: DataConfig, tokenised: Tokenised, plan: Plan, tally: Tally
) -> None:
    """Write the dataset into the folder, its files by several processes where there are several.

    Raises OSError and LrkvError where it cannot be written.
    """
    places = [
        (split, piece, folder / file_name(split, number, len(plan.pieces[split])))
        for split in SPLITS
        for number, piece in enumerate(plan.pieces[split])
    ]

    def packed(number: int) -> None:
        piece = places[number][1]
        tally.add_packed((piece.last - piece.first) * plan.context)

    # One file a split is written sooner than a process starts.
    if tokenised.parts and len(places) > len(SPLITS):
        asked = config.model_dump(mode="json")
        jobs = [
            {
                "kind": "pack", "config": asked, "parts": tokenised.parts[split], "piece": piece,
                "path": str(path), "context": plan.context, "padding": plan.padding(split),
                "vocabulary": plan.vocabulary,
            }
            for split, piece, path in places
        ]  # fmt: skip
        results = run_jobs(
            jobs, config.workers or usable_cores(), lambda n, totals: totals or packed(n)
        )
        done = [Written(*result) for result in results]
    else:
        done = []
        for number, (split, piece, path) in enumerate(places):
            stream, padding = tokenised.streams[split], plan.padding(split)
            done.append(write_piece(path, stream, piece, plan.context, padding, plan.vocabulary))
            packed(number)
    written = {
        split: [w for w, place in zip(done, places, strict=True) if place[0] == split]
        for split in SPLITS
    }
    features = token_features(plan.context + 1, plan.vocabulary)
    describe(folder, features, written, description=DESCRIPTION, metadata=plan.metadata)
