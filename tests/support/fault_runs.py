"""One small run, the same in every test here, so that its programs are compiled once."""

import os
import time
from pathlib import Path

from support.tiny import TINY

from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.metrics import read_metrics

STEPS = 60
# Saves and validations that do not fall together, so that kills find each alone and both.
SETTINGS = ("train.save_every=4", "train.validate_every=7", f"train.steps={STEPS}",
            "train.log_every=20", "optimizer.warmup_steps=5", "mesh.data=1", "mesh.fsdp=1",
            # Half the time from a start to the first step is tracing, and most of that is these.
            "optimizer.muon.iterations=1", "train.sample_tokens=0")  # fmt: skip
ENVIRONMENT = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def command(pages, run_dir, *overrides) -> list[str]:
    """The arguments of `lrkv`."""
    return ["train", "configs/quickstart.yaml", *TINY, *pages, *SETTINGS, f"run_dir={run_dir}",
            *overrides]  # fmt: skip


def learnt(run_dir: Path):
    """What must be equal bit for bit: every row without its clocks, and the last arrays."""
    clocks = ("seconds", "tokens_per_second", "host_share", "mfu", "compile_", "memory_bytes")
    rows = [
        {name: value for name, value in row.items() if not name.startswith(clocks)}
        for row in read_metrics(run_dir)
    ]
    with Checkpointer(run_dir / "checkpoints") as checkpoints:
        content = checkpoints.manifest()
    return rows, content["step"], content["arrays"], content["loader"]


def wait_for_rows(run_dir: Path, count: int, *processes, seconds=120) -> None:
    """Until the run's log has so many rows; none of its processes may end before."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + seconds
    while not (metrics.is_file() and metrics.read_text().count("\n") >= count):
        assert time.monotonic() < deadline
        assert all(p.poll() is None for p in processes), [p.communicate() for p in processes]
        time.sleep(0.02)
