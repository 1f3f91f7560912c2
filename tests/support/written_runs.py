"""Run directories written by hand: what `lrkv train` and `lrkv evaluate` leave, without a run."""

import json
from pathlib import Path

from lrkv_jax.config import dump_config, load_config
from lrkv_jax.models.accounting.counts import (
    cache_allocated_bytes_per_token,
    training_flops_per_token,
)
from lrkv_jax.models.attention import LRKV

BYTES_PER_TOKEN = 4.0
NATS = 0.6931471805599453


def write_run(
    folder: Path,
    *overrides: str,
    scale: str = "quickstart",
    rank: int | None = None,
    steps: int | None = 40,
    every: int = 10,
    loss=lambda share: 6.0 - 2.0 * share,
    heldout: tuple[int, int] = (1000, 1000),
    until: int | None = None,
    evaluation: dict | None = None,
) -> Path:
    """A run of `steps` whose validation loss is `loss(share of the steps)`, every `every` of them.

    `heldout` is of how many tokens the validations before the end and the last one are; `until`
    ends the log early; `evaluation` is added to what `evaluation.json` says of the cache. `rank`
    makes it a variant of an ablation, lrkv_r8; `steps=None` keeps the scale's length, in 40 rows.
    """
    config = load_config(scale, [*([f"train.steps={steps}"] if steps else []), *overrides])
    if rank is not None:
        variants = {**config.variants, f"lrkv_r{rank}": LRKV(rank=rank, rope="full")}
        config = config.model_copy(update={"variants": variants}).variant(f"lrkv_r{rank}")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    per_step = config.train.global_batch_size * config.train.seq_len
    per_token = training_flops_per_token(config.model, config.train.seq_len)
    total = config.train.total_steps
    rows = []
    points = steps or 40
    for share in range(1, points + 1):
        step = share * total // points
        tokens = step * per_step
        row = {"step": step, "loss": 5.0, "tokens": tokens, "flops": tokens * per_token}
        if share % every == 0 or step == total:
            nats = loss(step / total)
            row |= {"validation_loss": nats, "validation_bpb": nats / NATS / BYTES_PER_TOKEN,
                    "validation_tokens": heldout[step == total]}  # fmt: skip
        rows.append(row)
    rows = rows[: until and until]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if evaluation is not None:
        about = {"kv_cache_bytes_per_token": cache_allocated_bytes_per_token(config.model, 4),
                 "kv_cache_dtype": "float32"}  # fmt: skip
        (folder / "evaluation.json").write_text(json.dumps(about | evaluation))
    return folder


def write_sweep(folder: Path, seeds=(0, 1, 2)) -> Path:
    """The paper's five variants and two more ranks, of the quickstart, each with these seeds."""
    better = {"mha": 0.0, "gqa": 0.03, "mqa": 0.06, "mla": 0.001, "lrkv": -0.05}
    variants = {name: (name, None) for name in better}
    variants |= {f"lrkv_r{r}": ("lrkv", r) for r in (2, 4)}
    for number, (name, (kind, rank)) in enumerate(variants.items()):
        for seed in seeds:
            off = better.get(name, 0.0) + 0.002 * ((7 * seed + 3 * number) % 5 - 2)
            write_run(
                folder / f"{name}-seed{seed}",
                f"attention={kind}", f"train.seed={seed}", f"data.shuffle_seed={seed}", rank=rank,
                loss=lambda share, off=off: 6.0 - 2.0 * share + off, evaluation={},
            )  # fmt: skip
    return folder
