"""The runs of each part and what is asked of them, named before any of a part was made.

`factorial`: LRKV of rank K spans MHA's functions and kept the whole of LRKV's gain in short runs
(docs/results.md), so the gain is in how a factored projection trains. Two things are added to MHA
there, a shared path and factors; the factorial has each alone, both and neither, Muon's matrix
being a head's in all four.

`size`: does it hold in a model of 6.8M parameters? `length`: and on four times the tokens? Of the
factorial's ways MHA has the shared path there: of five seeds, it had the lowest loss of those with
a matrix for each head. At a quarter of a run LRKV was ahead of MHA, at its end it was not.

`hybrids`: three layers of four see 128 positions of 1,024, and the fourth all. Does LRKV's gain
stay when one layer in four has it, and what does its key lose without rotations?

`controls`: does what is between MHA and LRKV survive what trainers do today? Behind a + in a
variant's name stands an arm: weight decay that is cautious, AdamW's rates tuned in place of Muon's,
or the mean of the weights of a run's last tenth, which needs no further run. Embeddings that are
added to values are no arm: layers here see hidden states, not tokens.

Value of a run: bits per byte of `test`, the mean over its kinds of text (`bits_per_byte`). Seeds
are blocks, and one model of variant and seed takes all variants
(`lrkv_jax.lab.report.comparison`). With a standard deviation of 0.0020 over seeds within a pair,
six seeds find 0.005 with probability 0.92, five with 0.83. It was 0.0087 in the factorial: three
seeds find 0.024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log

# Each variant is trained at these rates, a quarter of its steps, two seeds that no later run has.
# The lowest mean over `tune` is its own rate. Where that is the first or the last, the next of the
# same ratio is tried too, until it is neither.
RATES = (0.01, 0.014, 0.02)
RATE_SEEDS = (100, 101)


@dataclass(frozen=True)
class Part:
    """Runs that are compared with one another.

    config: a file beside this one. text: a folder that `text.py` made. runs: a file of results.
    contrasts: weights of the variants' means; a negative value says that what stands first has the
    lower loss. equal_within: margins of two one-sided tests of some of them. averaged: variants
    whose runs are kept once more with the mean of their last weights.
    """

    config: str
    text: str
    runs: str
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    contrasts: Mapping[str, Mapping[str, float]]
    equal_within: Mapping[str, float] = field(default_factory=dict)
    averaged: tuple[str, ...] = ()
    steps: int = 1953

    @property
    def names(self) -> tuple[str, ...]:
        """The names of runs in the file: the variants, and those with averaged weights."""
        return (*self.variants, *(f"{name}+average" for name in self.averaged))

    @property
    def rate_steps(self) -> int:
        """Steps of the runs that find a variant's rate."""
        return self.steps // 4


