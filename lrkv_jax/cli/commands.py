"""The commands that make and plan runs: quickstart, train, plan, settings, doctor."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lrkv_jax import files
from lrkv_jax.cli import shared
from lrkv_jax.cli.shared import Config, Json, Overrides, app, count, start_alone, working
from lrkv_jax.distributed import cluster_env
from lrkv_jax.distributed.stopping import Stopping
from lrkv_jax.errors import EXIT_BAD_INPUT, EXIT_START_AGAIN, LrkvError


@app.command()
def quickstart(
    overrides: Overrides = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Pretrain, midtrain and evaluate lrkv_latent instead, and talk to it."
        ),
    ] = False,
    run_model_code: Annotated[
        bool,
        typer.Option(
            "--run-model-code", help="With --chat: run programs that the model wrote, in a sandbox."
        ),
    ] = False,
) -> None:
    """Train two variants on a shipped corpus and compare them.

    They are mha and lrkv_latent, which it evaluates and decodes too.
    """
    from lrkv_jax.config import load_config

    if run_model_code and not chat:
        raise LrkvError("--run-model-code is for --chat: the comparison runs no model's code")
    with Stopping() as stopping:
        load_config("quickstart", overrides or [])  # a mistake costs no import of JAX
        start_alone("quickstart")
        from lrkv_jax.lab import quickstart as example

        console = Console(markup=False)
        if chat:
            finished = example.chat(
                overrides or [], console, run_model_code=run_model_code, stopping=stopping
            )
        else:
            finished = example.compare(overrides or [], console, stopping=stopping)
    sys.exit(0 if finished else EXIT_START_AGAIN)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    until: Annotated[
        int | None,
        typer.Option(parser=count, metavar="STEP", help="Save and stop after this step."),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(metavar="[HH:]MM:SS", help="Save, stop and exit with 75 after this time."),
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Let this setting differ from what the run was trained with, though it changes "
            "the result; its history records it. Repeatable.",
        ),
    ] = None,
) -> None:
    """Train a configuration, or resume its run.

    A run that exists resumes from its newest sound checkpoint. Ctrl-C and SIGTERM
    finish the step, save, and exit with 75: start the same command again. It ends with
    the run's page, report.html in its directory.
    """
    deadline = None if time_limit is None else time.monotonic() + shared.seconds_of(time_limit)
    from lrkv_jax.config import load_config

    with Stopping(deadline=deadline) as stopping:
        # A mistake costs no import of JAX; of several processes, process 0 reports it.
        run = load_config(config, overrides or []) if cluster_env.find(os.environ) is None else None
        with working("starting", plain=False):
            from lrkv_jax.distributed import start
            from lrkv_jax.training.loop import train as run_training

            processes = start()
            with processes.together():
                run = run or load_config(config, overrides or [])
        result = run_training(
            run, until=until, stopping=stopping, allow=allow_change or (), processes=processes
        )
        if processes.index == 0:
            _write_report(result.run_dir)
    sys.exit(EXIT_START_AGAIN if result.stopped else 0)


def _write_report(directory: Path) -> None:
    """Write the run's page, and print where it is and what to do next; no failure ends the run."""
    try:
        with working("drawing the report", plain=False):
            from lrkv_jax.lab.overview import next_commands, shown_path
            from lrkv_jax.lab.report.comparison.files import read_run_record
            from lrkv_jax.lab.report.page import write_page

            page, record = directory / "report.html", read_run_record(directory)
            write_page(page, [record])
        print(f"report  {shown_path(page)}")
        print("next   ", "\n        ".join(next_commands(record)[:2]), flush=True)
    except Exception as error:  # the run itself is saved
        why = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(OSError):
            print(f"the run is saved, but not its report ({why})", file=sys.stderr)


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    all_variants: Annotated[
        bool, typer.Option("--all", help="Show every variant of the configuration.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="How many devices a mesh axis of -1 fills (default: one node)."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="a100, h100, h200 or b200 (default: h200).")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            parser=count, metavar="N", help="Tokens in a decoder's cache (default: the context)."
        ),
    ] = None,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the step for its memory (10 to 30 s), or estimate it.",
        ),
    ] = True,
    utilization: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="LOW HIGH", help="Shares of the peak that a step may reach (default: 0.3 0.5)."
        ),
    ] = None,
    sbatch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the Slurm job of this step to FILE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report the memory and time that a run needs.

    That is parameters, FLOPs, cache bytes, memory and time.

    A mesh axis, --devices, --hardware, --utilization or --sbatch adds the training step on those
    devices: its memory and time, and which settings would make it fit or cost less. With it, or
    with --length, comes the time to decode a token.
    """
    # Nothing is computed: no reason to take an accelerator, or to wait for one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from lrkv_jax.config import load_config
    from lrkv_jax.distributed.hardware import hardware as device_named
    from lrkv_jax.lab.plan import report

    run = load_config(config, overrides or [])
    if not all(0 < share <= 1 for share in utilization or ()):
        raise LrkvError("--utilization: use two shares above 0 and at most 1, as in 0.3 0.5")
    if sbatch:
        files.check_writable(sbatch)  # before the step is compiled
    name = hardware or "h200"
    on_mesh = any(override.startswith("mesh.") for override in overrides or [])
    asked = devices, hardware, utilization, sbatch
    training = on_mesh or any(given is not None for given in asked)
    compiled, what = training and compile_, "planning"
    if compiled:
        from lrkv_jax.lab.plan.training import simulate_devices

        simulated = simulate_devices(run, devices, device_named(name))
        what = f"compiling the step for {simulated} simulated devices, 10 to 30 s for eight"
    with working(what):
        planned = report.plan_report(
            run, list(run.variants) if all_variants else [run.attention], training=training,
            compiled=compiled, devices=devices, device=name, length=length,
            utilization=utilization or (0.3, 0.5),
        )  # fmt: skip
    if sbatch:
        files.write(sbatch, report.sbatch(planned, config, overrides or []))
    text = report.as_text(planned, decoding=length is not None)
    print(files.json_of(planned) if as_json else text)


@app.command()
def settings(
    prefix: Annotated[
        str | None,
        typer.Argument(metavar="PREFIX", help="A setting, or a group as in optimizer.muon."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/settings.md instead.")
    ] = False,
) -> None:
    """List the settings of a run, with default, role and meaning."""
    from lrkv_jax.config.reference import all_settings, as_markdown, as_text

    if prefix and markdown:
        raise LrkvError(f"--markdown is the page of all settings: leave out {prefix}")
    print(as_markdown().rstrip() if markdown else as_text(all_settings(prefix or "")))


@app.command()
def doctor(
    seconds: Annotated[
        int, typer.Option(min=1, help="Begin no check, and end the one that runs, after this time.")
    ] = 115,
    as_json: Json = False,
) -> None:
    """Check this machine and its devices.

    It checks versions, devices and speeds. Each line is ok, slow or wrong, with the fix, or not
    here. It takes less than two minutes, and exits with 2 if something is wrong.
    """
    # Next to other programs: take no device memory that is not needed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from lrkv_jax.lab.doctor.examine import WRONG, examine, sentence
    from lrkv_jax.lab.doctor.host import checks

    with contextlib.ExitStack() as status:

        def begin(what: str) -> None:
            status.close()
            status.enter_context(working(what))

        def show(finding) -> None:
            status.close()
            print(finding, file=sys.stderr if as_json else sys.stdout, flush=True)
            begin("starting the next check")

        report = examine(show, begin, seconds=seconds, plan=checks)
    print(files.json_of(report) if as_json else sentence(report), flush=True)
    os._exit(EXIT_BAD_INPUT if report["doctor"] == WRONG else 0)  # a check may hang in a thread
