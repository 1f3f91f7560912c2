"""The commands by which models leave, come and change: export, import, convert."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from tabulate import tabulate

from lrkv_jax import files
from lrkv_jax.cli import shared
from lrkv_jax.cli.shared import Json, Overrides, Run, Step, app, at_least, working
from lrkv_jax.errors import LrkvError


@app.command()
def export(
    run: Run,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write.")],
    step: Step = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights")
    ] = "float32",
    form: Annotated[
        Literal["factored", "deepseek"] | None,
        typer.Option(
            "--as",
            help="With a small cache: as factors and the file that decodes from them, or, "
            "LRKV with latent_norm: joint, as DeepSeek's class.",
        ),
    ] = None,
) -> None:
    """Write a run as a Hugging Face folder.

    It has weights, a tokenizer, a chat template and a model card.
    """
    shared.start_alone("export")
    from lrkv_jax.interop.export import export as run_export

    name = run_export(run, directory, step=step, dtype=dtype, form=form)
    print(f"{directory}: {name}, {dtype}")


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="DIR|REPO", help="A model's folder, or OWNER/NAME on the hub.")
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The directory of the new run.")],
    overrides: Overrides = None,
) -> None:
    """Make a run of a Hugging Face model."""
    shared.start_alone("import")
    from lrkv_jax.interop.importing import import_model

    config = import_model(source, run, overrides or [], say=shared.note)
    print(f"{run}: {config.model.attention.label}, context of {config.train.seq_len} tokens")


@app.command()
def convert(
    run: Run,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The directory of the new run.")],
    settings: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE", help="The attention it gets."),
    ],
    step: Step = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A text to learn from and measure on; may be repeated. own is the run's, "
            "docstrings those of Python's standard library (default: both).",
        ),
    ] = None,
    bytes_: Annotated[
        float | None,
        typer.Option(
            "--bytes", metavar="SHARE", help="Choose widths for this share of the run's cache."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(parser=at_least(2), metavar="N", help="Tokens of each text to learn from")
    ] = 8192,
    heldout: Annotated[
        int, typer.Option(parser=at_least(2), metavar="N", help="Tokens of each text to measure on")
    ] = 16384,
    context: Annotated[
        int | None,
        typer.Option(
            parser=at_least(2),
            metavar="N",
            help="Tokens of a record (default: 1024, or the run's).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Give a pretrained run a smaller cache, without training.

    It says what that costs. Keys and values are fitted where the model reads them:
    attention=mla attention.kv_lora_rank=C (one latent for both), attention.rank=R
    beside it, or attention=lrkv attention.rank=R.
    """
    if bytes_ is not None and not 0 < bytes_ < 1:
        raise LrkvError(f"--bytes {bytes_:g}: use a share between 0 and 1")
    shared.start_alone("convert")
    from lrkv_jax.interop.convert import OWN, SECOND
    from lrkv_jax.interop.convert import convert as run_convert

    with working("reading the run") as progress:
        report = run_convert(
            run, new, settings, step=step, names=text or (OWN, SECOND),
            share=bytes_, tokens=tokens, heldout=heldout, context=context, progress=progress,
        )  # fmt: skip
    if as_json:
        print(files.json_of(report))
    else:
        _show(report, new)
        of_step = "" if step is None else f" train.teacher_step={report['step']}"
        print(f"healing: lrkv train configs/heal.yaml init_from={new} train.teacher={run}{of_step}")


def _show(report: dict[str, Any], new: str) -> None:
    layers = [
        (number, one["key_error"], one["value_error"], f"{one['condition']:.0f}")
        for number, one in enumerate(report["layers"])
    ]
    print(tabulate(layers, ("layer", "error of keys", "of values", "condition"), floatfmt=".4f"))
    losses = [
        (Path(name).name, one["before"], one["after"], f"{one['after'] - one['before']:+.4f}")
        for name, one in report["loss"].items()
    ]
    headers = ("held-out text, nats a token", "before", "after", "more")
    print(tabulate(losses, headers, floatfmt=".4f"))
    size = report["bytes_per_token"]
    print(
        f"{new}: {size['after']:,} bytes of cache per token, {size['share']:.1%} of the run's "
        f"{size['before']:,}"
    )
