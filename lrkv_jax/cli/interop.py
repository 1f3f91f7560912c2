"""The commands by which models leave and come: export, import."""

import sys
from typing import Annotated

import typer

from lrkv_jax.cli.shared import Overrides, Run, Step, app, start_alone, step_named
from lrkv_jax.errors import LrkvError


@app.command()
def export(
    run: Run,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write.")],
    step: Step = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    shard: Annotated[
        float, typer.Option(metavar="GB", help="Largest size of one file of weights")
    ] = 5.0,
    factored: Annotated[
        bool,
        typer.Option(
            "--factored", help="Keep LRKV's factors, with a file that decodes from their cache."
        ),
    ] = False,
) -> None:
    """Write a run as a Hugging Face folder: weights, tokenizer, chat template, model card."""
    if dtype not in ("float32", "bfloat16"):
        raise LrkvError(f"--dtype {dtype}: use float32 or bfloat16")
    if not shard > 0:
        raise LrkvError(f"--shard {shard}: use a size above 0")
    start_alone("export")
    from lrkv_jax.interop.export import export as run_export

    name = run_export(
        run, directory, step=step_named(step), dtype=dtype, largest=int(shard * 1e9),
        factored=factored,
    )  # fmt: skip
    print(f"{directory}: {name}, {dtype}")


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="DIR|REPO", help="A model's folder, or OWNER/NAME on the hub.")
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The directory of the new run.")],
    overrides: Overrides = None,
) -> None:
    """Make a run of a Hugging Face model: to evaluate, decode, analyse, and train on."""
    start_alone("import")
    from lrkv_jax.interop.importing import import_model

    config = import_model(source, run, overrides or [], say=_note)
    print(f"{run}: {config.model.attention.label}, context of {config.train.context} tokens")


def _note(line: str) -> None:
    print(f"lrkv: {line}", file=sys.stderr)
