"""Compile the kernel for GPUs that are not here: `python compile_kernel.py`, in JSON.

For each architecture and shape: bytes of shared memory, and of registers spilled to memory.
"""

import json
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.knobs import nvidia

from lrkv_vllm.decode_kernel import MLA_TILE, STAGES, TILE, _decode, pow2

POINTERS = {
    "cache": "*bf16", "norms": "*fp32", "table": "*i32", "lengths": "*i32", "rotated": "*bf16",
    "in_latents": "*bf16", "mix": "*bf16", "turns": "*fp32", "out": "*fp32", "lse": "*fp32",
    "scale": "fp32",
}  # fmt: skip
INTEGERS = (
    "page_stride", "norm_stride", "table_stride", "slots", "width", "norm_width", "run", "Z",
)  # fmt: skip
# The paper's 128M and 6.3B, and a model that `lrkv convert` gives.
SHAPES = {
    "full, 6 heads of 128, rank 46": dict(H=6, G=6, K=128, C=128, R=48, V=48, FULL=True),
    "latent, 32 heads of 128, rank 128": dict(H=32, G=32, K=128, C=128, R=128, V=128, FULL=False),
    "full, 9 heads of 64 in 3 groups, rank 16": dict(H=9, G=3, K=64, C=64, R=16, V=16, FULL=True),
    "mla, 9 heads of 64 in 3 groups, latent 224": dict(
        H=9, G=3, K=64, C=224, R=8, V=8, FULL=True, IN_KEYS=224, KEY=-1, TILE=MLA_TILE,
    ),
}  # fmt: skip


def compiled(shape, architecture):
    shape = dict(shape)
    E = shape["H"] // shape.pop("G")
    constants = dict(
        E=E, HB=pow2(E), K_=pow2(shape["K"]), C_=pow2(shape["C"]), R_=pow2(shape["R"]),
        V_=pow2(shape["V"]), KEY=512, COMMON=0, LATENTS=128, VALUES=256, NORMS=384, IN_KEYS=0,
        TILE=TILE,
    ) | shape  # fmt: skip
    signature = POINTERS | dict.fromkeys(INTEGERS, "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    # A launch makes the program that is made here, and no other as a request grows.
    fixed = {each.name: each.is_constexpr for each in _decode.params}
    assert fixed == {name: kind == "constexpr" for name, kind in signature.items()}
    assert [each.name for each in _decode.params if each.do_not_specialize] == ["Z"]
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(_decode.arg_names)
        if str(signature[name]).startswith("*") or name in ("page_stride", "slots", "width")
    }
    source = ASTSource(_decode, signature, constants, aligned)
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options={"num_stages": STAGES})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"shared": made.metadata.shared, **found}


if __name__ == "__main__":
    print(json.dumps({
        name: {f"sm_{target}": compiled(shape, target) for target in (80, 90, 100)}
        for name, shape in SHAPES.items()
    }))  # fmt: skip
