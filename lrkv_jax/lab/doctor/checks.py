"""Which checks there are, in order: a later one may depend on what an earlier one measured."""

from collections.abc import Iterator
from functools import partial

from lrkv_jax.lab.doctor import host
from lrkv_jax.lab.doctor.examine import Check, Facts


def checks(facts: Facts) -> Iterator[Check]:
    """Every check, in order; `facts` fills while they run."""
    programs = "end other programs, or ask for more memory"
    yield Check("machine", 10, programs, host.machine)
    yield Check(
        "disk", 20, "start in a folder on another disk, and name a run_dir there", host.disk
    )
    driver = "load or reinstall NVIDIA's driver, and end what else uses the GPUs"
    yield Check("driver", 15, driver, host.driver)
    gpus = facts["driver"].get("gpus", 0)
    install = 'pip install -c constraints.txt -e ".[dev]", or ".[cuda13]" for GPUs'
    yield Check("packages", 10, install, partial(host.packages, gpus))
    # Imported here: what is above needs no JAX, which may not load.
    from lrkv_jax.lab.doctor import devices

    seen = "see the lines on the driver and the packages; JAX_PLATFORMS=cpu does without GPUs"
    yield Check("devices", 45, seen, partial(devices.devices, gpus))
    found = facts["devices"]
    count = found.get("count", 0)
    clocks = "look at its clocks, power and heat (nvidia-smi -q, dmesg)"
    for index in range(min(count, 1) if found.get("backend") == "cpu" else count):
        yield Check(f"device {index}", 30, clocks, partial(devices.speed, index))
    if count > 1:
        links = "look at the links (nvidia-smi topo -m, NCCL_DEBUG=INFO)"
        yield Check(f"all-reduce of {count}", 30, links, devices.between)
