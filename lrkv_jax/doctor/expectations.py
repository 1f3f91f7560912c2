"""What to expect of this machine: `plan`'s decode ceiling and step time, at the rates measured."""

from dataclasses import asdict
from typing import Any

from lrkv_jax.accounting.serving import serving
from lrkv_jax.config import load_config
from lrkv_jax.doctor.finding import SLOW, Finding, judged
from lrkv_jax.hardware import Hardware
from lrkv_jax.plan.estimate import collectives, state_bytes
from lrkv_jax.plan.training import on_devices, resolved, step_time


def expect(
    scale: str, count: int, memory: int, copies: float, products: float, links: float | None
) -> list[Finding]:
    """Each variant of a scale on `count` devices of `memory` bytes.

    `copies` and `links` are measured bytes/s, `products` FLOP/s in the dtype of training.
    """
    link = links or copies  # one device sends nothing
    device = Hardware(
        "this machine", "", memory, copies, products, link, link, count, "measured by lrkv doctor"
    )
    config = load_config(scale)
    return [_of_variant(config.variant(name), name, count, device) for name in config.variants]


def _of_variant(config: Any, variant: str, count: int, device: Hardware) -> Finding:
    config = resolved(on_devices(config, count, device))
    decoding = serving(config.model, device, config.train.context)
    state = state_bytes(config)
    time = step_time(config, device, collectives(config, state), state)
    faults = {"one sequence does not fit": SLOW} if not decoding.largest_batch else {}
    says = (
        f"{config.name} decodes at most {1 / decoding.floor_of_one:,.0f} tokens/s for one sequence "
        f"of {decoding.length}; a training step takes {time.step:.3g} s, "
        f"{time.mfu:.0%} of the products above"
    )
    measured = {"decode": asdict(decoding), "time": asdict(time), "scale": config.name}
    return judged(f"expect, {variant}", faults, says, measured)
