"""A run's directory: config.yaml, metrics.jsonl, events/, checkpoints/, samples/."""

from __future__ import annotations

from pathlib import Path

from lrkv_jax.config import RunConfig, dump_config, load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.nn.dtype import resolve_dtype
from lrkv_jax.runtime import processes

# Where records are kept, how layers are unrolled and which kernels compute them.
NOT_LEARNT = (
    "directory", "workers", "keep_streams", "hub", "licence",
    "unroll", "train_kernel", "decode_kernel",
)  # fmt: skip
# When a run looks up from its work, and in how large pieces it computes.
RHYTHM = (
    "log_every", "validate_every", "validation_batches", "save_every", "keep", "sample_every",
    "sample_prompts", "sample_tokens", "loss_chunk", "remat",
)  # fmt: skip
_SHAPING = ("context", "document_mask", "document_positions")  # what makes rows of text


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with `auto` dtypes replaced by what this platform makes of them."""
    muon = config.optimizer.muon
    muon = muon.model_copy(update={"dtype": resolve_dtype(muon.dtype).name})
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"dtype": resolve_dtype(config.model.dtype).name}
            ),
            "optimizer": config.optimizer.model_copy(update={"muon": muon}),
        }
    )


def open_run(config: RunConfig) -> Path:
    """Make the run's directory, or accept one that the same run left.

    Writes the resolved configuration. Raises `LrkvError`, and writes nothing, if the directory
    belongs to another model or other data, or is not a run's; of several processes, if one does
    not see what process 0 has written.
    """
    directory = Path(config.directory)
    with processes.together():
        if processes.index() == 0:
            _claim(directory, config)
    blind = processes.that_do_not_see(directory)
    with processes.together():
        if blind and processes.index() == 0:
            raise LrkvError(
                f"{blind[0]} does not see {directory}, where process 0 writes: set run_dir=PATH on "
                "a file system that all hosts share"
            )
    return directory


def _claim(directory: Path, config: RunConfig) -> None:
    saved = directory / "config.yaml"
    if saved.is_file():
        _refuse_another(directory, config)
    elif directory.exists() and any(directory.iterdir()):
        raise LrkvError(f"{directory} exists and is not a run: give another run_dir=PATH")
    directory.mkdir(parents=True, exist_ok=True)
    fresh = saved.with_suffix(".tmp")
    fresh.write_text(dump_config(config))
    fresh.replace(saved)


def _refuse_another(directory: Path, config: RunConfig) -> None:
    change = _first_change(load_config(directory / "config.yaml"), config)
    if change:
        raise LrkvError(
            f"{directory} holds another run ({change}): give this one its own run_dir=PATH"
        )


def find_run(config: RunConfig) -> Path:
    """The directory of a run that is there already; writes nothing.

    Raises `LrkvError` if there is none, or it is another's.
    """
    directory = Path(config.directory)
    _saved_config(directory)
    _refuse_another(directory, config)
    return directory


def read_run(directory: str | Path) -> RunConfig:
    """The configuration that a run was trained with; raises `LrkvError` if there is no run."""
    saved = _saved_config(directory)
    return load_config(saved).model_copy(update={"run_dir": str(directory)})


def _saved_config(directory: str | Path) -> Path:
    """The file that makes a directory a run's; raises `LrkvError` if there is none."""
    saved = Path(directory) / "config.yaml"
    if not saved.is_file():
        raise LrkvError(f"{directory} is not a run: it has no config.yaml")
    return saved


def _first_change(before: RunConfig, now: RunConfig) -> str | None:
    """The first setting that makes it another run, as "key: old there, new asked for"."""
    pairs = [
        ("model", before.model.model_dump(), now.model.model_dump()),
        ("data", before.data.model_dump(), now.data.model_dump()),
        ("train", *({k: getattr(run.train, k) for k in _SHAPING} for run in (before, now))),
    ]
    for prefix, old, new in pairs:
        for key in {**old, **new}:
            if key not in NOT_LEARNT and old.get(key) != new.get(key):
                return f"{prefix}.{key}: {old.get(key)} there, {new.get(key)} asked for"
    return None
