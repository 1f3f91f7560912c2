"""A GPU's first day in stages, each at most eight minutes, resumable, and useful alone.

    python experiments/first_light.py --out DIR [--stages a,b,...] [--limit 480] [--within 570]

| stage | |
|---|---|
| a | `lrkv doctor` |
| b | `pytest -m gpu`: kernels at every scale against float32 oracles, in bfloat16 |
| c | decode attention beside the best MHA: XLA, cuDNN, Pallas, PyTorch and its libraries |
| d | the kernel's plans, timed; writes the table that LRKV_TUNED_PLANS names |
| e | training steps, remat policies, Muon's share, loss curves in bfloat16 and float32 |
| f | 128M pretrained on the embedded corpus: held-out loss, decode agreement, tokens/s |
| g | the tables of docs/decode.md and docs/performance.md, from the files in DIR |

Each item of a stage runs in a process that is killed at the item's time limit or the stage's, and
leaves its row in DIR/STAGE.json, with the device, the date and the versions. What DIR holds is not
measured again, but for what went wrong without hanging. A stage that fails does not stop the next.

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
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections import defaultdict
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STAGES = tuple("abcdefg")
LIMIT = 480
WHERE = "first_light_stages:where"
HUNG = "did not answer"  # as the doctor's child process says it
# What the configuration needs, and what the training loop needs beside JAX's own packages.
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
    """A stage's file: what was measured, kept after every row."""

    def __init__(self, name: str, folder: Path, dry: bool):
        self.path, self.name = folder / f"{name}.json", name
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

    def done(self, item: str) -> list[dict[str, Any]]:
        """An item's rows, if it need not be measured again: it was measured, or it hung."""
        rows = [row for row in self.content["rows"] if row["item"] == item]
        bad = [row["says"] for row in rows if row["verdict"] in ("wrong", "not here")]
        return [] if any(not says.startswith(HUNG) for says in bad) else rows

    def keep(self, item: str, found: list[Any], seconds: float) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        more = {"item": item, "seconds": round(seconds, 2), "date": now}
        others = [row for row in self.content["rows"] if row["item"] != item]
        self.content["rows"] = others + [{**vars(one), **more} for one in found]
        self.write()

    def write(self) -> None:
        from lrkv_jax import disk

        disk.write_json(self.path, self.content)

    @property
    def amiss(self) -> list[str]:
        """What is wrong, what could not run, and what was left out, a line each."""
        # A machine may be without what the doctor looks at; other stages are there to measure.
        amiss = ("wrong",) if self.name == "a" else ("wrong", "not here")
        bad = [r for r in self.content["rows"] if r["verdict"] in amiss]
        lines = [f"{self.name}: {r['name']}: {r['says']}" for r in bad]
        return lines + [f"{self.name}: left out: {name}" for name in self.content["left_out"]]


def run(stage: Stage, items: Any, seconds: float) -> list[str]:
    """Measure what is not there yet, for at most `seconds`; returns what is amiss."""
    from lrkv_jax.doctor.child import AGAIN, Check, ask, checker
    from lrkv_jax.doctor.finding import OK

    end = time.monotonic() + seconds
    facts: dict[str, dict[str, Any]] = defaultdict(dict)
    with checker() as child:
        where = Check("where", WHERE, 120, "see lrkv doctor")
        (here,) = ask(child, where, seconds)
        if here.verdict != OK:
            return [f"{stage.name}: {here.says}"]
        stage.begin(here.measured)
        if stage.other:
            return [
                f"{stage.name}: {stage.path} is {stage.other}: name another --out, or remove it"
            ]
        stage.write()
        for check in items(facts):
            if rows := stage.done(check.name):
                facts.update({row["name"]: row["measured"] for row in rows})
                continue
            began = time.monotonic()
            if stage.content["dry"]:  # on a CPU that others may use too
                check = replace(check, seconds=4 * check.seconds)
            found = ask(child, check, end - began)
            if any(one.mend == AGAIN for one in found):  # the stage's time is over
                stage.content["left_out"] = [f"{check.name}, and what follows it"]
                break
            for one in found:
                facts[one.name] = one.measured
                print(f"{stage.name} {one}", flush=True)
            stage.keep(check.name, found, time.monotonic() - began)
        stage.write()
    return stage.amiss


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the folder of results")
    parser.add_argument("--stages", default=",".join(STAGES), help="(default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds of a stage, at most 480"
    )
    parser.add_argument("--within", type=float, default=1e9, help="seconds of all stages together")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the pages of stage g")
    parser.add_argument("--carry", type=Path, metavar="FILE.zip", help="pack packages and end")
    parser.add_argument("--carried", type=Path, metavar="FILE.zip", help="packages to use")
    given = parser.parse_args()
    if given.carry:
        carry(given.carry)
        return 0
    chosen = [name for name in given.stages.split(",") if name]
    if unknown := [name for name in chosen if name not in STAGES]:
        parser.error(f"--stages {unknown[0]}: use {','.join(STAGES)}")
    if given.out is None or not 0 < given.limit <= LIMIT:
        parser.error("name a folder (--out DIR), and a --limit of at most 480 seconds")
    out, packed = given.out.resolve(), given.carried or ROOT / "carried.zip"
    if given.carried and not packed.is_file():
        parser.error(f"--carried {packed}: no such file")
    out.mkdir(parents=True, exist_ok=True)
    docs = given.docs.resolve()
    find_packages(packed if packed.is_file() else None)
    os.chdir(ROOT)
    if given.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    cache = os.path.join(tempfile.gettempdir(), f"first-light-programs-{os.getuid()}")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)

    import first_light_stages
    import first_light_tables

    end, amiss = time.monotonic() + given.within, []
    for name in chosen:
        seconds = min(given.limit, end - time.monotonic())
        if given.dry:  # the kernel's interpreter needs more threads than a small machine gives
            count = 8 if name in "bd" else 1
            os.environ["XLA_FLAGS"] = (
                f"--xla_force_host_platform_device_count={count}"
                " --xla_backend_optimization_level=0"  # nothing is measured
            )
        if name == "g":
            first_light_tables.write(out, docs)
        elif seconds <= 0:
            amiss.append(f"{name}: left out: no time is left")
        else:
            items = first_light_stages.stage(name, out, dry=given.dry)
            amiss += run(Stage(name, out, given.dry), items, seconds)
    print("\n".join([*amiss, "all is measured" if not amiss else f"{len(amiss)} lines above"]))
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main())
