"""Muon's share of a step at every scale: the table in docs/planning.md.

    python experiments/muon_share.py [--devices 8]

FLOPs of the Newton–Schulz iterations over those of the forward and backward pass, and what one
device does of them when the matrices are shared out over `mesh.fsdp` = --devices. Counted from the
configurations: nothing is run.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: an accelerator is left alone

from lrkv_jax.config import load_config
from lrkv_jax.lab.plan.training import MUON_TOKENS, muon

SCALES = ("128m", "512m_8k", "1.2b", "2.5b", "6.3b")
VARIANTS = ("mha", "lrkv")


def rows(devices: int):
    """A row of the table for each scale and variant."""
    for scale in SCALES:
        for variant in VARIANTS:
            # The sequences of a step change nothing that Muon does; each device has one here.
            config = load_config(
                scale,
                [f"attention={variant}", f"mesh.fsdp={devices}", f"train.batch={devices}",
                 "train.accumulation=1"],
            )  # fmt: skip
            found = muon(config)
            whole, busiest = found["flops"], found["flops_busiest_device"]
            yield (
                scale,
                variant,
                *(f"{100 * share:.1f}" for share in found["share"].values()),
                f"{whole / 1e12:.3g}",
                f"{busiest / 1e12:.3g}",
                f"{devices * busiest / whole:.2f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    devices = parser.parse_args().devices
    headers = (
        "scale", "variant", *(f"% at {tokens:,}" for tokens in MUON_TOKENS), "TFLOP",
        f"TFLOP of the busiest of {devices}", "of an even share",
    )  # fmt: skip
    print(f"| {' | '.join(headers)} |\n|{'---|' * len(headers)}")
    for row in rows(devices):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
