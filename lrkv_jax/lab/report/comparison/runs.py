"""The records of finished runs, and which of them may be compared with which."""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from lrkv_jax.config import RunConfig
from lrkv_jax.config.attention import VARIANTS
from lrkv_jax.config.differences import SEEDS, settings_of
from lrkv_jax.config.old_names import ROLES
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.accounting.counts import (
    cache_allocated_bytes_per_token,
    training_tokens,
    with_mha,
)

# The package's variants, in the order in which tables and legends have them; others follow.
KINDS = tuple(VARIANTS)

# What compared runs may differ in, in addition to schedule and placement. Their lengths are
# compared in tokens, and runs that start from others start from different ones.
_FREE = ("attention", "model.attention", *SEEDS, "train.steps", "train.epochs",
         "init_from", "init_step")  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A run's validations, all of the same held-out text, in the order of training.

    `steps`, `tokens` and `flops` (the published count) are of training up to each; `cross_entropy`
    in nats per token, `bits_per_byte`; `heldout_tokens` that each was measured on.
    """

    steps: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    cross_entropy: np.ndarray
    bits_per_byte: np.ndarray
    heldout_tokens: int


@dataclass(frozen=True)
class RunRecord:
    """The files of one run: its configuration, `metrics.jsonl`, `history.jsonl`, and two results.

    `evaluation.json` and `analysis.json` are None where the run has none. `path` is its directory,
    or its name in an archive (`lrkv_jax.lab.report.comparison.files`).
    """

    path: Path
    config: RunConfig
    rows: tuple[dict[str, Any], ...]
    evaluation: dict[str, Any] | None
    analysis: dict[str, Any] | None
    history: tuple[dict[str, Any], ...] = ()

    @property
    def scale(self) -> str:
        """The name in its configuration, as in 128m."""
        return self.config.name

    @property
    def variant(self) -> str:
        """The chosen name of its `variants`, as in lrkv or lrkv_r8."""
        return self.config.attention

    @property
    def kind(self) -> str:
        """The kind of its variant, as in lrkv."""
        return self.config.model.attention.name

    @property
    def mode(self) -> str | None:
        """The RoPE mode of the run, if its variant has modes."""
        return self.config.model.attention.mode

    @property
    def size(self) -> int | None:
        """The size of its variant: key/value heads, latent width or residual rank."""
        return self.config.model.attention.size

    @property
    def label(self) -> str:
        """Kind and size as the paper writes them, as in MHA, MLA-128, LRKV-8."""
        return self.config.model.attention.label

    @property
    def form(self) -> str:
        """The label without the size, as in LRKV rope latent."""
        return f"{self.kind.upper()} {self.config.model.attention.form}".strip()

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def midtrained(self) -> bool:
        """Whether the run learned conversations: its losses are of those, not of text."""
        return self.config.data.mixture is not None

    @property
    def cache_allocated_fraction(self) -> float:
        """Bytes of the allocated bfloat16 cache over MHA's, padding included."""
        model = self.config.model
        mha = cache_allocated_bytes_per_token(with_mha(model))
        return cache_allocated_bytes_per_token(model) / mha

    @property
    def steps_done(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def tokens_per_second(self) -> float | None:
        """The median over its steps."""
        speeds = [row["tokens_per_second"] for row in self.rows if row.get("tokens_per_second")]
        return statistics.median(speeds) if speeds else None

    @property
    def diverged(self) -> bool:
        """Whether the guard ended it."""
        last = self.rows[-1] if self.rows else {}
        return last.get("skipped_in_a_row", 0) >= self.config.guard.stop_after

    @property
    def final_evaluation(self) -> dict[str, Any]:
        """Its evaluation, if that is of its last step and of the model as it was trained."""
        found = self.evaluation or {}
        last = found.get("step", self.steps_done) == self.steps_done
        return found if last and not found.get("changed_settings") else {}

    @property
    def finished(self) -> bool:
        done = self.steps_done >= self.config.train.total_steps
        return done and bool(self.rows) and "validation_loss" in self.rows[-1]

    @property
    def cross_entropy(self) -> float | None:
        """Nats per token over the whole held-out split, at the end; None until it is reached."""
        return self.rows[-1].get("validation_loss") if self.finished else None

    @property
    def bits_per_byte(self) -> float | None:
        """`cross_entropy` in bits per UTF-8 byte."""
        return self.rows[-1].get("validation_bpb") if self.finished else None

    @cached_property
    def curve(self) -> Curve | None:
        """The run's validations; None where there were none.

        A run validates on `train.validation_batches` until its end, which is measured on the whole
        split and, as `val_*_subset`, on those batches: losses of different text. The curve is of
        the text that the end was measured on if others were too, else of what most were, whose last
        loss is then the end's `val_*_subset`; archived runs may lack it.
        """
        measured = [row for row in self.rows if row.get("validation_loss") is not None]
        if not measured:
            return None
        counts = Counter(row["validation_tokens"] for row in measured)
        tokens = measured[-1]["validation_tokens"]
        if counts[tokens] == 1:
            tokens = counts.most_common(1)[0][0]
        same = [
            row if row["validation_tokens"] == tokens else _on_subset(row)
            for row in measured
            if row["validation_tokens"] == tokens or row.get("val_loss_subset") is not None
        ]
        names = ("step", "tokens", "flops", "validation_loss", "validation_bpb")
        steps, seen, flops, cross_entropy, bits = (
            np.asarray([row[name] for row in same], np.float64) for name in names
        )
        return Curve(steps, seen, flops, cross_entropy, bits, heldout_tokens=tokens)

    @property
    def changed(self) -> list[str]:
        """The settings that were changed between its steps, and change what it learns."""
        keys = [
            row["key"] for row in self.history
            if row["event"] == "change"
            and ROLES.get(row["role"], row["role"]) in ("semantics", "data")
        ]  # fmt: skip
        # At a constant rate, and decay, a run that became longer is the one that was long from the
        # start.
        optimizer = self.config.optimizer
        constant = optimizer.schedule == "constant" and not optimizer.cautious_decay
        same = "train.steps" if constant else None
        return [key for key in dict.fromkeys(keys) if key != same]

    @cached_property
    def comparable(self) -> dict[str, Any]:
        """Equal for runs that differ in variant, seed and machine alone."""
        settings = settings_of(self.config, ("semantics", "data"))
        same = {
            "tokens": training_tokens(self.config),
            **{key: value for key, (_, value) in settings.items() if key not in _FREE},
            "midtrained from": bool(self.config.init_from),
            "changed while training": ", ".join(self.changed) or "no",
        }
        return json.loads(json.dumps(same, default=lambda group: group.model_dump(mode="json")))


@dataclass(frozen=True)
class Setting:
    """Runs that differ in variant and seed alone, under a name: they may be compared."""

    name: str
    runs: tuple[RunRecord, ...]

    def seeds(self, label: str) -> dict[int, RunRecord]:
        """A label's runs by seed."""
        return {run.seed: run for run in self.runs if run.label == label}

    @property
    def labels(self) -> list[str]:
        """The setting's labels, in the order of their kinds and then by size."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def kinds(self) -> list[str]:
        """The setting's kinds, in table order."""
        return list(dict.fromkeys(run.kind for run in self.runs))

    def main(self, kind: str) -> dict[int, RunRecord]:
        """The runs by seed that represent a kind, of those in `beside`; {} without one."""
        runs = [run for seeds in self.beside.values() for run in seeds.values() if run.kind == kind]
        return self.seeds(max(runs, key=_standing).label) if runs else {}

    @property
    def beside(self) -> dict[str, dict[int, RunRecord]]:
        """The variants that are compared with one another: {label: runs by seed}.

        They are one size of each form of a kind: the only one, or that of the variant named as the
        kind, or else by its mode (`lrkv_latent`). Other sizes are an ablation's.
        """
        found: dict[str, RunRecord] = {}
        sizes = Counter(form for form, _ in {(run.form, run.label) for run in self.runs})
        for run in self.runs:
            if sizes[run.form] == 1 or _standing(run):
                found[run.form] = max(found.get(run.form, run), run, key=_standing)
        return {run.label: self.seeds(run.label) for run in found.values()}


def _on_subset(row: dict[str, Any]) -> dict[str, Any]:
    """A last row with its losses on the batches that the validations before it had."""
    return row | {
        "validation_loss": row["val_loss_subset"],
        "validation_bpb": row["val_bpb_subset"],
    }


def steps_saved(curve: Curve, baseline: Curve) -> float | None:
    """1 − step*/step_final: the share of the baseline's steps that were not needed.

    At step* the run's validation curve first comes down to the baseline's final loss. The curve is
    linear between validations, and counts as reached where it first touches the loss, whether it
    rises again or not. A run that is there at its first validation is given that step: it may have
    been there before. Negative where it took longer than the baseline did. None where it never got
    there, and for curves of different held-out text, which are not compared.
    """
    target = baseline.cross_entropy[-1]
    reached = np.flatnonzero(curve.cross_entropy <= target)
    if curve.heldout_tokens != baseline.heldout_tokens or not len(reached):
        return None
    first = int(reached[0])
    step = curve.steps[first]
    if first:
        above, below = curve.cross_entropy[first - 1 : first + 1]
        share = (above - target) / (above - below)  # of the way from the validation before
        step = curve.steps[first - 1] + share * (step - curve.steps[first - 1])
    return float(1 - step / baseline.steps[-1])


def steps_saved_by_seed(
    curves: Mapping[int, Curve], baselines: Mapping[int, Curve]
) -> dict[int, float | None]:
    """Each seed's curve against the baseline's of the same seed, of the seeds that both have.

    A mean over those that got there would leave out the worst ones: there is none with a None.
    """
    shared = sorted(curves.keys() & baselines.keys())
    return {seed: steps_saved(curves[seed], baselines[seed]) for seed in shared}


def finished(runs: Mapping[int, RunRecord]) -> dict[int, RunRecord]:
    """The runs, by seed, that reached their end."""
    return {seed: run for seed, run in runs.items() if run.finished}


def settings(runs: Sequence[RunRecord], *, midtrained: bool = False) -> list[Setting]:
    """Runs by what they may be compared with, smallest model first.

    A setting is named as its shortest scale; where two share that, with the first thing
    that they differ in. The same run twice counts once. Runs of conversations and runs
    of text are never mixed: `midtrained` chooses between them, and the name shows it.

    Raises `LrkvError` for two runs of one label and seed that are not the same.
    """
    what = ", midtrained" if midtrained else ""
    found = []
    for name, members in alike([run for run in runs if run.midtrained == midtrained]):
        once: dict[tuple, RunRecord] = {}
        for run in members:
            # An attempt that has not ended hides none that has; an ablation may name again what
            # has a name already, which comes first.
            key = run.label, run.seed
            check_not_mixed(run, other := once.get(key, run))
            once[key] = max(other, run, key=lambda one: (one.finished, _standing(one)))
        found.append(Setting(name + what, tuple(once.values())))
    return found


def check_not_mixed(run: RunRecord, other: RunRecord) -> None:
    """Raise `LrkvError` where runs of one label and seed have another variant or order of data."""
    for what in ("model.attention", "data.shuffle_seed"):
        if attrgetter(what)(run.config) != attrgetter(what)(other.config):
            raise LrkvError(
                f"{run.path} and {other.path} are both {run.label} of seed {run.seed}, and differ "
                f"in {what}: compare them apart, in two commands"
            )


def alike(runs: Sequence[RunRecord], free: Sequence[str] = ()) -> list[tuple[str, list[RunRecord]]]:
    """(name, runs) of those that differ in variant, seed, machine and the `free` settings alone."""
    groups: dict[str, tuple[dict[str, Any], list[RunRecord]]] = {}
    for run in runs:
        same = {key: value for key, value in run.comparable.items() if key not in free}
        groups.setdefault(json.dumps(same), (same, []))[1].append(run)
    named = []
    for text, (same, own) in groups.items():
        members = sorted(own, key=lambda run: (order(run), run.seed))
        name = min((run.scale for run in members), key=len)
        named.append((members[0].config.model.width, name, text, same, members))
    named.sort(key=lambda one: one[:3])
    return [
        (name + _apart(same, [other for _, n, _, other, _ in named if n == name]), members)
        for _, name, _, same, members in named
    ]


def every_setting(runs: Sequence[RunRecord]) -> list[Setting]:
    """Settings of runs of text, and then those of runs of conversations."""
    return [*settings(runs), *settings(runs, midtrained=True)]


def _apart(own: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """The difference of a setting from the others, as ", optimizer.beta1 0.8"; "" for one alone."""
    differing = [key for key in own if any(other.get(key) != own[key] for other in others)]
    words, same = "", others
    for key in differing:
        fewer = [other for other in same if other.get(key) == own[key]]
        if len(fewer) < len(same):
            value = f"{own[key]:,}" if isinstance(own[key], int) else own[key]
            words, same = f"{words}, {key} {value}", fewer
    return words


def _standing(run: RunRecord) -> int:
    """2 of the variant named as its kind, 1 of one named by its mode, 0 of others."""
    return 2 * (run.variant == run.kind) or int(run.variant == f"{run.kind}_{run.mode}")


def order(run: RunRecord) -> tuple:
    """The sort key of tables: the package's kinds, then others by name; then by size."""
    place = KINDS.index(run.kind) if run.kind in KINDS else len(KINDS)
    return place, run.kind, run.size or 0, run.label
