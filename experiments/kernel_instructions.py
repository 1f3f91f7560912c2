"""Instructions of the decode kernels' loops beside their bytes: the table in docs/decode.md.

    python experiments/kernel_instructions.py [SCALE/VARIANT/QUERIES/LAYOUT ...] [--out FILE.json]

Compiles for an H200 without one and counts in the machine code (`lrkv_jax.bench.instructions`).
Needs the wheels jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvdisasm. Nothing is timed.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
try:
    tool = next(file for file in files("nvidia-cuda-nvdisasm") if file.name == "nvdisasm")
except PackageNotFoundError:
    sys.exit("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
os.environ["CUDA_ROOT"] = str(Path(tool.locate()).parents[1])  # Mosaic reads it when it is loaded

from lrkv_jax.bench import instructions

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the shapes are the tests' own
# 1.2b has the heads of 512m_8k, and `latent` the kernel of `shared`.
SCALES = ("128m", "512m_8k", "2.5b", "6.3b")
VARIANTS = ("mha", "gqa", "mqa", "mla", "lrkv-full", "lrkv-shared")
PIPES = ("issue", "fp32", "integer", "special", "shared", "tensor")


def counted(names):
    """A row of each kernel."""
    from support import targets

    machine_code = {}
    for name, plan, wrote in targets.compiled(names):
        same = targets.code(plan)  # an equal kernel is not compiled again
        for code in wrote.get("sass_ctrl", []):
            if "HGMMA" in code:  # the kernel that joins pieces has no tensor-core product
                machine_code[same] = code
        found = instructions.count(machine_code[same], plan)
        yield {
            "name": name,
            "tile_bytes": instructions.tile_bytes(plan),
            "cycles": instructions.tile_cycles(plan),
            **found,
            "shares": instructions.shares(found, plan),
            "plan": asdict(plan),
        }


def line(row):
    """The row of the table in Markdown."""
    cells = [
        row["name"].removesuffix("/contiguous"),
        f"{row['tile_bytes'] / 1024:.1f}",
        f"{row['cycles']:,.0f}",
    ]
    cells += [f"{sum(row[who].values()):,}" for who in ("attend", "produce")]
    cells += [f"{100 * row['shares'][pipe]:.0f}" for pipe in PIPES]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [f"{scale}/{v}/1/contiguous" for scale in SCALES for v in VARIANTS]
    default += [f"2.5b/{v}/8/contiguous" for v in VARIANTS]
    parser.add_argument("names", nargs="*", default=default, metavar="SCALE/VARIANT/QUERIES/LAYOUT")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    headers = ("kernel", "KB", "cycles", "attend", "produce", *PIPES)
    print(f"| {' | '.join(headers)} |\n|{'---|' * len(headers)}")
    packages = ("jax", "jax-cuda13-plugin", "nvidia-cuda-nvdisasm")
    result = {"date": date.today().isoformat()} | {name: version(name) for name in packages}
    result["rows"] = []
    for row in counted(arguments.names):
        result["rows"].append(row)
        print(line(row), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
