"""The sets by name: their place on the hub, who may use them, and how their rows are read."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lrkv_jax.data.assets import FOLDER, asset_checksum
from lrkv_jax.data.conversation import Conversation, conversation_from
from lrkv_jax.data.sources import file_identities
from lrkv_jax.data.tables import read_json_lines, read_parquet
from lrkv_jax.data.tasks import choices, gsm8k, humaneval
from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.data.tasks.gsm8k import WordProblem
from lrkv_jax.data.tasks.humaneval import Program
from lrkv_jax.errors import LrkvError, nearest

DEMO = "demo"
Example = Conversation | Choices | WordProblem | Program


@dataclass(frozen=True)
class Task:
    """A set on the Hugging Face hub and its demonstration twin.

    repo: its address there. files: for each split the pattern of its parquet files inside
    the repository, which is also what to download. license: the set's, as its card states it.
    read: from a row and an id to an example, or None for a row to leave out.
    conversation: an example in the recipe's rendering.
    """

    name: str
    repo: str
    files: Mapping[str, str]
    license: str
    read: Callable[..., Example | None]
    conversation: Callable[..., Conversation]

    def demo(self, split: str) -> str:
        """The file of its demonstration set, among the assets."""
        return f"{DEMO}/{self.name}-{split}.jsonl"


def _smoltalk_example(row: dict[str, Any], id: str) -> Conversation | None:
    """A row, `messages: [{role, content}]`; None, to be left out, where a message of it is empty.

    There is nothing to learn from an empty turn, and nobody can fix a row of the hub's. The set
    names no rows, so `id` leaves no trace. Raises LrkvError for a question without an answer.
    """
    messages = row["messages"]
    if not all(message["content"] for message in messages if message["role"] != "system"):
        return None
    conversation = conversation_from(messages)
    if len(conversation.alternating().messages) < 2:
        raise LrkvError("column 'messages' holds a question without an answer")
    return conversation


def _files(folder: str, splits: str) -> dict[str, str]:
    return {split: f"{folder}/{split}-*.parquet" for split in splits.split()}


def _arc(name: str, folder: str) -> Task:
    return Task(
        name, "allenai/ai2_arc", _files(folder, "train validation test"), "CC-BY-SA-4.0",
        choices.arc_example, choices.conversation,
    )  # fmt: skip


_ALL = (
    Task(
        "smoltalk", "HuggingFaceTB/smol-smoltalk", _files("data", "train test"),
        "Apache-2.0", _smoltalk_example, lambda example: example,
    ),
    Task(
        "mmlu", "cais/mmlu", _files("all", "auxiliary_train dev validation test"), "MIT",
        choices.mmlu_example, choices.conversation,
    ),
    _arc("arc_easy", "ARC-Easy"),
    _arc("arc_challenge", "ARC-Challenge"),
    Task(
        "gsm8k", "openai/gsm8k", _files("main", "train test"), "MIT",
        gsm8k.example, gsm8k.conversation,
    ),
    Task(
        "humaneval", "openai/openai_humaneval",
        _files("openai_humaneval", "test"), "MIT",
        humaneval.example, humaneval.conversation,
    ),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def task(name: str) -> Task:
    """A set by name. Raises LrkvError that names the nearest."""
    if name not in TASKS:
        raise LrkvError(f"no task is called {name!r}{nearest(name, TASKS)}")
    return TASKS[name]


def stream(name: str, split: str, folder: str | Path = DEMO) -> Iterator[Example]:
    """The examples of one split, in the files' order, one at a time (SmolTalk's 460K are large).

    folder: "demo" for the small demonstration set that ships with the package; else where fetched
    sets lie, each in a subfolder of its name with the repository's layout.

    Raises LrkvError while iterating: for another name or split, for files that are
    missing (with the command that fetches them), and with its place for any row that
    is not what the set promises.
    """
    found, number = _with_split(name, split), 0
    for place, row in _rows(found, split, folder):
        try:
            example = found.read(row, f"{name}/{split}/{number}")
        except (LrkvError, LookupError, TypeError, ValueError) as error:
            raise LrkvError(
                f"{place} is no row of {name} ({type(error).__name__}: {error}): fetch the "
                "file again, or correct that row"
            ) from None
        if example is not None:
            yield example
            number += 1
    if not number:
        fetch = f"`lrkv data fetch {name}`"
        raise LrkvError(f"{name}'s split {split} holds no rows: fetch it with {fetch}")


def load(name: str, split: str, folder: str | Path = DEMO) -> list[Example]:
    """Return all of `stream` as a list. Raises LrkvError like `stream`."""
    return list(stream(name, split, folder))


def identity(name: str, split: str, folder: str | Path, cache: Path) -> list[Any]:
    """What a split's examples depend on: the asset's checksum, or `file_identities` by `cache`.

    Raises LrkvError as `load` does for what is missing.
    """
    found = _with_split(name, split)
    if str(folder) == DEMO:
        return [asset_checksum(found.demo(split))]
    paths = _paths(found, split, Path(folder) / name)
    return file_identities(str(paths[0].parent), [path.name for path in paths], cache)


def fingerprint(examples: Iterable[Example]) -> str:
    """sha256 (hex) of the examples' canonical JSON, in order: what a score was measured on."""
    digest = hashlib.sha256()
    for example in examples:
        content = json.dumps(asdict(example), sort_keys=True, separators=(",", ":"))
        digest.update(content.encode() + b"\n")
    return digest.hexdigest()


def _with_split(name: str, split: str) -> Task:
    found = task(name)
    if split not in found.files:
        raise LrkvError(f"{name} has no split {split!r}: use {', '.join(found.files)}")
    return found


def _rows(found: Task, split: str, folder: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place, FILE:LINE."""
    demo = str(folder) == DEMO
    paths = (
        [FOLDER / found.demo(split)] if demo else _paths(found, split, Path(folder) / found.name)
    )
    for path in paths:
        for number, row in read_json_lines(path) if demo else read_parquet(path):
            yield f"{path}:{number}", row


def _paths(found: Task, split: str, folder: Path) -> list[Path]:
    """A split's files. The hub's names contain their number: test-00000-of-00004.parquet."""
    fetch = f"fetch it with `lrkv data fetch {found.name}`"
    try:
        paths = sorted(folder.glob(found.files[split]))
    except (OSError, ValueError):  # a name that no file system takes
        paths = []
    if not paths:
        raise LrkvError(f"{folder} holds no {found.files[split]}: {fetch}, or use {DEMO}")
    counts = {int(m.group(1)) for p in paths if (m := re.search(r"-of-(\d+)\.", p.name))}
    if counts and counts != {len(paths)}:
        raise LrkvError(
            f"{paths[0].parent} holds {len(paths)} of the {max(counts)} files of "
            f"{paths[0].name.split('-')[0]}: {fetch}"
        )
    return paths
