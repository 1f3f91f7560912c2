"""lrkv data, lrkv tokenizer: from text to records of tokens."""

from __future__ import annotations

from lrkv_jax.cli.shared import Config, Overrides, group

data_app = group("data", "Prepare data.")


@data_app.command("build")
def data_build(config: Config, overrides: Overrides = None) -> None:
    """Tokenise and pack a configuration's data; goes on where it was stopped."""
    from lrkv_jax.cli.build_progress import shown
    from lrkv_jax.config import load_config
    from lrkv_jax.data.builder import build_dataset

    run = load_config(config, overrides or [])
    with shown(run.data.source) as progress:
        path = build_dataset(run.data, run.train.context, progress=progress)
    print(path)
