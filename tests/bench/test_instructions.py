"""Instructions of a kernel's loop over tiles: counted in its machine code, held against bytes."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from lrkv_jax.bench import instructions
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.split_kv.plan import Plan

ROOT = Path(__file__).parents[2]
WHEELS = ("jax-cuda13-plugin", "nvidia-cuda-nvdisasm")

# One block of keys and one of values. Lines as nvdisasm wrote them for a real kernel, a few of each
# kind: the producer's loop, the consumer's with a loop inside it and with what only a last tile
# needs, and at the end the wait for a barrier.
PLAN = Plan(
    heads=1, queries=1, warpgroups=1, units=1, groups=1, key_widths=(64,), value_width=64
)  # fmt: skip
CODE = """
.L_x_0:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R9+URZ], R8 ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
   -:-:-:Y:02        /*0020*/                   UTMALDG.5D [UR8], [UR16]
        /*0030*/                   UTMALDG.5D [UR8], [UR16] ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
        /*0060*/                   CS2R R10, SRZ ;
.L_x_2:
        /*0070*/                   LDS.64 R24, [R17+UR5] ;
        /*0080*/                   IMAD.MOV.U32 R211, RZ, RZ, R11 ;
.L_x_3:
        /*0090*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR36], R24 ;
        /*00a0*/                   VIADD R211, R211, 0x1 ;
        /*00b0*/                   ISETP.NE.U32.AND P3, PT, R211, 0x4, PT ;
        /*00c0*/               @P3 BRA `(.L_x_3) ;
        /*00d0*/                   MUFU.EX2 R37, R37 ;
        /*00e0*/               @P0 BRA `(.L_x_4) ;
        /*00f0*/                   LDSM.16.M88.4 R36, [R68] ;
        /*0100*/                   SEL R41, R36, RZ, !P2 ;
        /*0110*/                   STSM.16.M88.4 [R68], R36 ;
.L_x_4:
        /*0120*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR36].tnspA, RZ, !UPT ;
        /*0130*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR12].tnspA, R24 ;
        /*0140*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR20].tnspA, R24 ;
        /*0150*/                   HGMMA.64x8x16.F32.BF16 R24, R36, gdesc[UR28], R24, gsb0 ;
        /*0160*/                   ISETP.NE.U32.AND P0, PT, R132, R15, PT ;
        /*0170*/               @P0 BRA `(.L_x_2) ;
        /*0180*/                   EXIT ;
.L_x_9:
        /*0190*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R9+URZ], R8 ;
        /*01a0*/              @!P0 NANOSLEEP.SYNCS 0x989680 ;
        /*01b0*/              @!P0 BRA `(.L_x_9) ;
        /*01c0*/                   BRA `(.L_x_1) ;
"""
PRODUCE = {"control": 3, "copy": 2}
ATTEND = {"control": 6, "integer": 9, "multiply": 1, "shared": 1, "special": 1, "tensor": 8}


def test_inner_loops_count_as_often_as_they_run_and_waits_and_last_tiles_do_not():
    counted = instructions.count(CODE, PLAN)
    assert counted["produce"] == PRODUCE and counted["attend"] == ATTEND
    assert counted["flops"] == 8 * 2 * 64 * 8 * 16
    # Eight right operands of 8 x 16 values, seven left ones of 64 x 16, and 4 warps' 256 bytes.
    assert counted["shared_bytes"] == 2 * 16 * (8 * 8 + 7 * 64) + 4 * 256


def test_shares_are_cycles_of_a_pipe_over_cycles_of_the_bytes():
    shares = instructions.shares(instructions.count(CODE, PLAN), PLAN)
    bytes_a_cycle = 4.8e12 / (132 * 1.83e9)
    budget = 64 * (64 + 64) * 2 / bytes_a_cycle
    expected = {
        "issue": 26 + 5, "fp32": 0, "integer": 2 * 10, "special": 8, "shuffle": 0,
        "tensor": 8 * 4, "shared": (2 * 16 * (64 + 448) + 1024 + 2 * 8192) / 128,
    }  # fmt: skip
    assert shares == pytest.approx({pipe: need / budget for pipe, need in expected.items()})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("R211, 0x4, PT", "R211, 0x5, PT", "a loop was counted wrongly"),
        ("R211, 0x4, PT", "R211, R5, PT", "no constant number of passes"),
        ("UTMALDG", "UBLKCP", "0 copies a tile, the plan 131072 and 2"),
        ("MUFU.EX2", "NEWOP.EX2", "the instruction NEWOP is unknown"),
    ],
)
def test_code_that_is_not_understood_is_refused(old, new, message):
    with pytest.raises(LrkvError, match=message):
        instructions.count(CODE.replace(old, new), PLAN)


def _missing():
    try:
        return not [version(name) for name in WHEELS]
    except PackageNotFoundError:
        return True


@pytest.mark.cuda
@pytest.mark.skipif(
    _missing(), reason=f"counting instructions needs the wheels {', '.join(WHEELS)}"
)
def test_one_query_leaves_bytes_the_bound(tmp_path):
    """No pipe needs the cycles that the bytes take, in `full` neither: docs/decode.md."""
    cases = ("128m/mha", "128m/lrkv-full", "2.5b/lrkv-full", "6.3b/lrkv-full")
    names = [f"{case}/1/contiguous" for case in cases]
    script, out = ROOT / "experiments" / "kernel_instructions.py", tmp_path / "out.json"
    command = [sys.executable, str(script), *names, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert 0 < max(row["shares"].values()) < 1, row["name"]
