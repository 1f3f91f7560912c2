"""lrkv harness: the lm-evaluation-harness's command over a run."""

from __future__ import annotations

from typing import Annotated

import typer

from lrkv_jax.cli.shared import Run, app, step_named


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def harness(
    context: typer.Context,
    run: Run,
    batch: Annotated[int, typer.Option(help="sequences at a time")] = 8,
    step: Annotated[str | None, typer.Option(help="a saved step, or best")] = None,
    seed: Annotated[int, typer.Option(help="of sampled texts")] = 0,
) -> None:
    """Ask the lm-evaluation-harness's tasks; its own options (lm_eval run --help) follow.

    As in: lrkv harness RUN --tasks hellaswag,piqa --num_fewshot 5 --limit 100
    """
    from lrkv_jax.evals.harness_adapter import command_line
    from lrkv_jax.runtime import start

    start(alone="lrkv harness")
    arguments = {"run": run, "batch": batch, "seed": seed}
    if step is not None:
        arguments["step"] = step_named(step)
    command_line(arguments, context.args)
