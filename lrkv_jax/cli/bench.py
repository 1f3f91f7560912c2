"""`lrkv bench`: time decoding, training and serving."""

import os
from typing import Annotated, Any

import typer

from lrkv_jax.cli.shared import Json, Overrides, at_least, group, names, sizes, start_alone, working
from lrkv_jax.errors import LrkvError

bench_app = group("bench", "Time decoding, training and serving on this machine.")

Variants = Annotated[str | None, typer.Option(help="Variants of the scale to time (default: all).")]
Out = Annotated[str | None, typer.Option(help="Folder for JSON.")]


@bench_app.command("decode")
def bench_decode(
    overrides: Overrides = None,
    scale: Annotated[str, typer.Option(help="Shipped scales")] = "128m",
    variants: Variants = None,
    batch: Annotated[
        Any, typer.Option(parser=sizes, metavar="N,...", help="Sequences decoded at a time")
    ] = "1,4",
    length: Annotated[
        Any, typer.Option(parser=sizes, metavar="N,...", help="Tokens in the cache")
    ] = "512,2048,8192",
    impl: Annotated[
        str,
        typer.Option(help="Implementations: xla and mosaic are ours, jax and cudnn are peers"),
    ] = "xla,mosaic,jax,cudnn",
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Use lengths from 1 to LENGTH, half of it on average.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    samples: Annotated[int, typer.Option(help="Repetitions")] = 31,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time decode attention of every variant beside its peers.

    Lists are separated by commas.
    """
    start_alone("bench decode")
    from lrkv_jax.lab.bench.decode import DecodeBenchmark, run, tables
    from lrkv_jax.lab.bench.report import command

    settings = DecodeBenchmark(
        scales=names(scale), variants=names(variants), batches=batch, lengths=length,
        implementations=names(impl), ragged=ragged, dtype=dtype,
        samples=samples, overrides=tuple(overrides or ()),
    )  # fmt: skip
    command(run, settings, tables, working("measuring"), print_json=as_json, out=out)


@bench_app.command("train")
def bench_train(
    overrides: Overrides = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Shipped scales (default: 128m on a GPU, quickstart on a CPU)."),
    ] = None,
    variants: Variants = None,
    depth: Annotated[int | None, typer.Option(help="Layers (default: those of the scale).")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Repetitions (default: 15, on a CPU 7).")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time a training step of every variant.

    Tokens are random. Settings are given as to `lrkv train`, for example mesh.fsdp=8.
    """
    # Compile times are of compiling, unless the environment names a cache.
    os.environ.setdefault("LRKV_COMPILATION_CACHE", "off")
    start_alone("bench train")
    from lrkv_jax.lab.bench.report import command
    from lrkv_jax.lab.bench.train import here, run, tables

    settings = here(
        scales=names(scale), variants=names(variants), overrides=tuple(overrides or ()),
        depth=depth, samples=samples,
    )  # fmt: skip
    command(run, settings, tables, working("measuring"), print_json=as_json, out=out)


@bench_app.command("serve")
def bench_serve(
    scale: Annotated[str, typer.Option(help="A shipped scale.")] = "nano_family",
    variants: Annotated[
        str, typer.Option(help="Two variants of it; the first is the yardstick.")
    ] = "mha,lrkv_latent",
    context: Annotated[
        int, typer.Option(parser=at_least(256), metavar="N", help="Most tokens of a text")
    ] = 1024,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace")] = 64,
    samples: Annotated[int, typer.Option(help="Repetitions")] = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what a variant's smaller cache gains in serving.

    Gains are ratios within one run: both variants have the same bytes for their caches.
    """
    start_alone("bench serve")
    from lrkv_jax.lab.bench.report import command
    from lrkv_jax.lab.bench.serve import ServeBenchmark, run, tables

    pair = names(variants)
    if len(pair) != 2:
        raise LrkvError(f"--variants {variants}: name two, as in mha,lrkv_latent")
    settings = ServeBenchmark(scale, (pair[0], pair[1]), context, requests, samples)
    command(run, settings, tables, working("measuring"), print_json=as_json, out=out)
