"""The command line: one thin command per verb. Everything heavy is imported inside its command."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from lrkv_jax.errors import LrkvError

EXIT_BAD_INPUT = 2
EXIT_START_AGAIN = 75  # EX_TEMPFAIL: a signal stopped the run, and it can go on

app = typer.Typer(
    help="Train, evaluate and decode five attention variants on equal terms.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Prepare data.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
bench_app = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file or a shipped scale")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="a run's directory")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings to change")
]


def main() -> None:
    """Entry point: user errors become one line and exit code 2, unless --debug is given."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app()
    except LrkvError as error:
        if debug:
            raise
        if str(error):
            print(f"lrkv: {_who()}{error}", file=sys.stderr)
        _leave_others(EXIT_BAD_INPUT)
        sys.exit(EXIT_BAD_INPUT)
    except Exception:
        _leave_others(1, show=traceback.print_exc)
        raise


def _who() -> str:
    """Which of several processes this is, where the error is its own."""
    processes = sys.modules.get("lrkv_jax.runtime.processes")
    if processes is None or not processes.must_leave() or processes.index() == 0:
        return ""
    return f"{processes.name(processes.index())}: "


def _leave_others(code: int, show: Callable[[], None] = lambda: None) -> None:
    """End at once if this is one of several processes: an ordinary exit waits for the others."""
    processes = sys.modules.get("lrkv_jax.runtime.processes")
    if processes is not None and processes.must_leave():
        show()
        processes.leave(code)


@app.command()
def quickstart(overrides: Overrides = None) -> None:
    """Train MHA and LRKV on the embedded corpus, evaluate, decode, and compare them."""
    from lrkv_jax.quickstart import run_quickstart
    from lrkv_jax.runtime import start

    start(alone="lrkv quickstart")
    finished = run_quickstart(overrides or [], Console())
    sys.exit(0 if finished else EXIT_START_AGAIN)


