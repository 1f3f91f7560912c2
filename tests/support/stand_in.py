"""Stands in for `lrkv` where a sweep's own work is tested: its runs are files, and take no time.

`train` leaves what a run does, its configuration from the folder of the environment's CONFIGS. It
fails for MQA, and for MLA takes a minute unless it is stopped, by SIGTERM or a file `stop`.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def train(config, *overrides):
    said = dict(override.split("=", 1) for override in overrides)
    directory = Path(said["run_dir"])
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(os.environ["CONFIGS"], f"{directory.name}.yaml"), directory / "config.yaml")
    with (directory / "starts").open("a") as file:
        file.write("started\n")
    if said["attention"] == "mqa":
        sys.exit("no multi-query today")
    if said["attention"] == "mla" and not (directory / "stopped").exists():
        signal.signal(signal.SIGTERM, lambda *_: stop(directory))
        (directory / "waits").touch()
        for _ in range(600):
            time.sleep(0.1)
            if (directory / "stop").exists():
                stop(directory)
    row = json.dumps({"step": int(said["train.steps"])})
    (directory / "metrics.jsonl").write_text(f"{row}\n")


def stop(directory):
    (directory / "stopped").touch()
    os._exit(75)


def evaluate(directory, option, tasks):
    assert option == "--tasks"
    step = json.loads(Path(directory, "metrics.jsonl").read_text())["step"]
    loss = {"bits_per_byte": 1.0, "cross_entropy": 2.0 + 0.1 * directory.endswith("gqa")}
    report = {"step": step} | {task: loss for task in tasks.split(",")}
    Path(directory, "evaluation.json").write_text(json.dumps(report))


{"train": train, "evaluate": evaluate}[sys.argv[1]](*sys.argv[2:])
