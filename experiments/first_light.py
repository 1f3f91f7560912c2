"""A GPU's first day in stages, each at most eight minutes, resumable, and useful alone.

    python experiments/first_light.py --out DIR [--stages a,b,...] [--limit 480] [--within 570]

| stage | |
|---|---|
| kernels | `pytest -m gpu`: kernels at every scale, and training steps, against float32 oracles |
| decoding | decode attention beside the best MHA: XLA, cuDNN, PyTorch and its libraries |
| training | training steps, remat policies |
| runs | 128M pretrained on the embedded corpus: held-out loss, decode agreement, tokens/s |
| tables | the tables of docs/decode.md and docs/planning.md, from the files in DIR |

A stage runs in a separate process (`first_light_stages.py`), which ends where an item takes too
long or crashes, and then begins again after that item. Each item is a row in DIR/STAGE.json, with
the device, the date and the versions. What DIR holds is not measured again, except for what went
wrong without hanging. A stage that fails does not stop the next.

`--dry` does it all at tiny shapes on a CPU. `--carry FILE.zip`, on a machine that has them, packs
the packages that a machine with JAX and PyTorch alone lacks; `--carried FILE.zip` uses them there
(carried.zip in the repository's folder, if there is one).

Exit codes: 0 all is measured and right; 1 something is wrong, failed or was left out, as the last
lines say; 2 bad input.
"""

import argparse
import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROGRAM = HERE / "first_light_stages.py"
# The title and the headers of each stage's table.
STAGES = {
    "kernels": (
        "Against float32 oracles",
        ("of", "right", "wrong", "not here"),
    ),
    "decoding": (
        "Attention of one layer next to the best MHA of the same minutes",
        ("shape", "best MHA, µs", "variant", "by", "µs", "of MHA: time", "bytes", "of copy"),
    ),
    "training": (
        "Training steps",
        ("step", "variant", "ms", "tokens/s", "MFU of sheet", "of products", "of MHA", "peak GB"),
    ),
    "runs": (
        "Runs on the embedded corpus",
        ("run", "steps", "last loss", "held-out bits per byte", "decode's error",
         "trained tokens/s", "decoded tokens/s"),
    ),
}  # fmt: skip
TABLES = "tables"
# The documents' blocks, and the stages that each shows.
BLOCKS = {
    ("decode.md", "first light: decoding"): ("kernels", "decoding"),
    ("planning.md", "first light: training"): ("training", "runs"),
}
LIMIT = 480
HUNG = "did not answer"
# What the configuration needs, and what the training loop needs beside JAX's packages.
CARRIED = (
    "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions",
    "grain", "array_record", "portpicker", "tensorboardX", "tensorflow-datasets", "dm-tree",
    "docstring_parser", "googleapis-common-protos", "immutabledict", "promise", "simple-parsing",
    "tensorflow-metadata", "termcolor", "toml",
)  # fmt: skip


def carry(path: Path) -> None:
    """Pack the installed packages of `CARRIED` into a zip file."""
    here = sysconfig.get_platform(), sys.version_info[:2]
    if here != ("linux-x86_64", (3, 12)):
        raise SystemExit(f"--carry packs for Python 3.12 on linux-x86_64, and this is {here}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in CARRIED:
            found = metadata.distribution(name)
            for file in found.files or ():
                source = Path(str(found.locate_file(file)))
                if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                    packed.write(source, str(file))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def find_packages(carried: Path | None) -> None:
    """Have this repository, this folder and carried packages importable, in other processes too."""
    folders = [str(ROOT), str(HERE)]
    if carried is not None:
        folder = tempfile.mkdtemp(prefix="carried-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        with zipfile.ZipFile(carried) as packed:
            packed.extractall(folder)
        folders.insert(0, folder)
    sys.path[:0] = folders
    there = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([there] if there else [])])


