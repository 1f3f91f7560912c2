"""Stands in for `lrkv` where a sweep's own work is tested: its runs are files, and take no time.

`train` leaves what a run does. It fails for MQA, and for MLA takes a minute unless it is stopped.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from lrkv_jax.config import dump_config, load_config


def train(config, *overrides):
    run = load_config(config, overrides)
    directory = Path(run.directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(dump_config(run))
    with (directory / "starts").open("a") as file:
        file.write(f"{sorted(os.sched_getaffinity(0))}\n")
    if run.attention == "mqa":
        sys.exit("no multi-query today")
    if run.attention == "mla" and not (directory / "stopped").exists():
        signal.signal(signal.SIGTERM, lambda *_: stop(directory))
        (directory / "waits").touch()
        time.sleep(60)
    (directory / "metrics.jsonl").write_text(json.dumps({"step": run.train.total_steps}) + "\n")


def stop(directory):
    (directory / "stopped").touch()
    os._exit(75)


def evaluate(directory, option, tasks):
    assert option == "--tasks"
    step = json.loads(Path(directory, "metrics.jsonl").read_text())["step"]
    report = {"step": step} | {task: {"bits_per_byte": 2.0} for task in tasks.split(",")}
    Path(directory, "evaluation.json").write_text(json.dumps(report))


{"train": train, "evaluate": evaluate}[sys.argv[1]](*sys.argv[2:])
