"""Plans that were timed on this kind of device, in place of those that `plan` computes.

A table is a JSON file: the kind of device, the version of JAX and the fingerprint of the kernels'
sources that it was measured with, and the fastest plan of each family of shapes. It is read from
the file that LRKV_TUNED_PLANS names, or else from `tuned/` beside this module. A table of another
device, version or source is ignored, and so is a plan that does not fit; both are logged. Of a
run's processes the first one reads, and the others take what it read: all must compile the same
program. A tuned plan is checked on the device like any other before it decodes
(`lrkv_jax.kernels.proof`).
"""

import contextlib
import functools
import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

import jax

# The client has no public name (`lrkv_jax.kernels.proof` takes it from here too).
from jax._src import distributed

from lrkv_jax.kernels.split_kv.plan import unfit

VARIABLE = "LRKV_TUNED_PLANS"
# What a table may choose. The rest of a plan is its family, or follows from these.
CHOSEN = ("warpgroups", "heads", "ring", "head_ring", "ctas", "workers")
# The first process may be building a dataset while another waits.
_PATIENCE_SECONDS = 24 * 3600

_log = logging.getLogger("lrkv_jax.kernels")
_choose = None


@contextlib.contextmanager
def trying(choose):
    """In this block kernels are traced with `choose(plan)`, whatever a table says."""
    global _choose
    before, _choose = _choose, choose
    try:
        yield
    finally:
        _choose = before


def family(plan):
    """The name of all plans that attend to the same shapes: what tuning leaves as it is."""
    norm = "shared" if plan.shared_norm else "own" if plan.norm_heads else "none"
    keys = "+".join(map(str, plan.key_widths)) + (" =values" if plan.values_in_keys else "")
    keys += " turned" if plan.turned else ""
    mode = "full" if plan.full else "associative"
    rank = f", rank {plan.rank} {mode}" if plan.rank else ""
    return (
        f"{plan.query_heads} heads, {plan.groups} groups, {plan.queries} queries, keys {keys}, "
        f"values {plan.value_width}{rank}, norm {norm}"
    )


def best(plan):
    """The table's plan of the same family, or the given one."""
    if _choose is not None:
        return _choose(plan)
    chosen = table().get(family(plan))
    return plan if chosen is None else _checked(plan, json.dumps(chosen, sort_keys=True))


def record(device):
    """What a table must have been measured with to hold for a device: its first fields."""
    from lrkv_jax.kernels.proof import sources

    return {"device": device, "jax": jax.__version__, "sources": sources()}


def chosen(plan):
    """What a table says of a plan."""
    return {name: value for name, value in asdict(plan).items() if name in CHOSEN}


def packaged(device):
    """The file of a kind of device that ships with the package, if it was ever measured."""
    return Path(__file__).parent / "tuned" / f"{device.replace(' ', '-').lower()}.json"


@functools.cache
def table():
    """The plans by family that hold for this process's device; empty where there is no table."""
    named, device = os.environ.get(VARIABLE), jax.local_devices()[0].device_kind
    path = Path(named) if named else packaged(device)
    text = _of_all_processes(lambda: _read(path) if named or path.exists() else "")
    if not text:
        return {}
    try:
        found = json.loads(text)
        here = record(device)
        other = [name for name, value in here.items() if found[name] != value]
        plans = dict(found["plans"])
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("the tuned plans in %s are ignored: %s", path, _one_line(error))
        return {}
    if other:
        theirs = ", ".join(f"{name} {found[name]}" for name in other)
        ours = ", ".join(f"{here[name]}" for name in other)
        _log.warning("the tuned plans in %s are ignored: %s, here %s", path, theirs, ours)
        return {}
    return plans


def with_choice(plan, choice):
    """The plan with what a table chose; raises ValueError where no multiprocessor can run it."""
    fields = {name: int(choice[name]) for name in CHOSEN}
    per_cta = fields["warpgroups"] * fields["heads"]
    heads = plan.query_heads
    if per_cta < 1 or heads // plan.groups % per_cta:
        raise ValueError(f"{per_cta} heads per CTA do not divide {heads // plan.groups}")
    norm = plan.norm_heads and (1 if plan.shared_norm else fields["heads"])
    other = replace(plan, units=heads // per_cta, norm_heads=norm, **fields)
    if reason := unfit(other):
        raise ValueError(reason)
    return other


@functools.cache  # logs each message once
def _checked(plan, text):
    try:
        return with_choice(plan, json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("the tuned plan for %s is ignored: %s", family(plan), _one_line(error))
        return plan


def _read(path):
    """The text of a table; empty, and said, where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        _log.warning("the tuned plans in %s are ignored: %s", path, _one_line(error))
        return ""


def _of_all_processes(read):
    """What the first process reads in each of the run's processes."""
    if jax.process_count() == 1:
        return read()
    client, place = distributed.global_state.client, "lrkv/kernels/tuned"
    if jax.process_index() == 0:
        text = read()
        client.key_value_set(place, json.dumps(text), allow_overwrite=True)
        return text
    return json.loads(client.blocking_key_value_get(place, _PATIENCE_SECONDS * 1000))


def _one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
