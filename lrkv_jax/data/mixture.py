"""Sets of conversations to records: mixed, best-fit packed, each conversation once an epoch.

A record holds whole conversations, each from its start on, and no two records share a
token. What is left of it is filled with BOS that are no targets. The order of records
within an epoch is the loader's, as for any other data; the held-out ones are shuffled
here, so that the first few of them are in the mixture's proportions.
"""

import bisect
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from lrkv_jax.config.schema import DataConfig, MixtureConfig, MixturePart
from lrkv_jax.data.chat import ChatFormat, Loss
from lrkv_jax.data.conversation import Conversation
from lrkv_jax.data.records.folders import (
    built,
    describe,
    file_name,
    make_directory,
    token_features,
    write_file,
)
from lrkv_jax.data.sources import SPLITS
from lrkv_jax.data.tasks.registry import DEMO, fingerprint, identity, stream, task
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.errors import LrkvError

_FORMAT = 1  # raise it when records of the same mixture change
OnProgress = Callable[[str, float, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Packed:
    """A split's records, and what is in them.

    records: int32, ids that are no targets complemented (`lrkv_jax.training.token_batch`). counts:
    what `Records.counts` has (documents, tokens, bytes), `targets`, `cut` (conversations longer
    than a record, which lose their end), `filled` (share of the records' tokens that are no
    padding). parts: for each set its conversations and the sha256 of its examples.
    """

    records: Int[np.ndarray, "N U"]
    counts: dict[str, float]
    parts: list[dict[str, object]]


def build_mixture(data_config: DataConfig, context: int, *, progress: OnProgress) -> Path:
    """Return the folder of the records of a mixture, built if it does not exist.

    Records are int32, since ids that are no targets are complemented. The metadata has
    format, mixture, tokenizer, tokenizer_fingerprint, vocabulary, context and, under
    each split's name, what `Packed` counts and its parts. Raises LrkvError as `packed`
    does, and where the folder cannot be written or is damaged.
    """
    mixture, tokenizer = data_config.mixture, load_tokenizer(data_config.tokenizer)
    identity = [_FORMAT, context, _identity(data_config, tokenizer)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    name = f"mixture-{Path(tokenizer.name).stem}-{context}-{digest}"

    def write(folder: Path) -> None:
        features = token_features(context + 1, tokenizer.vocabulary, signed=True)
        metadata: dict[str, object] = {
            "format": _FORMAT,
            "mixture": mixture.model_dump(mode="json"),
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocabulary": tokenizer.vocabulary,
            "context": context,
        }
        written = {}
        progress("splits packed", 0, len(SPLITS))
        for number, split in enumerate(SPLITS):
            result = packed(data_config, split, context, tokenizer)
            written[split] = [write_file(folder / file_name(split, 0, 1), features, result.records)]
            metadata[split] = {**result.counts, "parts": result.parts}
            progress("splits packed", number + 1, len(SPLITS))
        described = "Conversations packed into records of context + 1 tokens."
        describe(folder, features, written, description=described, metadata=metadata)

    return built(Path(data_config.directory) / name, data_config.directory, write)


def packed(config: DataConfig, split: str, context: int, tokenizer: Tokenizer) -> Packed:
    """The records [N, context + 1] of one split of `config.mixture`; a function of its arguments.

    Raises LrkvError as `lrkv_jax.data.tasks.registry.stream` does, and for a split of nothing; for
    a set that the chat cannot write, by its first example, before any is packed.
    """
    mixture, chat = config.mixture, ChatFormat(tokenizer)
    for part in getattr(mixture, split):
        for example in itertools.islice(stream(part.task, part.split, mixture.folder), 1):
            try:
                chat.render(task(part.task).conversation(example), mixture.loss)
            except LrkvError as error:
                raise LrkvError(f"data.mixture.{split}, {part.task}: {error}") from error
    counts: Counter[str] = Counter()
    rows, parts = [], []
    for part in getattr(mixture, split):
        about, taken = _taken(part, mixture, chat, context)
        parts.append(about)
        for ids, counted in taken:
            rows.append(ids)
            counts.update(counted)
    if not rows:
        raise LrkvError(f"data.mixture.{split} takes no conversation: raise a weight of it")
    bins = best_fit([len(row) for row in rows], context + 1)
    if split == "heldout":
        bins = [bins[i] for i in np.random.default_rng(mixture.seed).permutation(len(bins))]
    records = np.full((len(bins), context + 1), ~tokenizer.bos, np.int32)
    for record, members in zip(records, bins, strict=True):
        joined = np.concatenate([rows[i] for i in members])
        record[: len(joined)] = joined
    filled = counts["tokens"] / records.size
    return Packed(records, {**counts, "filled": filled}, parts)


def _identity(config: DataConfig, tokenizer: Tokenizer) -> list[object]:
    """Everything but their length that a mixture's records depend on, as JSON.

    Raises LrkvError as `lrkv_jax.data.tasks.registry.stream` does.
    """
    mixture, cache = config.mixture, Path(config.directory, "sources.json")
    make_directory(config.directory)
    parts = {(part.task, part.split) for part in (*mixture.train, *mixture.heldout)}
    sets = {"/".join(part): identity(*part, mixture.folder, cache) for part in sorted(parts)}
    found: list[object] = [mixture.model_dump(mode="json", exclude={"folder"}), sets]
    found.append(tokenizer.fingerprint)
    if tokenizer.template is not None:
        found.append(tokenizer.template.source)
    return found


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins of at most `capacity`; returns each bin as a list of indices.

    Best-fit decreasing: each item, largest first, goes to the bin where it leaves the
    least space. The number of bins is at most 11/9 of the smallest possible, plus 4.
    """
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # bins with that much space left
    spaces: list[int] = []  # the keys of `by_space`, sorted
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect.bisect_left(spaces, sizes[index])
        if place == len(spaces):
            number, space = len(bins), capacity
            bins.append([])
        else:
            space = spaces[place]
            number = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[place]
        bins[number].append(index)
        left = space - sizes[index]
        if left not in by_space:
            bisect.insort(spaces, left)
            by_space[left] = []
        by_space[left].append(number)
    return bins


_Row = tuple[Int[np.ndarray, "T"], dict[str, int]]


def _taken(
    part: MixturePart, mixture: MixtureConfig, chat: ChatFormat, context: int
) -> tuple[dict[str, object], list[_Row]]:
    """Return the metadata of a part, and the conversations that it takes from its split."""
    rows: list[_Row] = []
    render = task(part.task).conversation

    def rendered():
        # One example at a time: as text, SmolTalk would take 2 GB.
        for example in stream(part.task, part.split, mixture.folder):
            rows.append(_row(render(example), chat, mixture.loss, context))
            yield example

    digest = fingerprint(rendered())
    demo = mixture.folder == DEMO
    if part.first and len(rows) < part.first and not demo:
        raise LrkvError(
            f"data.mixture: {part.task}/{part.split} has {len(rows)} rows and first = "
            f"{part.first} are asked for: use at most {len(rows)}"
        )
    # numpy's permutation is what `datasets.Dataset.shuffle(seed)` orders rows by: the
    # first N are those that the published recipe validates on.
    order = np.random.default_rng(mixture.seed).permutation(len(rows))[: part.first].tolist()
    whole, share = divmod(part.weight, 1)
    order = order * int(whole) + order[: round(share * len(order))]
    about = {
        "task": part.task,
        "split": part.split,
        "weight": part.weight,
        "license": "Apache-2.0" if demo else task(part.task).license,
        "conversations": len(order),
        "sha256": digest,
    }
    return about, [rows[i] for i in order]


def _row(conversation: Conversation, chat: ChatFormat, loss: Loss, context: int) -> _Row:
    """A conversation's ids, complemented where they are no targets, and what they count for."""
    ids, counted = chat.render(conversation, loss)
    counts = {"documents": 1, "cut": int(len(ids) > context + 1)}
    ids, counted = ids[: context + 1], counted[: context + 1]
    token_bytes = chat.tokenizer.token_bytes
    text = ids[ids < len(token_bytes)]  # a frame's ids may follow the tokenizer's
    counts |= {
        "tokens": len(ids),
        "targets": int(counted.sum()),
        "bytes": int(token_bytes[text].sum(dtype=np.int64)),
    }
    return np.where(counted, ids, ~ids), counts
