"""lrkv data, lrkv tokenizer: from text to records of tokens."""

from __future__ import annotations

import sys

from lrkv_jax.cli.shared import Config, Overrides, group

data_app = group("data", "Prepare data.")


@data_app.command("build")
def data_build(config: Config, overrides: Overrides = None) -> None:
    """Fetch, tokenise and pack a configuration's data; goes on where it was stopped."""
    from lrkv_jax.cli.build_progress import shown
    from lrkv_jax.config import load_config
    from lrkv_jax.data.builder import build_dataset
    from lrkv_jax.data.hub import fetch_source

    run = load_config(config, overrides or [])
    fetch_source(run.data, lambda line: print(line, file=sys.stderr, flush=True))
    with shown(run.data.source) as progress:
        path = build_dataset(run.data, run.train.context, progress=progress)
    print(path)
