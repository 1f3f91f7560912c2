"""The estimate of a step's memory beside XLA's figure: the table in docs/planning.md.

    python experiments/plan_against_xla.py

Each row is `lrkv plan RUN ... --json` in a process of its own, which takes about half a minute.
"""

import json
import subprocess
import sys
import time

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
    "128m attention=lrkv_latent mesh.fsdp=1",
    "128m attention=lrkv_latent mesh.fsdp=8",
    "128m attention=lrkv_latent mesh.fsdp=8 train.remat=minimal",
    "128m mesh.fsdp=4 mesh.tensor=2",
)


def main() -> None:
    print("| run | estimate, GB | XLA, GB | difference | seconds |\n|---|---|---|---|---|")
    for program in PROGRAMS:
        scale, *overrides = program.split()
        # The page's LRKV is the paper's; a program's attention=NAME comes later, and counts.
        run = [f"configs/{scale}.yaml", "attention=lrkv", *overrides, "--json"]
        began = time.perf_counter()
        command = [sys.executable, "-m", "lrkv_jax.cli", "plan", *run]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        seconds = time.perf_counter() - began
        training = json.loads(answer.stdout)["training"]
        memory, xla = training["memory"], training["compiled"]["total"]
        estimate = memory["estimates"][memory["remat"]]["total"]
        print(
            f"| `{program}` | {estimate / 1e9:.1f} | {xla / 1e9:.1f} | "
            f"{100 * (estimate / xla - 1):+.1f} % | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
