"""Prompts continued: on the screen as they are decoded, or from a file of them to one of texts."""

from __future__ import annotations

import codecs
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lrkv_jax import files
from lrkv_jax.data.conversation import conversation_from
from lrkv_jax.data.tables import read_json_lines
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine, Sampling
from lrkv_jax.inference.language_model import Draws, LanguageModel
from lrkv_jax.inference.trained_run import TrainedRun


def streamed(
    run: TrainedRun,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> Iterator[str]:
    """Yield each prompt with its continuation and a line end, in pieces as they are decoded.

    All are decoded together; the first one is yielded meanwhile, and the rest when it has ended.
    """
    tokenizer, ids = run.tokenizer, [run.ids(text) for text in prompts]
    longest = max(map(len, ids)) + max_new_tokens
    engine = Engine(run, batch=len(ids), length=longest)
    columns: list[list[int]] = [[] for _ in ids]
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    yield prompts[0]
    for new in engine.stream(
        ids, max_new_tokens, sampling=sampling, seed=seed, stop=tokenizer.eos_token_ids
    ):
        for column, more in zip(columns, new, strict=True):
            column += more
        for token in new[0]:
            yield characters.decode(tokenizer.decode_bytes([token]))
    yield characters.decode(b"", final=True) + "\n"
    for text, column in zip(prompts[1:], columns[1:], strict=True):
        yield f"{text}{tokenizer.decode(column)}\n"


def generate_file(
    run: TrainedRun,
    source: str | Path,
    target: str | Path,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    batch: int = 8,
    progress: Callable[[str, float, int], None] | None = None,
) -> int:
    """Write `target`: each row of `source` with its `text`; return how many prompts were cut.

    A row has a `prompt`, which is continued, or `messages` ([{role, content}]), which are answered
    in a chat, with the calculator; whatever else it has is kept. Row i draws from (seed, i) alone.
    `target` appears whole or not at all; a device or a pipe is written at the end.

    Raises `LrkvError` for a row that has neither, and a file that cannot be read or written.
    """
    rows = _rows(Path(source))
    files.check_writable(target)  # before hours of decoding
    model = LanguageModel(run, batch=batch)
    if progress:
        model.progress = lambda done: progress(Path(source).name, done, len(rows))
    texts = _texts(model, rows, max_new_tokens, Draws(sampling, seed))
    lines = (
        json.dumps({**row, "text": text}, ensure_ascii=False)
        for (_, row), text in zip(rows, texts, strict=True)
    )
    _write(target, "".join(f"{line}\n" for line in lines))
    return model.truncated


def _write(target: str | Path, text: str) -> None:
    """Write the target, or the same text elsewhere: hours of decoding may be in it."""
    try:
        files.write(target, text)
        return
    except OSError as error:
        reason = error.strerror
    with tempfile.NamedTemporaryFile(prefix="lrkv-texts-", suffix=".jsonl", delete=False) as spare:
        spare.write(text.encode("utf-8", "backslashreplace"))
    raise LrkvError(f"{target} cannot be written ({reason}): the texts are in {spare.name}")


def _texts(model: LanguageModel, rows: list, max_new_tokens: int, draws: Draws) -> list[str]:
    prompts = []
    chats = [isinstance(row.get("messages"), list) for _, row in rows]
    for (place, row), is_chat in zip(rows, chats, strict=True):
        try:
            if is_chat:
                prompts.append(model.chat_prompt(conversation_from(row["messages"])))
            elif isinstance(row.get("prompt"), str):
                prompts.append(model.tokenizer.prompt(row["prompt"]))
            else:
                raise LrkvError('give {"prompt": "…"} or {"messages": [{"role": …, "content": …}]}')
        except LrkvError as error:
            raise LrkvError(f"{place}: {error}") from None
    if all(chats):
        answers = model.answers(prompts, max_new_tokens, draws)
        return [answer.text(model.chat) for (answer,) in answers]
    if any(chats):
        raise LrkvError("some rows have a prompt and some have messages: use a file for each")
    return [text for (text,) in model.continuations(prompts, max_new_tokens, (), draws)]


def _rows(source: Path) -> list[tuple[str, dict[str, Any]]]:
    """(place, row) of each line."""
    if not source.exists():
        raise LrkvError(f"{source} does not exist: name a file of JSON lines")
    rows = [(f"{source}:{n}", row) for n, row in read_json_lines(source)]
    if not rows:
        raise LrkvError(f"{source} has no rows")
    return rows
