"""The hardware table: datasheet figures that belong together, and names that find them."""

from types import SimpleNamespace

import pytest

from lrkv_jax.distributed.hardware import HARDWARE, hardware, hardware_of
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.metrics import peak_flops


def test_a_name_or_what_jax_calls_a_device_finds_it():
    assert hardware("H200").name == "H200 SXM"
    with pytest.raises(LrkvError, match="'tpu' is unknown: use a100, h100, h200, b200$"):
        hardware("tpu")
    kinds = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"
    for kind, device in zip(kinds, HARDWARE.values(), strict=True):
        assert hardware_of(kind) is device
        assert peak_flops([SimpleNamespace(device_kind=kind)] * 8) == 8 * device.bf16_flops
    assert hardware_of("cpu") is None
    assert peak_flops([SimpleNamespace(device_kind="cpu")]) is None


def test_figures_are_the_datasheets_in_bytes_and_flops_a_second():
    h100, h200, b200 = HARDWARE["h100"], HARDWARE["h200"], HARDWARE["b200"]
    assert h100.bf16_flops == h200.bf16_flops == 1979e12 / 2  # the sheets print it with sparsity
    assert h100.link_bandwidth == h200.link_bandwidth == 900e9 / 2  # and links both ways
    assert h200.memory / h100.memory == pytest.approx(1.76, abs=0.01)
    assert b200.memory_bandwidth == 64e12 / 8 and b200.memory == 1440 * 10**9 // 8
    for device in HARDWARE.values():
        assert 80e9 <= device.memory <= 180e9
        # A product at the ridge does 100 to 350 FLOPs for each byte of memory that it reads.
        assert 100 < device.bf16_flops / device.memory_bandwidth < 350
        assert device.link_bandwidth < device.memory_bandwidth
        assert "datasheet" in device.source and "20" in device.source
