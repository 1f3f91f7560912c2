"""Training throughput of the quickstart model beside the same model in PyTorch, on all cores.

    python experiments/compare_pytorch.py --pytorch-python torch/bin/python

The other side is `pytorch_quickstart.py`, a process of its own in the interpreter that the option
names: one with PyTorch and NumPy (python3.11 -m venv torch; torch/bin/pip install torch numpy).

First both take lrkv_jax's parameters, zeros filled in, and must agree on the loss and the gradient
norm of a batch, and on the losses of the steps that follow. Then they train in turn, a burst of
steps each, and only one computes at a time. A round's ratio is of two neighbouring bursts; measure
on an idle machine all the same, because PyTorch's threads wait for each other where other programs
hold a core, and lose more than ours.

`--keep-memory` starts both sides with the C library's allocator told to keep what is freed. By
default it gives arrays above 32 MB back to the system at once, and PyTorch's logits, of 33 MB, are
mapped anew at every use; ours never exist whole.

Writes torch_cpu.json (torch_cpu-keep-memory.json) into `--out FOLDER` (experiments/results), and
from both the table of docs/performance.md.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the comparison is of two CPU programs

import jax
import numpy as np

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock
from lrkv_jax.lab.bench.files import replace_between
from lrkv_jax.lab.bench.report import machine
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.training.state import init_state
from lrkv_jax.training.step import make_train_step

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BLOCK = "beside PyTorch"
# glibc's, read when a process starts: no array is mapped by itself, and the heap is never trimmed.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
SIDES = ("lrkv_jax", "pytorch")
VARIANTS = ("mha", "lrkv")  # that the other side has
BATCHES = 4  # that both sides cycle through
CHECKED_STEPS = 4
# Float32 sums of other orders differ by 1e-6 or so; an optimiser that is another one by far more.
SAME_STEP, SAME_TRAINING = 1e-4, 1e-3


class Ours:
    """lrkv_jax's side: the jitted step, its state and its batches."""

    def __init__(self, config: RunConfig, batches_NBU: np.ndarray):
        self.mesh = make_mesh(config.mesh)
        bytes_V = np.ones(config.model.vocabulary, np.int32)
        with jax.set_mesh(self.mesh):
            self.step = make_train_step(config, self.mesh, bytes_V)
            state = init_state(config, self.mesh)
        self.params = _without_zeros(state.params)
        self.state = replace(state, params=self.params)
        self.batches = itertools.cycle(batches_NBU)

    def steps(self, count: int) -> dict[str, Any]:
        """`count` steps; the clock runs from the first batch in NumPy to the last update."""
        rows, losses = batch_sharding(self.mesh), []
        with jax.set_mesh(self.mesh):
            start = time.perf_counter()
            for _ in range(count):
                tokens_BU = jax.device_put(next(self.batches), rows)
                self.state, metrics = self.step(self.state, tokens_BU)
                losses.append(metrics["loss"])
            jax.block_until_ready((self.state, losses))
            seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "loss": [float(loss) for loss in losses],
            "grad_norm": float(metrics["grad_norm"]),
        }


