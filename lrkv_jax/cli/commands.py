"""The commands that make, use and foresee runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from lrkv_jax.cli.shared import Config, Overrides, app, seconds_of
from lrkv_jax.errors import EXIT_START_AGAIN, LrkvError


@app.command()
def quickstart(
    overrides: Overrides = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="pretrain, midtrain, evaluate and talk to LRKV instead")
    ] = False,
    run_model_code: Annotated[
        bool, typer.Option("--run-model-code", help="with --chat: for humaneval, in a sandbox")
    ] = False,
) -> None:
    """Train MHA and LRKV on the embedded corpus, evaluate, decode, and compare them."""
    from lrkv_jax.runtime import start

    start(alone="lrkv quickstart")
    if chat:
        from lrkv_jax.quickstart.talk import run_chat

        finished = run_chat(overrides or [], Console(), run_model_code=run_model_code)
    else:
        from lrkv_jax.quickstart.compare import run_quickstart

        finished = run_quickstart(overrides or [], Console())
    sys.exit(0 if finished else EXIT_START_AGAIN)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    until: Annotated[int | None, typer.Option(help="stop, saved, after this many steps")] = None,
    time_limit: Annotated[
        str | None, typer.Option(help="stop, saved, and exit with 75 after [HH:]MM:SS")
    ] = None,
    replay: Annotated[
        int | None, typer.Option(help="look at one step again instead; writes nothing")
    ] = None,
) -> None:
    """Train a configuration; goes on from the newest sound checkpoint if the run exists."""
    from lrkv_jax.config import load_config
    from lrkv_jax.runtime import processes, start
    from lrkv_jax.runtime.startup import Startup
    from lrkv_jax.train.loop import train as run_training

    startup = Startup.of_the_process()
    startup.phase("imports")
    if until is not None and until < 1:
        raise LrkvError(f"--until {until}: use 1 or more steps")
    deadline = None if time_limit is None else startup.began + seconds_of(time_limit)
    start()
    startup.phase("processes")
    with processes.together():
        run = load_config(config, overrides or [])
    if replay is not None:
        from lrkv_jax.train.replay import replay as run_replay

        run_replay(run, replay)
        return
    result = run_training(run, until=until, deadline=deadline, startup=startup)
    sys.exit(EXIT_START_AGAIN if result.stopped else 0)


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
