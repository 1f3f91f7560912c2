"""Overrides that shrink the quickstart run to seconds."""

TINY = (
    "model.layers=2", "model.width=32", "model.heads=4", "model.head_width=8", "model.unroll=1",
    "variants.mla.latent=12", "variants.mla.rope_width=4", "variants.lrkv.rank=3",
    "train.context=32", "train.batch=8", "train.steps=6", "train.validation_batches=2",
    "train.validate_every=0", "train.save_every=0", "train.sample_tokens=8",
)  # fmt: skip