class Theirs:
    """PyTorch's side: a process that answers a line of JSON with one."""

    def __init__(self, python: str, threads: int, order: dict[str, Any]):
        script = Path(__file__).with_name("pytorch_quickstart.py")
        self.python = python
        self.process = subprocess.Popen(
            [python, str(script), str(threads)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.versions = self.ask(do="load", **order)

    def ask(self, **order) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = self.process.communicate()[1].strip().splitlines() or ["it said nothing"]
            raise LrkvError(f"--pytorch-python {self.python} stopped: {said[-1]}")
        return json.loads(answer)

    def steps(self, count: int) -> dict[str, Any]:
        return self.ask(do="steps", count=count)

    def close(self) -> None:
        self.process.communicate()


def check_interpreter(python: str) -> None:
    """Raise `LrkvError` unless `python` is one that has PyTorch and NumPy."""
    mend = "name a Python that has torch and numpy"
    try:
        command = [python, "-c", "import torch, numpy"]
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        said = error.strerror
        raise LrkvError(f"--pytorch-python {python} does not start ({said}): {mend}") from error
    if found.returncode:
        said = found.stderr.strip().rpartition("\n")[2]
        raise LrkvError(f"--pytorch-python {python} cannot be used ({said}): {mend}")


def compare(variant: str, python: str, rounds: int, burst: int) -> dict[str, Any]:
    """One variant: check that both sides are one function, then time them in turn."""
    # A constant rate: the schedule is not part of the comparison.
    changes = (f"attention={variant}", "optimizer.schedule=constant", "mesh.fsdp=1")
    config = load_config("quickstart", changes)
    train, threads = config.train, len(os.sched_getaffinity(0))
    shape = (BATCHES, train.batch, train.context + 1)
    batches_NBU = np.random.default_rng(0).integers(0, config.model.vocabulary, shape, np.int32)
    ours = Ours(config, batches_NBU)
    with tempfile.TemporaryDirectory() as folder:
        parameters, tokens = Path(folder) / "parameters.npz", Path(folder) / "tokens.npy"
        named = jax.tree.leaves_with_path(ours.params)
        name = partial(jax.tree_util.keystr, simple=True, separator=".")
        np.savez(parameters, **{name(path): np.asarray(leaf) for path, leaf in named})
        np.save(tokens, batches_NBU)
        theirs = Theirs(python, threads, _order(config, parameters, tokens))
        checked = _check(variant, ours, theirs)
        ours.steps(burst), theirs.steps(burst)
        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        for _ in range(rounds):
            for name, side in zip(SIDES, (ours, theirs), strict=True):
                seconds[name].append(side.steps(burst)["seconds"] / burst)
        theirs.close()
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return {
        "variant": variant,
        "tokens_per_step": train.batch * train.context,
        "threads": theirs.versions["threads"],
        "pytorch": theirs.versions["torch"],
        "checked": checked,
        "seconds_per_step": {name: _spread(times) for name, times in seconds.items()},
        "throughput_over_pytorch": _spread(ratios),
    }


def _order(config: RunConfig, parameters: Path, tokens: Path) -> dict[str, Any]:
    """What the other side needs to know, all of it from the same configuration."""
    model, optimizer = config.model, config.optimizer
    described = model.model_dump(mode="json")
    described |= {"feed_forward": model.feed_forward_width, "context": config.train.context}
    rule = optimizer.model_dump(mode="json", exclude={"muon"})
    rule |= {"momentum": optimizer.muon.momentum, "iterations": optimizer.muon.iterations}
    # As ours on a CPU; bfloat16 products take PyTorch longer there than float32 ones.
    rule["muon_dtype"] = "float32"
    return {
        "model": described, "optimizer": rule, "parameters": str(parameters),
        "tokens": str(tokens),
    }  # fmt: skip


def _check(variant: str, ours: Ours, theirs: Theirs) -> dict[str, float]:
    """Raise `LrkvError` unless both sides take the same first steps; return the differences."""
    first = [side.steps(1) for side in (ours, theirs)]
    more = [side.steps(CHECKED_STEPS - 1) for side in (ours, theirs)]
    differences = {
        "loss": _relative(*(side["loss"][0] for side in first)),
        "grad_norm": _relative(*(side["grad_norm"] for side in first)),
        f"loss_of_{CHECKED_STEPS}_steps": max(
            _relative(a, b) for a, b in zip(*(side["loss"] for side in more), strict=True)
        ),
    }
    allowed = [SAME_STEP, SAME_STEP, SAME_TRAINING]
    for (name, difference), most in zip(differences.items(), allowed, strict=True):
        if not difference <= most:
            raise LrkvError(
                f"{variant}: {name} differs by {difference:.1e} from PyTorch's, {most:.0e} "
                "allowed: these are two models, and their times say nothing"
            )
    return differences


def _without_zeros(params: Any) -> Any:
    """The parameters with N(0, 1/fan-in) where they start at zero: output projections, head."""
    rng = np.random.default_rng(1)

    def fill(path, leaf):
        if np.any(leaf):
            return leaf
        # The last axis is the outputs; of the rest, `blocks` stacks layers along the first.
        inputs = np.prod(leaf.shape[1 if path[0].key == "blocks" else 0 : -1])
        value = rng.standard_normal(leaf.shape, np.float32) / np.sqrt(inputs)
        return jax.device_put(value.astype(np.float32), leaf.sharding)

    return jax.tree.map_with_path(fill, params)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def _spread(values: list[float]) -> dict[str, float]:
    first, median, third = clock.quartiles(values)
    return {"median": median, "first_quartile": first, "third_quartile": third}


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    seconds, ratio = row["seconds_per_step"], row["throughput_over_pytorch"]
    return [
        row["variant"],
        *(f"{row['tokens_per_step'] / seconds[side]['median']:,.0f}" for side in SIDES),
        f"{ratio['median']:.2f}",
        f"{ratio['first_quartile']:.2f} to {ratio['third_quartile']:.2f}",
    ]


def page_table(folder: Path) -> str:
    """The table of docs/performance.md, from the results in `folder`."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("torch_cpu*.json"))]
    headers = "allocator", "variant", "lrkv_jax tokens/s", "PyTorch tokens/s", "ratio", "quartiles"
    rows = []
    for report in sorted(reports, key=lambda report: report["settings"]["keep_memory"]):
        kept = "keeps memory" if report["settings"]["keep_memory"] else "as it starts"
        rows += [[kept, *cells(row)] for row in report["rows"]]
    lines = [tabulated(headers, rows, left=2)]
    for report in reports[:1]:
        settings, row = report["settings"], report["rows"][0]
        lines += [
            "",
            f"{report['device']}, {row['threads']} threads, jax {report['versions']['jax']}, "
            f"PyTorch {row['pytorch']}, {report['date'][:10]}, load {report['load_average']:.1f}; "
            f"medians of {settings['rounds']} bursts of {settings['burst']} steps.",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pytorch-python", required=True, help="a Python with torch and numpy")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=15, help="bursts of each side")
    parser.add_argument("--burst", type=int, default=3, help="steps in a burst")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--keep-memory", action="store_true", help="in both sides' allocator")
    options = parser.parse_args()
    if options.keep_memory and not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    if min(options.rounds, options.burst) < 1:
        raise LrkvError("--rounds and --burst: use 1 or more")
    check_interpreter(options.pytorch_python)
    if len(jax.devices()) > 1:
        raise LrkvError(
            f"{len(jax.devices())} simulated devices would share the cores: unset XLA_FLAGS"
        )
    how = {"rounds": options.rounds, "burst": options.burst}
    report = {
        "benchmark": "train beside PyTorch",
        **machine(),
        "settings": {"config": "quickstart", "keep_memory": options.keep_memory, **how},
        "rows": [compare(name, options.pytorch_python, **how) for name in options.variants],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"torch_cpu{'-keep-memory' * options.keep_memory}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)
    print(table := page_table(options.out))
    replace_between(PAGE, BLOCK, table)


if __name__ == "__main__":
    try:
        main()
    except LrkvError as error:
        sys.exit(f"compare_pytorch: {error}")
