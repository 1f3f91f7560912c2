"""The plan's memory beside XLA's, program by program: the table in docs/planning.md.

    python experiments/plan_against_xla.py [--target cpu|cuda] [--out FILE.json]

Each row is `lrkv plan RUN ... --compile --json` in a process of its own: the whole step is lowered
and compiled for a mesh that is not there, and nothing is allocated. Half a minute to three each.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

PROGRAMS = (
    "128m mesh.fsdp=1",
    "128m mesh.fsdp=8",
    "128m mesh.fsdp=8 train.remat=minimal",
    "128m mesh.fsdp=8 train.remat=full",
    "128m attention=mha mesh.fsdp=8",
    "128m attention=mla mesh.fsdp=8",
    "128m mesh.data=2 mesh.fsdp=2 mesh.context=2",
    "512m_8k mesh.fsdp=4 mesh.context=2",
    "1.2b mesh.fsdp=8",
    "2.5b mesh.fsdp=8 train.remat=minimal",
    "6.3b mesh.fsdp=8",
    "6.3b mesh.fsdp=8 train.remat=full",
)
KEPT = ("target", "devices", "seconds", "total", "plan", "difference", "agrees")


def asked(program: str, target: str) -> dict:
    """One program's row."""
    scale, *overrides = program.split()
    # The page's LRKV is the paper's; a program's own attention=NAME comes later, and counts.
    run = [f"configs/{scale}.yaml", "attention=lrkv", *overrides]
    command = [sys.executable, "-m", "lrkv_jax", "plan", *run]
    began = time.perf_counter()
    answer = subprocess.run(
        [*command, "--compile", "--target", target, "--json"], check=True, capture_output=True
    )
    whole = time.perf_counter() - began
    compiled = json.loads(answer.stdout)["compiled"]
    return {"program": program, "answered": whole} | {name: compiled[name] for name in KEPT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print("| run | plan, GB | XLA, GB | difference | answered in |\n|---|---|---|---|---|")
    rows = []
    for program in PROGRAMS:
        row = asked(program, arguments.target)
        rows.append(row)
        print(
            f"| `{program}` | {row['plan'] / 1e9:.1f} | {row['total'] / 1e9:.1f} | "
            f"{100 * row['difference']:+.1f} % | {row['answered']:.0f} s |",
            flush=True,
        )
    if arguments.out:
        about = {"date": date.today().isoformat(), "jax": version("jax")}
        result = about | {"target": arguments.target, "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
