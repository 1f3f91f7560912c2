"""lrkv bench: measure."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from lrkv_jax.cli.shared import Overrides, group, names, sizes

bench_app = group("bench", "Measure.")


@bench_app.command("decode")
def bench_decode(
    scale: Annotated[str, typer.Option(help="scales; 36x2304 is 2.5b")] = "128m",
    variants: Annotated[str, typer.Option()] = "mha,gqa,mqa,mla,lrkv",
    rope: Annotated[str, typer.Option(help="LRKV's modes")] = "full,shared,latent",
    batch: Annotated[str, typer.Option(help="sequences")] = "1,4",
    length: Annotated[str, typer.Option(help="tokens in the cache")] = "512,2048,8192",
    impl: Annotated[
        str, typer.Option(help="xla, mosaic (ours), jax, cudnn, pallas (peers), naive")
    ] = "xla,mosaic,jax,cudnn,pallas,naive",
    level: Annotated[
        str, typer.Option(help="attention alone, a whole layer, a whole step of the model")
    ] = "attention",
    depth: Annotated[int | None, typer.Option(help="layers of a step; the scale's")] = None,
    ragged: Annotated[bool, typer.Option(help="lengths from 1 to LENGTH, half on average")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16")] = "auto",
    samples: Annotated[int, typer.Option(help="times that each is timed")] = 15,
    out: Annotated[str | None, typer.Option(help="a folder for JSON and a plot")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, not tables")] = False,
) -> None:
    """Decode attention of every variant beside its peers; lists are comma-separated."""
    from lrkv_jax.runtime import start

    start(alone="lrkv bench decode")
    from lrkv_jax.bench.decode import Settings, run
    from lrkv_jax.bench.files import command
    from lrkv_jax.bench.table import print_report

    settings = Settings(
        scales=names(scale), variants=names(variants), ropes=names(rope),
        batches=sizes("--batch", batch), lengths=sizes("--length", length),
        implementations=names(impl), levels=names(level), ragged=ragged, dtype=dtype,
        samples=samples, depth=depth,
    )  # fmt: skip
    command(run, settings, print_report, as_json=as_json, out=out)


@bench_app.command("train")
def bench_train(
    overrides: Overrides = None,
    scale: Annotated[str | None, typer.Option(help="128m on a GPU, quickstart on a CPU")] = None,
    variants: Annotated[str, typer.Option()] = "mha,gqa,mqa,mla,lrkv",
    rope: Annotated[str | None, typer.Option(help="LRKV's modes; all on a GPU, full")] = None,
    depth: Annotated[int | None, typer.Option(help="layers; the scale's")] = None,
    samples: Annotated[int | None, typer.Option(help="times that each is timed; 15, 7")] = None,
    data: Annotated[bool, typer.Option(help="time the loader and the loop too")] = True,
    out: Annotated[str | None, typer.Option(help="a folder for JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, not tables")] = False,
) -> None:
    """A training step of every variant and its parts, on random tokens; mesh.fsdp=8 as in train."""
    # Compile times are of compiling, unless the environment names a cache.
    os.environ.setdefault("LRKV_COMPILATION_CACHE", "off")
    from lrkv_jax.runtime import start

    start(alone="lrkv bench train")
    from lrkv_jax.bench.files import command
    from lrkv_jax.bench.train import here, run
    from lrkv_jax.bench.train_table import print_report

    settings = here(
        scales=scale and names(scale), variants=names(variants), ropes=rope and names(rope),
        overrides=tuple(overrides or ()), depth=depth, samples=samples, data=data,
    )  # fmt: skip
    command(run, settings, print_report, as_json=as_json, out=out)
