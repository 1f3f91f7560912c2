"""What promises cost: the guard in a step, checksums in a save, checks in a restore.

    python experiments/reliability_cost.py [--scale quickstart] [--out FILE.json] [KEY=VALUE ...]

Each pair is timed in turns within one run: the end of the training step with and without its guard
and its batch's fingerprint; a save by Orbax alone and as this package makes it; a restore likewise.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp

from lrkv_jax.config import load_config
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.training.checkpointing import Checkpointer, layout
from lrkv_jax.training.checkpointing.fingerprint import as_hex, fingerprint, fingerprints
from lrkv_jax.training.guard import check_step, select
from lrkv_jax.training.state import (
    abstract_state,
    checkpoint_items,
    init_state,
    optimizer_of,
    resolve,
)
from lrkv_jax.training.step import make_train_step


def in_turns(subjects: dict, samples: int) -> dict[str, list[float]]:
    """Seconds of each subject, `samples` times in turn; every first time is dropped."""
    times = {name: [] for name in subjects}
    for sample in range(samples + 1):
        order = list(subjects) if sample % 2 else list(reversed(subjects))
        for name in order:
            began = time.perf_counter()
            subjects[name]()
            times[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


def step_times(config, mesh, samples: int) -> list[float]:
    """Seconds of the training step as it is."""
    shape = config.train.batch, config.train.context + 1
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, shape, np.int32)
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
        step = make_train_step(config, mesh, np.ones(config.model.vocabulary, np.int32))

        def run():
            nonlocal state
            state, metrics = step(state, tokens)
            jax.block_until_ready(metrics)

        return in_turns({"step": run}, samples)["step"]


def update_times(config, mesh, samples: int) -> dict[str, list[float]]:
    """Of the step's end, with the guard and without: all of its work is there."""
    optimizer = optimizer_of(config)

    def program(guarded: bool):
        def update(params, opt_state, guard, step, grads, loss, norm, tokens):
            take, told = True, (loss, norm)
            if guarded:
                take, guard, height = check_step(config.guard, guard, step, loss, norm)
                told = height, fingerprint(tokens)
            updates, moments = optimizer.update(grads, opt_state, params)
            new = optax.apply_updates(params, updates), moments
            new = select(take, new, (params, opt_state)) if guarded else new
            return *new, guard, step + 1, told

        return jax.jit(update, donate_argnums=(0, 1))

    def subject(guarded: bool):
        state = init_state(config, mesh)
        grads = jax.tree.map(lambda x: 1e-3 * jax.random.normal(key, x.shape), state.params)
        rest = grads, jnp.float32(3), jnp.float32(1), tokens
        held = [state.params, state.opt_state, state.guard, state.step]
        compiled = program(guarded).lower(*held, *rest).compile()

        def run():
            nonlocal held
            *held, told = compiled(*held, *rest)
            jax.block_until_ready((held, told))

        return run

    key = jax.random.key(1)
    tokens = jnp.zeros((config.train.batch, config.train.context + 1), jnp.int32)
    with jax.set_mesh(mesh):
        return in_turns({"guarded": subject(True), "bare": subject(False)}, samples)


def difference(times: dict[str, list[float]]) -> dict[str, float]:
    """Median of guarded less bare, and its standard error from the quartiles."""
    less = [a - b for a, b in zip(times["guarded"], times["bare"], strict=True)]
    low, middle, high = statistics.quantiles(less, n=4)
    error = 1.25 * (high - low) / 1.349 / len(less) ** 0.5
    return {"bare": statistics.median(times["bare"]), "difference": middle, "error": error}


def save_times(config, mesh, samples: int) -> tuple[dict[str, list[float]], int]:
    """Of a state whose every array holds random bits: zeros would compress away."""
    key = jax.random.key(0)
    items = jax.tree.map(
        lambda x: jax.random.normal(key, x.shape, x.dtype) if x.dtype == jnp.float32 else x,
        checkpoint_items(init_state(config, mesh)),
    )
    abstract = checkpoint_items(abstract_state(config, mesh))
    about = {"config": config.model_dump(mode="json")}
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(items))
    blocked, folder = [], Path(tempfile.mkdtemp(prefix="lrkv-cost-"))

    def orbax():
        shutil.rmtree(folder / "orbax", ignore_errors=True)
        ocp.save_checkpointables_async(folder / "orbax", dict(items)).result()

    def ours():
        shutil.rmtree(folder / "ours", ignore_errors=True)
        with Checkpointer(folder / "ours") as checkpoints:
            began = time.perf_counter()
            checkpoints.save(1, items, about)
            blocked.append(time.perf_counter() - began)

    def orbax_restore():
        jax.block_until_ready(ocp.load_checkpointables(folder / "orbax", abstract))

    def ours_restore():
        with Checkpointer(folder / "ours") as checkpoints:
            jax.block_until_ready(checkpoints.restore(abstract)[1])

    try:
        orbax()
        files = layout.checksums(folder / "orbax")
        saves = {
            "save": ours,
            "save_orbax": orbax,
            "fingerprints": lambda: as_hex(fingerprints(items)),
            "seal": lambda: layout.checksums(folder / "orbax"),
            "manifest": lambda: layout.write_manifest(folder / "orbax", about | {"files": files}),
        }
        times = in_turns(saves, samples) | {"blocked": blocked[1:]}
        orbax()  # without a manifest
        times |= in_turns({"restore": ours_restore, "restore_orbax": orbax_restore}, samples)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return times, nbytes


def summary(times: dict[str, list[float]], one: str, other: str) -> dict[str, float]:
    """Medians, and the median of the ratios of neighbours in time with its quartiles."""
    ratios = [a / b for a, b in zip(times[one], times[other], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {name: statistics.median(times[name]) for name in (one, other)}
    return medians | {"ratio": middle, "ratio_quartiles": [low, high],
                      "ratio_of_minima": min(times[one]) / min(times[other])}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--scale", default="quickstart")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--saves", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = resolve(load_config(arguments.scale, arguments.overrides))
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    saves, nbytes = save_times(config, mesh, arguments.saves)
    report = {
        "device": jax.devices()[0].device_kind,
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "orbax-checkpoint")},
        "scale": arguments.scale,
        "attention": config.attention,
        "bytes": nbytes,
        "save": summary(saves, "save", "save_orbax"),
        "save_blocks": statistics.median(saves["blocked"]),
        "pieces": {n: statistics.median(saves[n]) for n in ("fingerprints", "seal", "manifest")},
        "restore": summary(saves, "restore", "restore_orbax"),
    }
    report["pieces_of_save"] = sum(report["pieces"].values()) / report["save"]["save_orbax"]
    if arguments.steps:
        report["step"] = statistics.median(step_times(config, mesh, arguments.steps))
        report["update"] = difference(update_times(config, mesh, 3 * arguments.steps))
        report["guard_of_step"] = report["update"]["difference"] / report["step"]
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
