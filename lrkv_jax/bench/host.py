"""What a step costs the host: reading a batch, and the training loop around the device.

Both need the data libraries (Grain, TensorFlow Datasets); the rest of the benchmark does not.
"""

import importlib.util
import io
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.runtime.stopping import Stopping
from lrkv_jax.sharding import batch_sharding, make_mesh

LEFT_OUT = 20  # first steps of a run that are not counted
DATA_LIBRARIES = ("grain", "tensorflow_datasets")


def has_data_libraries() -> bool:
    return all(importlib.util.find_spec(name) for name in DATA_LIBRARIES)


def batch_seconds(config: RunConfig, mesh: Mesh, samples: int) -> list[float]:
    """Seconds to read a batch of the run's shape and put it on the devices, one after another.

    The records are the embedded corpus's, at this context. In training the loader's threads read
    ahead, so a step waits for this only where it is longer than the step.
    """
    from lrkv_jax.data.loader import make_loader
    from lrkv_jax.data.records.build import build_dataset
    from lrkv_jax.runtime.batches import local_rows

    train, rows = config.train, batch_sharding(mesh)
    with tempfile.TemporaryDirectory() as folder:
        changes = {"source": "sotu", "tokenizer": "sotu-4096", "directory": folder}
        data = config.data.model_copy(update=changes)
        build_dataset(data, train.context)
        loader = make_loader(data, train.context, train.batch, rows=local_rows(rows, train.batch))
        taken = []
        for step in range(samples + 1):
            began = time.perf_counter()
            tokens_bU = loader.batch_at(step)
            jax.block_until_ready(jax.device_put(tokens_bU, rows))
            taken.append(time.perf_counter() - began)
    return taken[1:]


def shrunk(scale: str, folder: str) -> RunConfig:
    """`scale` with LRKV: its layers and its arrays, each of them next to nothing, and its loop."""
    return load_config(
        scale,
        [
            "attention=lrkv", "attention.rank=1", "model.width=8", "model.heads=2",
            "model.head_width=2", "model.feed_forward=8", "model.vocabulary=4096",
            "optimizer.muon.iterations=1", "train.context=8", "train.batch=1",
            "train.accumulation=1", "train.steps=1000000", "train.validate_every=0",
            "train.save_every=0",
            "train.sample_every=0", f"data.source={folder}/text", "data.tokenizer=sotu-4096",
            "data.heldout=0.1", f"data.directory={folder}/data", "mesh.data=1", "mesh.fsdp=1",
            "mesh.context=1", "mesh.tensor=1", f"run_dir={folder}/run",
        ],
    )  # fmt: skip


class _Steps(Stopping):
    """Notes the main thread's processor time each time that the loop asks whether to stop.

    A run of one process asks after every step.
    """

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def due(self) -> bool:
        self.seconds.append(time.thread_time())
        return super().due()


def loop_overhead(scale: str = "128m", steps: int = 300) -> dict[str, Any]:
    """What the training loop costs the host per step, the device aside, on one device.

    `lrkv_jax.run.loop.train` itself runs a model of `scale`'s tree that computes next to nothing.
    Counted is all that its main thread does between waits for the device: taking a batch from the
    loader, putting it there, the step's dispatch, the row of metrics and the TensorBoard events.
    `ms` is the wall time of that by the loop's own clock, median; `cpu_ms` the processor time of
    the main thread, waits aside, which other programs disturb less: the median of means over
    `log_every` steps.
    """
    from lrkv_jax.run.loop import train
    from lrkv_jax.run.metrics import read_metrics
    from lrkv_jax.train.state import abstract_state

    with tempfile.TemporaryDirectory() as folder:
        config = shrunk(scale, folder)
        text = Path(config.data.source)
        text.mkdir()
        for number in range(40):
            (text / f"{number}.txt").write_text(f"Document {number} has a few words in it. " * 8)
        device = jax.local_devices()[:1]
        asked = _Steps()
        quiet = Console(file=io.StringIO())
        train(config, until=LEFT_OUT + steps, console=quiet, devices=device, stopping=asked)
        rows = read_metrics(config.directory)[LEFT_OUT:]
        state = abstract_state(config, make_mesh(config.mesh, device))
    outside = [1e3 * row["outside_step"] * row["seconds"] for row in rows]
    every = config.train.log_every
    spent = [
        1e3 * (b - a) / every for a, b in itertools.pairwise(asked.seconds[every - 1 :: every])
    ]
    first, median, third = statistics.quantiles(outside, n=4, method="inclusive")
    return {
        "scale": scale,
        "layers": config.model.layers,
        "arrays": len(jax.tree.leaves(state)),
        "steps": len(outside),
        "log_every": every,
        "ms": median,
        "ms_first_quartile": first,
        "ms_third_quartile": third,
        "ms_mean": statistics.fmean(outside),
        "cpu_ms": statistics.median(spent[LEFT_OUT // every :]),
    }
