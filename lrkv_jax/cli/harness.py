"""`lrkv harness`: the lm-evaluation-harness's command over a run."""

from typing import Annotated

import typer

from lrkv_jax.cli.shared import Run, Seed, Step, app, start_alone, step_named


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def harness(
    context: typer.Context,
    run: Run,
    batch: Annotated[int, typer.Option(help="Sequences at a time")] = 8,
    step: Step = None,
    seed: Seed = 0,
) -> None:
    """Evaluate a run on tasks of the lm-evaluation-harness.

    Every other option is the harness's own (lm_eval run --help), as in: lrkv harness RUN --tasks
    hellaswag,piqa --num_fewshot 5 --limit 100
    """
    start_alone("harness")
    from lrkv_jax.evaluation.harness_adapter import command_line

    arguments = {"run": run, "batch": batch, "seed": seed}
    if step is not None:
        arguments["step"] = step_named(step)
    command_line(arguments, context.args)
