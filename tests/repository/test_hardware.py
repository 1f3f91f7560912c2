"""The hardware table: names that find its devices."""

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