FACTORIAL = Part(
    config="mechanism.yaml", text="text", runs="runs.jsonl", seeds=(0, 1, 2, 3, 4, 5),
    variants=(
        "mha", "per_head", "shared", "factored", "both", "doubled", "lrkv_full", "lrkv_latent",
        "mqa",
    ),
    contrasts={
        "shared path": {"shared": 0.5, "both": 0.5, "per_head": -0.5, "factored": -0.5},
        "factoring": {"factored": 0.5, "both": 0.5, "per_head": -0.5, "shared": -0.5},
        "interaction": {"both": 1, "per_head": 1, "shared": -1, "factored": -1},
        "both - per head": {"both": 1, "per_head": -1},
        "LRKV-8 full - both": {"lrkv_full": 1, "both": -1},
        "per head - MHA": {"per_head": 1, "mha": -1},
        "rate doubled - per head": {"doubled": 1, "per_head": -1},
        "LRKV-8 latent - LRKV-8 full": {"lrkv_latent": 1, "lrkv_full": -1},
        # |latent - full| - |full - MHA|, if both are the improvements that earlier runs found.
        "rotation - factorisation": {"lrkv_full": 2, "lrkv_latent": -1, "mha": -1},
    },
    equal_within={"LRKV-8 full - both": 0.003},  # does a rank of K / 4 lose nothing?
)  # fmt: skip
OVER_MHA = {
    "shared path - MHA": {"shared": 1, "mha": -1},
    "LRKV full - MHA": {"lrkv_full": 1, "mha": -1},
    "LRKV latent - MHA": {"lrkv_latent": 1, "mha": -1},
}
SIZE = Part(
    config="size.yaml", text="text", runs="size.jsonl", seeds=(0, 1, 2),
    variants=("mha", "shared", "lrkv_full", "lrkv_latent"), contrasts=OVER_MHA,
)  # fmt: skip
LENGTH = Part(
    config="mechanism.yaml", text="text", runs="length.jsonl", seeds=(0, 1, 2),
    variants=("mha", "shared", "lrkv_full", "lrkv_latent"), contrasts=OVER_MHA, steps=7812,
)  # fmt: skip
HYBRIDS = Part(
    config="hybrids.yaml", text="long", runs="hybrids.jsonl", seeds=(0, 1, 2, 3, 4),
    variants=("mha", "lrkv_full", "lrkv_latent", "lrkv_none", "mla_full"),
    contrasts={
        "LRKV-8 full - MHA": {"lrkv_full": 1, "mha": -1},
        "LRKV-8 latent - MHA": {"lrkv_latent": 1, "mha": -1},
        "LRKV-8 none - MHA": {"lrkv_none": 1, "mha": -1},
        "MLA-32 full - MHA": {"mla_full": 1, "mha": -1},
        "LRKV-8 none - LRKV-8 full": {"lrkv_none": 1, "lrkv_full": -1},
    },
    equal_within={"LRKV-8 none - LRKV-8 full": 0.003},  # are rotations worth nothing there?
)  # fmt: skip
ARMS = {"cautious": "cautious decay", "adamw": "AdamW's rates tuned", "average": "averaged"}
CONTROLS = Part(
    config="mechanism.yaml", text="text", runs="controls.jsonl", seeds=(0, 1, 2, 3),
    variants=(
        "mha", "lrkv_latent", "mha+cautious", "lrkv_latent+cautious", "mha+adamw",
        "lrkv_latent+adamw",
    ),
    averaged=("mha", "lrkv_latent"),
    contrasts={
        "LRKV latent - MHA": {"lrkv_latent": 1, "mha": -1},
        **{
            f"LRKV latent - MHA, both {said}": {f"lrkv_latent+{arm}": 1, f"mha+{arm}": -1}
            for arm, said in ARMS.items()
        },
        **{
            f"{said} - neither, of both": {
                f"lrkv_latent+{arm}": 0.5, f"mha+{arm}": 0.5, "lrkv_latent": -0.5, "mha": -0.5,
            }
            for arm, said in ARMS.items()
        },
    },
)  # fmt: skip
PARTS = {
    "factorial": FACTORIAL, "size": SIZE, "hybrids": HYBRIDS, "length": LENGTH,
    "controls": CONTROLS,
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A run: what it is named by, and the split that it is judged by."""

    variant: str
    rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.rate:g}-{self.steps}-seed{self.seed}"


def settings(part: Part, run: Planned) -> dict[str, object]:
    """What a run changes in its part's file. A run's rate is Muon's, or of `adamw` the head's."""
    attention, _, arm = run.variant.partition("+")
    found = {
        "attention": attention, "optimizer.matrix_lr": run.rate, "train.steps": run.steps,
        "train.seed": run.seed, "data.shuffle_seed": run.seed,
    }  # fmt: skip
    if part.averaged:  # for the mean over the last tenth: steps 1775 to 1950, and the last
        found |= {"train.save_every": 25, "train.max_checkpoints": 9}
    if arm == "cautious":  # by as much as the paper's configurations decay
        found |= {
            "optimizer.matrix_decay": 0.1, "optimizer.head_decay": 0.1,
            "optimizer.cautious_decay": "true",
        }  # fmt: skip
    elif arm == "adamw":  # Muon's is both variants' own; the embedding's stays 37.5 of the head's
        found |= {
            "optimizer.matrix_lr": 0.01, "optimizer.head_lr": run.rate,
            "optimizer.embedding_lr": 37.5 * run.rate,
        }  # fmt: skip
    return found


def bits_per_byte(documents: Mapping[str, Sequence[Sequence[float]]]) -> float:
    """The mean over kinds of a kind's bits per byte; a document is (nats, tokens, bytes)."""
    kinds = []
    for rows in documents.values():
        kinds.append(sum(row[0] for row in rows) / (log(2) * sum(row[2] for row in rows)))
    return sum(kinds) / len(kinds)


def planned(part: Part, tuned: Mapping[tuple[str, float, int], float]) -> list[Planned]:
    """The runs that the design asks for next, in their order, from `tune`'s losses so far.

    `tuned` is {(variant, rate, seed): bits per byte} of the runs of `rate_steps`. First come all
    rates; when a variant's own rate is known, its runs follow, a seed of all variants at a time.
    """
    rates, chosen = [], {}
    for variant in part.variants:
        tried = list(RATES)
        while True:
            runs = [
                Planned(variant, rate, seed, part.rate_steps)
                for rate in tried
                for seed in RATE_SEEDS
            ]
            found = {
                rate: [tuned.get((variant, rate, seed)) for seed in RATE_SEEDS] for rate in tried
            }
            if any(None in losses for losses in found.values()):
                break
            best = min(tried, key=lambda rate: sum(found[rate]))
            if best not in (tried[0], tried[-1]):
                chosen[variant] = best
                break
            tried = _wider(tried, best)
        rates += runs
    if len(chosen) < len(part.variants):
        return rates
    return rates + [
        Planned(variant, chosen[variant], seed, part.steps)
        for seed in part.seeds
        for variant in part.variants
    ]


def _wider(tried, best):
    """The rates with one more beside `best`, an end of them: a factor of √2 from it."""
    if best == tried[0]:
        return [_rounded(best / 2**0.5), *tried]
    return [*tried, _rounded(best * 2**0.5)]


def _rounded(rate):
    return float(f"{rate:.2g}")
