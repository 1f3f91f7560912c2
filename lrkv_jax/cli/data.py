"""`lrkv data` and `lrkv tokenizer`: from text to records of tokens."""

import contextlib
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from lrkv_jax.cli.shared import Config, Overrides, group, note, working
from lrkv_jax.errors import LrkvError

data_app = group("data", "Fetch data and turn it into records of tokens.")
tokenizer_app = group("tokenizer", "Train a tokenizer.")


@data_app.command("build")
def data_build(
    config: Config,
    overrides: Overrides = None,
    beam: Annotated[bool, typer.Option("--beam", help="Build with Apache Beam.")] = False,
    beam_options: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Beam's options, as in '--runner=FlinkRunner'."),
    ] = None,
) -> None:
    """Fetch, tokenize and pack the data of a configuration.

    The same command resumes a build that was stopped.
    """
    from lrkv_jax.config import load_config
    from lrkv_jax.data.hub import fetch_source
    from lrkv_jax.data.records.build import build_dataset

    if beam_options is not None and not beam:
        raise LrkvError("--beam-options are for --beam: add it")
    run = load_config(config, overrides or [])
    jobs = None
    if beam:
        from lrkv_jax.data.records.jobs import beam_jobs

        jobs = beam_jobs(shlex.split(beam_options or ""))
    if run.data.mixture is None:
        fetch_source(run.data, note)
    elif beam:
        raise LrkvError("--beam is for documents: a mixture is built here, leave it out")
    with working("building the dataset") as progress:
        path = build_dataset(run.data, run.train.seq_len, progress=progress, run=jobs, warn=note)
    print(path)


@data_app.command("show")
def data_show(
    config: Config,
    overrides: Overrides = None,
    records: Annotated[int, typer.Option(min=0, help="Records to decode")] = 2,
) -> None:
    """Count the data of a configuration, and show its first records.

    They are built first if they are not there.
    """
    from lrkv_jax.config import load_config
    from lrkv_jax.data.loader import Records
    from lrkv_jax.data.records.build import build_dataset
    from lrkv_jax.data.sources import SPLITS, left_out
    from lrkv_jax.data.tokenizer import load_tokenizer
    from lrkv_jax.lab.report.tabulated import tabulated

    run = load_config(config, overrides or [])
    tokenizer = load_tokenizer(run.data.tokenizer)
    with working("building the dataset") as progress:
        path = build_dataset(run.data, run.train.seq_len, progress=progress, warn=note)
    print(f"{path}\n{tokenizer}, records of {run.train.seq_len:,} + 1 tokens\n")
    splits = {split: Records(path, split) for split in SPLITS}
    names = [name for name in splits["train"].counts if name != "parts"]
    rows = [
        (split, f"{len(found):,}", *(f"{found.counts[name]:,}" for name in names))
        for split, found in splits.items()
    ]
    print(tabulated(("split", "records", *names), rows, form="simple"))
    counts = splits["train"].counts
    if "bytes" in counts:
        print(f"\n{counts['bytes'] / counts['tokens']:.3f} bytes a token")
    if run.data.mixture is None and (others := left_out(run.data.source)):
        print(f"left out, for their names: {', '.join(others[:8])}{', …' * (len(others) > 8)}")
    for number in range(min(records, len(splits["train"]))):
        (ids,) = splits["train"].read([number])
        shown = (~i if i < 0 else i for i in ids)  # an id that is no target is complemented
        print(f"\nrecord {number}:\n{tokenizer.decode(shown)}")


@data_app.command("fetch")
def data_fetch(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="SET", help="Names of sets (default: all).")
    ] = None,
    folder: Annotated[str, typer.Option(help="Where to put them")] = "data/tasks",
    revision: Annotated[
        str, typer.Option(help="A branch, tag or commit; the commit is pinned")
    ] = "main",
) -> None:
    """Fetch the sets of midtraining and of the benchmarks from the hub.

    The same command resumes a download that was stopped.
    """
    from pathlib import Path

    from lrkv_jax.data.hub import download
    from lrkv_jax.data.tasks.registry import TASKS, task

    for found in [task(name) for name in tasks or TASKS]:
        patterns = sorted(set(found.files.values()))
        got = download(found.repo, revision, patterns, Path(folder) / found.name)
        size = sum(got["files"].values())
        print(
            f"{found.name}: {found.repo} at {got['commit'][:12]}, {len(got['files'])} files, "
            f"{size / 1e6:,.1f} MB, {got['license'] or found.license}"
        )


@tokenizer_app.command("train")
def tokenizer_train(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="sotu (shipped), or a folder of text.")
    ],
    vocabulary: Annotated[
        int, typer.Option(help="Number of entries, special tokens included")
    ] = 50304,
    out: Annotated[str, typer.Option(help="The file to write")] = "tokenizer.json",
    text_column: Annotated[
        str, typer.Option(help="The column of .jsonl and .parquet files that has the text")
    ] = "text",
    heldout: Annotated[
        float, typer.Option(help="Share of the documents to measure the result on")
    ] = 0.01,
    heldout_shards: Annotated[
        int, typer.Option(min=0, help="Measure on this many of the last files, whole, instead")
    ] = 0,
    megabytes: Annotated[
        int | None, typer.Option(min=1, help="How much text to learn from (default: all).")
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer.

    Runs use it by data.tokenizer=PATH.
    """
    from lrkv_jax import files
    from lrkv_jax.data.sources import documents
    from lrkv_jax.data.tokenizer import tokenizer_from_json
    from lrkv_jax.data.train_tokenizer import train_tokenizer, up_to

    if not 0 < heldout < 1:
        raise LrkvError(f"--heldout {heldout}: use a share between 0 and 1")
    splits: dict[str, Any] = {"text_column": text_column, "heldout": heldout}
    splits["heldout_shards"] = heldout_shards
    limit = None if megabytes is None else megabytes * 1_000_000
    files.check_writable(out)
    with working("reading") as bar, _options_named(splits):
        next(documents(source, "heldout", **splits))  # refused before the work where there is none
        definition = train_tokenizer(
            up_to(documents(source, "train", **splits), limit), vocabulary,
            progress=lambda size: bar("bytes read", size, limit),
            show_merging=sys.stderr.isatty(),
        )  # fmt: skip
    files.write(out, definition)
    tokenizer = tokenizer_from_json(out, definition.encode())
    size = tokens = 0
    for text in up_to(documents(source, "heldout", **splits), 20_000_000):
        size += len(text.encode())
        tokens += len(tokenizer.encode(text))
    print(f"{out}: {vocabulary:,} entries, {size / tokens:.3f} bytes per token on held-out text")


@contextlib.contextmanager
def _options_named(settings: Iterable[str]) -> Iterator[None]:
    """Errors in it name this command's options where they name a run's settings."""
    try:
        yield
    except LrkvError as error:
        text = str(error).replace("data.source = ", "")
        for name in sorted(settings, key=len, reverse=True):
            text = text.replace(f"data.{name}", f"--{name.replace('_', '-')}")
        raise LrkvError(text, error.exit_code) from error
