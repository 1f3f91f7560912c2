"""A run's folder from parameters that no training here has made: at step 0, saved like others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lrkv_jax import files
from lrkv_jax.config import RunConfig, dump_config
from lrkv_jax.config.load import RUN_TOKENIZER
from lrkv_jax.data.tokenizer import EMBEDDED, Tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer


def write_run(
    fresh: Path, directory: str | Path, config: RunConfig, params: Any, tokenizer: Tokenizer
) -> None:
    """Write a run into the folder `fresh`, which then becomes `directory`.

    A tokenizer in files is copied too, and config.yaml names it by its file's name.
    Raises `LrkvError` where the disk fails.
    """
    source, copy = Path(config.data.tokenizer), fresh / RUN_TOKENIZER
    if config.data.tokenizer not in EMBEDDED and not copy.exists():
        shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
    if copy.exists():
        data = config.data.model_copy(update={"tokenizer": RUN_TOKENIZER})
        config = config.model_copy(update={"data": data})
    about = {
        "config": config.model_dump(mode="json"),
        "tokens": 0,
        "loader": {"step": 0, "tokenizer": tokenizer.fingerprint},
    }
    with Checkpointer(fresh / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params}, about)
    if checkpoints.failures:
        raise LrkvError(f"{directory} cannot be written: name another place")
    files.write(fresh / "config.yaml", dump_config(config))
