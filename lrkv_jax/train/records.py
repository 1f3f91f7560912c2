"""A run's records: built by one of its processes, counted, and read as batches by all."""

from __future__ import annotations

from lrkv_jax.config import RunConfig
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.dataset import dataset
from lrkv_jax.data.loader import Loader, Records, make_loader
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.runtime import processes


def with_records(config: RunConfig) -> RunConfig:
    """The configuration once its data is built: by process 0, while the others wait.

    `train.epochs` becomes `train.steps`. Raises `LrkvError` in all processes for what
    `lrkv_jax.data.dataset.dataset` raises it for.
    """
    data, train = config.data, config.train
    with processes.together():
        if processes.index() == 0:
            dataset(data, train.context)
    if train.epochs is None:
        return config
    with processes.together():
        records = len(Records(dataset(data, train.context), "train"))
    steps = -(-records * train.epochs // train.batch)
    return config.model_copy(update={"train": train.model_copy(update={"steps": steps})})


def loader_of(config: RunConfig, rows: range) -> Loader:
    """The batches of a run, of which this process reads `rows`.

    Raises `LrkvError` where the tokenizer, or a chat's frame, has ids that the model does not have.
    """
    train = config.train
    _check_vocabulary(config)
    return make_loader(config.data, train.context, train.batch, rows=rows, epochs=train.epochs)


def _check_vocabulary(config: RunConfig) -> None:
    tokenizer = load_tokenizer(config.data.tokenizer)
    have, need = config.model.vocabulary, tokenizer.vocabulary
    if have < need:
        raise LrkvError(
            f"model.vocabulary = {have} is smaller than tokenizer {config.data.tokenizer}'s "
            f"{need}: set model.vocabulary={need}"
        )
    if config.data.mixture is not None:
        ChatFormat(tokenizer).check(have)