@data_app.command("build")
def data_build(config: Config, overrides: Overrides = None) -> None:
    """Tokenise and pack a configuration's data, if that is not done yet."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from lrkv_jax.config import load_config
    from lrkv_jax.data.builder import build_dataset

    run = load_config(config, overrides or [])
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"building {run.data.source}")

        def show(documents: int, tokens: int) -> None:
            text = f"building {run.data.source}: {documents:,} documents, {tokens:,} tokens"
            bar.update(task, description=text)

        path = build_dataset(run.data, run.train.context, progress=show)
    print(path)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    until: Annotated[int | None, typer.Option(help="stop, saved, after this many steps")] = None,
) -> None:
    """Train a configuration; goes on from the newest checkpoint if the run exists."""
    from lrkv_jax.config import load_config
    from lrkv_jax.runtime import processes, start
    from lrkv_jax.runtime.startup import Startup
    from lrkv_jax.train.loop import train as run_training

    startup = Startup.of_the_process()
    startup.phase("imports")
    if until is not None and until < 1:
        raise LrkvError(f"--until {until}: use 1 or more steps")
    start()
    startup.phase("processes")
    with processes.together():
        run = load_config(config, overrides or [])
    result = run_training(run, until=until, startup=startup)
    sys.exit(0 if result.signal is None else EXIT_START_AGAIN)


@app.command()
def evaluate(
    run: Run,
    overrides: Overrides = None,
    tasks: Annotated[str, typer.Option(help="comma-separated")] = "bpb,agreement",
    batch: Annotated[int | None, typer.Option(help="sequences at a time")] = None,
    step: Annotated[str | None, typer.Option(help="a saved step, or best")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, not a table")] = False,
) -> None:
    """Held-out loss of a run, and its cached decode against the whole-sequence forward."""
    from lrkv_jax.evals.evaluate import evaluate as run_evaluation
    from lrkv_jax.evals.evaluate import print_evaluation
    from lrkv_jax.runtime import start

    start(alone="lrkv evaluate")
    result = run_evaluation(
        run,
        tasks=[task for task in tasks.split(",") if task],
        batch=batch,
        step=_step(step),
        overrides=overrides or [],
    )
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_evaluation(result, Console())


@app.command()
def generate(
    run: Run,
    prompt: Annotated[list[str], typer.Option(help="text to go on from; may be repeated")],
    overrides: Overrides = None,
    tokens: Annotated[int, typer.Option(help="new tokens at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.8,
    top_k: Annotated[int, typer.Option(help="0 keeps all")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all")] = 0.95,
    seed: Annotated[int, typer.Option()] = 0,
    step: Annotated[str | None, typer.Option(help="a saved step, or best")] = None,
) -> None:
    """Continue prompts from the cache."""
    from lrkv_jax.data.tokenizer import load_tokenizer
    from lrkv_jax.decode import Sampling
    from lrkv_jax.decode import generate as run_decode
    from lrkv_jax.runtime import start
    from lrkv_jax.train.restore import load_run

    if tokens < 1:
        raise LrkvError(f"--tokens {tokens}: use 1 or more")
    start(alone="lrkv generate")
    sampling = Sampling(temperature, top_k, top_p)
    trained = load_run(run, step=_step(step), overrides=overrides or [])
    tokenizer = load_tokenizer(trained.config.data.tokenizer)
    prompts = [[tokenizer.bos, *tokenizer.encode(text).tolist()] for text in prompt]
    continued = run_decode(
        trained.config.model, trained.params, prompts, tokens,
        sampling=sampling, seed=seed, stop=(tokenizer.bos,), mesh=trained.mesh,
    )  # fmt: skip
    for text, ids in zip(prompt, continued, strict=True):
        print(text + tokenizer.decode(ids))


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    all_variants: Annotated[bool, typer.Option("--all", help="every variant")] = False,
    devices: Annotated[int | None, typer.Option(help="that a mesh axis of -1 fills")] = None,
    hardware: Annotated[str | None, typer.Option(help="a100, h100, h200 or b200")] = None,
    length: Annotated[int | None, typer.Option(help="tokens in a decoder's cache")] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="ask XLA too")] = False,
    target: Annotated[str, typer.Option(help="what to compile for: cpu or cuda")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, not a table")] = False,
) -> None:
    """Parameters, FLOPs and KV-cache bytes; on a mesh, memory, messages and time as well.

    A mesh axis, --devices, --hardware or --compile asks for the training step on these devices.
    """
    # The cache that is measured is small: no reason to take an accelerator, or to wait for one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from lrkv_jax.config import load_config
    from lrkv_jax.hardware import hardware as device_named
    from lrkv_jax.plan import Question, print_plan

    run = load_config(config, overrides or [])
    name = hardware or "h200"
    on_mesh = any(override.startswith("mesh.") for override in overrides or [])
    question = Question(
        training=on_mesh or compile_ or devices is not None or hardware is not None,
        devices=devices, hardware=name, compiled=target if compile_ else None, length=length,
    )  # fmt: skip
    if compile_:
        from lrkv_jax.plan.compiled import prepare

        prepare(run, devices, device_named(name), target)
    print_plan(run, all_variants=all_variants, as_json=as_json, question=question)


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
        scales=_list(scale), variants=_list(variants), ropes=_list(rope),
        batches=_sizes("--batch", batch), lengths=_sizes("--length", length),
        implementations=_list(impl), levels=_list(level), ragged=ragged, dtype=dtype,
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
        scales=scale and _list(scale), variants=_list(variants), ropes=rope and _list(rope),
        overrides=tuple(overrides or ()), depth=depth, samples=samples, data=data,
    )  # fmt: skip
    command(run, settings, print_report, as_json=as_json, out=out)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _sizes(option: str, text: str) -> tuple[int, ...]:
    parts = _list(text)
    if not all(part.isdigit() for part in parts):
        raise LrkvError(f"{option} {text}: use whole numbers, as in 1,4")
    return tuple(int(part) for part in parts)


def _step(text: str | None) -> int | str | None:
    if text is None or text == "best":
        return text
    if not text.isdigit():
        raise LrkvError(f"--step {text}: use a number, or best")
    return int(text)
