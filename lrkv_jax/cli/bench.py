"""`lrkv bench`: time decoding and training."""

import os
import sys
from typing import Annotated

import typer

from lrkv_jax.cli.shared import Json, Overrides, group, names, sizes, start_alone

bench_app = group("bench", "Time decoding and training on this machine.")

Variants = Annotated[str | None, typer.Option(help="Lines of the scale to time (default: all).")]


@bench_app.command("decode")
def bench_decode(
    overrides: Overrides = None,
    scale: Annotated[
        str, typer.Option(help="Shipped scales, or layers x width: 36x2304 is 2.5b")
    ] = "128m",
    variants: Variants = None,
    rope: Annotated[
        str | None,
        typer.Option(
            help="Rope modes of a variant to time; own: as the scale has it (default: all)."
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences decoded at a time")] = "1,4",
    length: Annotated[str, typer.Option(help="Tokens in the cache")] = "512,2048,8192",
    impl: Annotated[
        str,
        typer.Option(help="Implementations: xla and mosaic are ours, jax and cudnn are peers"),
    ] = "xla,mosaic,jax,cudnn",
    level: Annotated[
        str, typer.Option(help="What is timed: attention of a layer, or a step of the whole model")
    ] = "attention",
    depth: Annotated[
        int | None, typer.Option(help="Layers of a step (default: those of the scale).")
    ] = None,
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Use lengths from 1 to LENGTH, half of it on average.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    samples: Annotated[int, typer.Option(help="Repetitions")] = 31,
    out: Annotated[str | None, typer.Option(help="Folder for JSON and a plot.")] = None,
    as_json: Json = False,
) -> None:
    """Time decode attention of every variant beside its peers.

    Lists are separated by commas.
    """
    start_alone("bench decode")
    from lrkv_jax.lab.bench.decode import DecodeBenchmark, run
    from lrkv_jax.lab.bench.decode_plot import draw
    from lrkv_jax.lab.bench.decode_table import print_report
    from lrkv_jax.lab.bench.report import command

    settings = DecodeBenchmark(
        scales=names(scale), variants=names(variants), ropes=names(rope),
        batches=sizes("--batch", batch), lengths=sizes("--length", length),
        implementations=names(impl), levels=names(level), ragged=ragged, dtype=dtype,
        samples=samples, depth=depth, overrides=tuple(overrides or ()),
    )  # fmt: skip
    command(run, settings, print_report, print_json=as_json, out=out, draw=draw)


@bench_app.command("train")
def bench_train(
    overrides: Overrides = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Shipped scales (default: 128m on a GPU, quickstart on a CPU)."),
    ] = None,
    variants: Variants = None,
    rope: Annotated[
        str | None,
        typer.Option(help="Rope modes to time (default: all on a GPU, full,latent on a CPU)."),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Layers (default: those of the scale).")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Repetitions (default: 15, on a CPU 7).")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder for JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Time a training step of every variant.

    Tokens are random. TrainBenchmark are given as to `lrkv train`, for example mesh.fsdp=8.
    """
    # Compile times are of compiling, unless the environment names a cache.
    os.environ.setdefault("LRKV_COMPILATION_CACHE", "off")
    start_alone("bench train")
    from lrkv_jax.lab.bench.report import command
    from lrkv_jax.lab.bench.train import here, run
    from lrkv_jax.lab.bench.train_table import print_report

    settings = here(
        scales=names(scale), variants=names(variants), ropes=names(rope),
        overrides=tuple(overrides or ()), depth=depth, samples=samples,
    )  # fmt: skip
    command(run, settings, print_report, print_json=as_json, out=out)


@bench_app.command("serve")
def bench_serve(
    scale: Annotated[str, typer.Option(help="A shipped scale.")] = "nano_family",
    variants: Annotated[str, typer.Option(help="Two lines of it; the first is the yardstick.")] = (
        "mha,lrkv_latent"
    ),
    batch: Annotated[int, typer.Option(min=1, help="Texts decoded together over HTTP")] = 8,
    context: Annotated[int, typer.Option(min=256, help="Most tokens of a text")] = 1024,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace")] = 64,
    samples: Annotated[int, typer.Option(help="Repetitions")] = 3,
    url: Annotated[
        str | None, typer.Option(help="Load this OpenAI-compatible server instead.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="With --url: who ask, one after another")] = 8,
    rate: Annotated[
        float | None, typer.Option(help="With --url: requests a second, by a Poisson process.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --url: the model's name.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what serving gains, or load a server.

    Gains are ratios within one run. A server's key is read from LRKV_SERVE_KEY.
    """
    if url is not None:
        import json

        from rich.console import Console

        from lrkv_jax.lab.bench import load as loads
        from lrkv_jax.lab.bench.serve import print_load

        load = loads.Load(
            requests, clients, rate, longest=context, model=model,
            key=os.environ.get("LRKV_SERVE_KEY"),
        )  # fmt: skip
        found = loads.run(url, load)
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            print_load(found, Console(markup=False))
        if out is not None:
            print(loads.save(found, url, load, out), file=sys.stderr)
        return
    start_alone("bench serve")
    from lrkv_jax.errors import LrkvError
    from lrkv_jax.lab.bench.report import command
    from lrkv_jax.lab.bench.serve import ServeBenchmark, print_report, run

    pair = names(variants)
    if len(pair) != 2:
        raise LrkvError(f"--variants {variants}: name two, as in mha,lrkv_latent")
    settings = ServeBenchmark(scale, (pair[0], pair[1]), batch, context, requests, samples)
    command(run, settings, print_report, print_json=as_json, out=out)