class Stage:
    """A stage's file: what was measured, written after every row."""

    def __init__(self, name: str, folder: Path, dry: bool):
        self.path, self.name, self.dry = folder / f"{name}.json", name, dry
        self.content: dict[str, Any] = {"stage": name, "dry": dry, "where": None, "rows": []}
        self.other = ""
        with contextlib.suppress(OSError, ValueError):
            self.content.update(json.loads(self.path.read_text()))
            if self.content["dry"] != dry:
                self.other = "of a dry run" if not dry else "of a device"
        self.content["left_out"] = []

    def begin(self, where: dict[str, Any]) -> None:
        """Note where this is measured; rows of another place are not mixed with these."""
        before = self.content["where"]
        for name in ("device", "versions", "sources"):
            if before and before[name] != where[name] and not self.other:
                self.other = f"of another place ({name}: {before[name]})"
        if not self.other:
            self.content["where"] = where

    def done(self) -> list[str]:
        """The items that are not measured again: what is right, and what hung."""
        rows = self.content["rows"]
        return [r["name"] for r in rows if r["verdict"] == "ok" or HUNG in r["text"]]

    def record(self, row: dict[str, Any]) -> None:
        """Put a row in the file, in place of an older one of the same item."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        others = [old for old in self.content["rows"] if old["name"] != row["name"]]
        self.content["rows"] = [*others, {**row, "date": now}]
        print(f"{self.name} {row['verdict']:9}{row['name']:24} {row['text']}", flush=True)
        self.write()

    def fail(self, name: str, text: str) -> None:
        """Record a row of an item that gave none itself."""
        self.record({"name": name, "verdict": "wrong", "text": text, "measured": {}, "cells": []})

    def write(self) -> None:
        from lrkv_jax import files

        files.write_json(self.path, self.content)

    @property
    def amiss(self) -> list[str]:
        """What is wrong, what could not run, and what was left out, a line each."""
        bad = [row for row in self.content["rows"] if row["verdict"] != "ok"]
        lines = [f"{self.name}: {row['name']}: {row['text']}" for row in bad]
        return lines + [f"{self.name}: left out: {name}" for name in self.content["left_out"]]


def run(stage: Stage, seconds: float) -> list[str]:
    """Measure what is not there yet, for at most `seconds`; returns what is amiss."""
    end, tried = time.monotonic() + seconds, set[str]()
    while True:
        job = {"stage": stage.name, "folder": str(stage.path.parent), "dry": stage.dry,
               "done": [*stage.done(), *tried], "seconds": end - time.monotonic()}  # fmt: skip
        code, last = _attempt(stage, job, tried)
        if stage.other:
            text = f"{stage.path} is {stage.other}: name another --out, or remove it"
            return [f"{stage.name}: {text}"]
        if code == 0:
            break
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if "begin" not in last:  # it did not even begin
            return [f"{stage.name}: {how}"]
        begun = f" (last begun: {last['progress']})" if "progress" in last else ""
        late = code == -signal.SIGALRM
        if late and last["cut"]:  # the stage's time is over
            stage.content["left_out"] = [f"{last['begin']}, and what follows it"]
            break
        hung = f"{HUNG} within {last['seconds']:.0f} s"
        stage.fail(last["begin"], (hung if late else how) + begun)
        tried.add(last["begin"])
    stage.write()
    return stage.amiss


def _attempt(stage: Stage, job: dict[str, Any], tried: set[str]) -> tuple[int, dict[str, Any]]:
    """Run the process of a stage: its exit code, and what it last said that it began."""
    last: dict[str, Any] = {}
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), json.dumps(job)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        for line in process.stdout:
            message = json.loads(line)
            if "where" in message:
                stage.begin(message["where"])
                if not stage.other:
                    process.stdin.write("measure\n")
                process.stdin.close()
            elif "row" in message:
                stage.record(message["row"])
                tried.add(message["row"]["name"])
                last = {}
            elif "left_out" in message:
                stage.content["left_out"] = [message["left_out"]]
            else:
                last = message if "begin" in message else {**last, **message}
    finally:
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):  # what it started and left behind
            os.killpg(process.pid, signal.SIGKILL)
    return code, last


def write_tables(folder: Path, docs: Path) -> None:
    """Write those blocks of the documents for which `folder` has measurements."""
    from blocks import replace_between

    for (page, block), names in BLOCKS.items():
        texts = [_text(name, folder / f"{name}.json") for name in names]
        if any(texts):
            replace_between(docs / page, block, "\n\n".join(filter(None, texts)))
            print(docs / page)


def _text(name: str, path: Path) -> str:
    """A stage's table, where and when it was measured, and what was wrong; or nothing."""
    if not path.is_file():
        return ""
    stage = json.loads(path.read_text())
    rows, (title, headers) = stage["rows"], STAGES[name]
    if stage["dry"] or not rows:  # a dry run is of a CPU and of tiny shapes: it says nothing
        return ""
    counts = [sum(row["verdict"] == v for row in rows) for v in ("ok", "wrong", "not here")]
    parts = [f"**{title}** ({_where(stage)}) " + "{} right, {} wrong, {} not run.".format(*counts)]
    lines = [headers, ["---"] * len(headers)]
    for row in rows:
        lines += row["cells"]
    parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    bad = [f"- {row['name']}: {row['text']}" for row in rows if row["verdict"] == "wrong"]
    return "\n\n".join([*parts, *(["\n".join(bad)] if bad else [])])


def _where(stage: dict[str, Any]) -> str:
    where = stage["where"]
    versions = {name: where["versions"].get(name) for name in ("jax", "torch", "lrkv_jax")}
    named = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    dates = sorted({row["date"][:10] for row in stage["rows"]})
    more = f" Left out: {'; '.join(stage['left_out'])}." if stage["left_out"] else ""
    return f"{where['device']}, {named}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.{more}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*STAGES, TABLES]
    parser.add_argument("--out", type=Path, help="the folder of results")
    parser.add_argument("--stages", default=",".join(every), help="(default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds of a stage, at most 480"
    )
    parser.add_argument("--within", type=float, default=1e9, help="seconds of all stages together")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the tables' pages")
    parser.add_argument("--carry", type=Path, metavar="FILE.zip", help="pack packages and end")
    parser.add_argument("--carried", type=Path, metavar="FILE.zip", help="packages to use")
    given = parser.parse_args()
    if given.carry:
        carry(given.carry)
        return 0
    chosen = [name for name in given.stages.split(",") if name]
    if unknown := [name for name in chosen if name not in every]:
        parser.error(f"--stages {unknown[0]}: use {','.join(every)}")
    if given.out is None or not 0 < given.limit <= LIMIT:
        parser.error("name a folder (--out DIR), and a --limit of at most 480 seconds")
    out, packed = given.out.resolve(), given.carried or ROOT / "carried.zip"
    if given.carried and not packed.is_file():
        parser.error(f"--carried {packed}: no such file")
    out.mkdir(parents=True, exist_ok=True)
    docs = given.docs.resolve()
    find_packages(packed if packed.is_file() else None)
    os.chdir(ROOT)
    cache = os.path.join(tempfile.gettempdir(), f"first-light-programs-{os.getuid()}")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    end, amiss = time.monotonic() + given.within, []
    for name in chosen:
        seconds = min(given.limit, end - time.monotonic())
        if name == TABLES:
            write_tables(out, docs)
        elif seconds <= 0:
            amiss.append(f"{name}: left out: no time is left")
        else:
            amiss += run(Stage(name, out, given.dry), seconds)
    print("\n".join([*amiss, "all is measured" if not amiss else f"{len(amiss)} lines above"]))
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main())
