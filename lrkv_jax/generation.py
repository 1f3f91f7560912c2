"""Files of prompts to files of texts: JSON lines in, JSON lines out, in batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrkv_jax.data.conversation import conversation_from
from lrkv_jax.decode import Sampling
from lrkv_jax.errors import LrkvError
from lrkv_jax.evals.language_model import Draws, LanguageModel
from lrkv_jax.train.restore import TrainedRun


def generate_file(
    run: TrainedRun,
    source: str | Path,
    target: str | Path,
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    batch: int = 8,
    progress: Callable[[str, float, int], None] | None = None,
) -> int:
    """Write `target`: each row of `source` with its `text`; return how many prompts were cut.

    A row has a `prompt`, which is continued, or `messages` ([{role, content}]), which are answered
    in a chat, with the calculator; whatever else it has is kept. Row i draws from (seed, i) alone.
    `target` appears whole or not at all.

    Raises `LrkvError` for a row that has neither, and a file that cannot be read or written.
    """
    rows = _rows(Path(source))
    target = Path(target)
    fresh = target.with_name(target.name + ".part")
    try:  # before hours of decoding
        fresh.write_text("")
    except OSError as error:
        raise LrkvError(f"{target} cannot be written ({error.strerror}): name another") from None
    done = 0.0

    def told(more: float) -> None:
        nonlocal done
        done += more
        if progress:
            progress(Path(source).name, done, len(rows))

    try:
        model = LanguageModel.of(run, batch=batch, progress=told)
        texts = _texts(model, rows, new_tokens, Draws(sampling, seed))
        lines = (
            json.dumps({**row, "text": text}, ensure_ascii=False)
            for (_, row), text in zip(rows, texts, strict=True)
        )
        try:
            fresh.write_text("".join(f"{line}\n" for line in lines))
            fresh.replace(target)
        except OSError as error:
            raise LrkvError(f"{target} cannot be written ({error.strerror})") from None
    finally:
        fresh.unlink(missing_ok=True)
    return model.truncated


def _texts(model: LanguageModel, rows: list, new_tokens: int, draws: Draws) -> list[str]:
    prompts = []
    chats = ["messages" in row for _, row in rows]
    for (place, row), is_chat in zip(rows, chats, strict=True):
        try:
            if is_chat:
                prompts.append(model.chat_prompt(conversation_from(row["messages"])))
            else:
                prompts.append(model.prompt(row["prompt"]))
        except LrkvError as error:
            raise LrkvError(f"{place}: {error}") from None
    if all(chats):
        said = model.answers(prompts, new_tokens, draws)
        return [answer.text(model.chat) for (answer,) in said]
    if any(chats):
        raise LrkvError("some rows have a prompt and some have messages: use a file for each")
    return [text for (text,) in model.continuations(prompts, new_tokens, (), draws)]


def _rows(source: Path) -> list[tuple[str, dict[str, Any]]]:
    """(place, row) of each line."""
    rows = []
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LrkvError(f"{source} cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{source}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LrkvError(f"{place}: not JSON ({error}): mend the line") from None
        fits = isinstance(row, dict) and (
            isinstance(row.get("prompt"), str) or isinstance(row.get("messages"), list)
        )
        if not fits:
            raise LrkvError(
                f'{place}: give {{"prompt": "…"}} or {{"messages": [{{"role": …, "content": …}}]}}'
            )
        rows.append((place, row))
    if not rows:
        raise LrkvError(f"{source} has no rows")
    return rows
