"""The differences of two configurations, by the roles of their settings (`config.frozen`)."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lrkv_jax.config.frozen import Role, walk
from lrkv_jax.config.schema import RunConfig
from lrkv_jax.errors import LrkvError, nearest

# What one seed decides: the parameters a run starts with, its samples, and the order of its data.
# Runs of one seed and different variants see the same batches, so they can be compared in pairs.
SEEDS = ("train.seed", "data.shuffle_seed")


@dataclass(frozen=True)
class Change:
    """A setting that has another value, or data that have another content."""

    key: str
    role: Role
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} there, {self.new} asked for"


def settings_of(run: RunConfig, roles: Collection[Role]) -> dict[str, tuple[Role, Any]]:
    """Role and value of each setting of these roles, by its dotted key.

    A length in steps or tokens is `train.steps`, which is None where epochs are not counted yet.
    """
    found = {key: (role, value) for key, role, value in walk(run) if role in roles}
    if "semantics" in roles:
        del found["train.tokens"]
        uncounted = run.train.steps is None and run.train.tokens is None
        found["train.steps"] = "semantics", None if uncounted else run.train.total_steps
    return found


def differences(
    old: RunConfig, new: RunConfig, roles: Collection[Role] = ("semantics", "data")
) -> list[Change]:
    """The settings of these roles that changed, in the order of the configuration.

    A dtype of `auto`, the steps of epochs that are not counted yet, and a teacher's step and model
    that are not read yet, equal what a start made of them. Elsewhere `auto` is a value.
    """
    teacher = old.train.teacher == new.train.teacher
    teacher &= any(run.train.teacher_model is None for run in (old, new))
    before, now = settings_of(old, roles), settings_of(new, roles)
    changes = []
    for key, (role, _) in (now | before).items():
        values = [run[key][1] if key in run else None for run in (before, now)]
        dtype, steps = key.endswith(".dtype"), key == "train.steps"
        unresolved = (dtype and "auto" in values) or (steps and None in values)
        unresolved |= teacher and key.startswith("train.teacher_model")
        unresolved |= teacher and key == "train.teacher_step" and None in values
        if values[0] != values[1] and not unresolved:
            changes.append(Change(key, role, *values))
    return changes


def covers(keys: Collection[str], key: str) -> bool:
    """Whether one of the keys is this one, or a group that it is in."""
    return any(f"{key}.".startswith(f"{one}.") for one in keys)


def check_keys(run: RunConfig, keys: Collection[str]) -> None:
    """Raise `LrkvError` for a key that is no setting that changes results, nor a group of them."""
    known = settings_of(run, ("semantics", "data"))
    for key in keys:
        if not any(covers([key], one) for one in known):
            raise LrkvError(
                f"--allow-change {key}: no setting that changes results{nearest(key, known)}"
            )
