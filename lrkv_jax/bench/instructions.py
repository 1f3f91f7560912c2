"""What a decode kernel's loop over tiles asks of a multiprocessor, beside the time of its bytes.

Read from the machine code of the compiled kernel: no GPU is needed, and nothing is timed. Per tile
of 64 tokens the instructions of the producing and of the attending warpgroup are counted, in the
path that a whole tile takes if no barrier has to be waited for, and with inner loops as often as
they run. What they would need of each pipe is compared with the cycles that the tile's bytes take
at the full bandwidth of an H200.

Two things that the plan knows are compared with the code: FLOPs of the products, and copies. A
loop whose passes were counted wrongly does not pass.
"""

import re
from collections import Counter
from typing import NamedTuple

from lrkv_jax.errors import LrkvError
from lrkv_jax.hardware import HARDWARE
from lrkv_jax.kernels.split_kv.plan import ITEMSIZE, MULTIPROCESSORS, SLOT_BYTES, WIDTH
from lrkv_jax.kernels.split_kv.schedule import TILE

# The clock of the data sheet's tensor FLOP/s: 989.4e12 / (132 · 1.83e9) = 4096 FLOP a cycle. At
# the 1.98 GHz that a GPU may run at, bytes take 8 % more cycles, and shares are 8 % less.
CLOCK = 1.83e9
TENSOR_FLOPS = 4096
SHARED_BYTES = 128  # a cycle: CUDA C++ Programming Guide, "Shared Memory", 32 banks of 4 bytes
SCHEDULERS = 4  # of a multiprocessor, one warp's instruction a cycle each
# Lanes a cycle and multiprocessor, compute capability 9.0: CUDA C++ Programming Guide, table
# "Throughput of Native Arithmetic Instructions". Integer stands for comparison and selection too.
LANES = {"fp32": 128, "integer": 64, "special": 16, "shuffle": 32}
KINDS = {
    "tensor": "HGMMA",
    "fp32": "FADD FFMA FMUL",
    "multiply": "IMAD",  # and, as IMAD.MOV, moves: the FP32 pipe's, at half its rate
    "special": "MUFU",
    "shuffle": "SHFL",
    "shared": "LDS LDSM STS STSM",
    "global": "LD LDG ST STG",
    "copy": "UBLKCP UTMALDG",
    "integer": "CS2R F2FP FMNMX FSEL FSETP IABS IADD3 ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P SEL "
    "SHF VIADD VIADDMNMX VIMNMX VOTE",
    "uniform": "R2UR S2UR UIADD3 UIMAD UISETP ULDC ULEA ULOP3 UMOV UPLOP3 UPRMT USEL USHF UP2UR "
    "UR2UP VOTEU",
    "control": "BAR BRA BSSY BSYNC CALL CCTL DEPBAR ELECT EXIT FENCE LDC MEMBAR NANOSLEEP NOP RET "
    "S2R SYNCS WARPGROUP WARPSYNC YIELD",
}
KIND = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes.split()}
LINE = r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*)"
BYTES = {"": 4, "U8": 1, "U16": 2, "64": 8, "128": 16, "4": 16, "2": 8, "1": 4}  # a lane


class Instruction(NamedTuple):
    """One instruction; `target` is the index that a branch leads to."""

    guard: str
    opcode: str
    operands: str
    target: int | None

    @property
    def kind(self):
        name = self.opcode.split(".")[0]
        if name not in KIND:
            raise LrkvError(
                f"the instruction {name} is unknown: add it to bench.instructions.KINDS"
            )
        return KIND[name]


class Loop(NamedTuple):
    """Instructions `first` to `last`, a branch backwards that is taken while the loop goes on."""

    first: int
    last: int

    def indices(self):
        return range(self.first, self.last + 1)


def parse(text):
    """The instructions of nvdisasm's listing, with or without control codes."""
    labels, lines = {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.search(LINE, line):
            lines.append((found[1] or "", found[2], found[3].strip()))
    code = []
    for guard, opcode, operands in lines:
        leads = opcode.split(".")[0] == "BRA" and re.search(r"(\.L_x_\d+)", operands)
        code.append(Instruction(guard, opcode, operands, labels[leads[1]] if leads else None))
    return code


def loops(code):
    """Every loop that ends with a condition; waiting for a barrier is none."""
    found = []
    for index, line in enumerate(code):
        if line.target is None or line.target > index or not (line.guard or "P" in line.operands):
            continue
        loop = Loop(line.target, index)
        if not any(code[i].opcode.startswith("NANOSLEEP") for i in loop.indices()):
            found.append(loop)
    return found


def passes(code, loop):
    """How often a loop with a fixed count runs, from the comparison at its end."""
    end = code[loop.last]
    predicate = (end.guard or end.operands.split(",")[0]).lstrip("!")
    for index in range(loop.last - 1, loop.first - 1, -1):
        _, opcode, operands, _ = code[index]
        names = [name.strip() for name in operands.split(",")]
        if opcode.startswith("PLOP3") and names[0] == predicate:
            predicate = next(name for name in names[2:] if name.startswith("UP") and name != "UPT")
        elif opcode.startswith(("ISETP", "UISETP")) and names[0] == predicate:
            left, right = names[2].removesuffix(".reuse"), names[3].removesuffix(".reuse")
            if _constant(left) is not None:
                left, right = right, left
            limit, step = _value(code, right, loop.first), _step(code, loop, left)
            start = _value(code, left, loop.first)
            if None in (limit, step, start):
                return None
            count, rest = divmod(limit - start, step)
            return None if rest or count < 1 else count
    return None


def _constant(operand):
    if operand in ("RZ", "URZ", "SRZ"):
        return 0
    return int(operand, 16) if re.fullmatch(r"-?0x[0-9a-f]+", operand) else None


def _value(code, operand, before):
    """The constant that an operand is, or was last set to before an instruction; or None."""
    while (value := _constant(operand)) is None:
        # CS2R sets two registers.
        pair = re.sub(r"\d+$", lambda number: str(int(number[0]) - 1), operand)
        for index in reversed(range(before)):
            guard, opcode, operands, _ = code[index]
            names = [name.strip().removesuffix(".reuse") for name in operands.split(",")]
            if names[0] == operand or (opcode == "CS2R" and names[0] == pair):
                break
        else:
            return None
        if guard or not re.match(r"U?MOV|R2UR|CS2R|IMAD\.(MOV|U32)", opcode):
            return None
        operand, before = names[-1], index
    return value


def _step(code, loop, counter):
    for _, opcode, operands, _ in (code[index] for index in loop.indices()):
        # A carry may be put out into a predicate, between the result and what is added.
        names = [name.strip().removesuffix(".reuse") for name in operands.split(",")]
        names = [name for name in names if not re.fullmatch(r"U?P\d", name)]
        if names[:2] == [counter, counter] and re.match("U?IADD3|VIADD", opcode):
            return _constant(names[2])
    return None


def steady_path(code, loop):
    """{index: times} of one pass of a loop: the shortest way, with inner loops run out.

    The shortest way waits for no barrier and leaves out what only a sequence's last tile needs.
    """
    inner = [other for other in loops(code) if other != loop and _within(other, loop)]
    times = dict.fromkeys(loop.indices(), 1)
    unknown = set()
    for other in inner:
        count = passes(code, other)
        for index in other.indices():
            times[index] *= count or 1
            if count is None:
                unknown.add(index)
    cost, follow = {loop.last: 1}, {}
    for index in reversed(range(loop.first, loop.last)):
        guard, opcode, _, target = code[index]
        ways = [] if target is not None and not guard and opcode == "BRA" else [index + 1]
        if target is not None and index < target <= loop.last:
            ways.append(target)
        ways = [way for way in ways if way in cost]
        if ways and not (opcode == "EXIT" and not guard):
            follow[index] = min(ways, key=cost.__getitem__)
            cost[index] = times[index] + cost[follow[index]]
    path, index = {}, loop.first
    while index != loop.last:
        path[index] = times[index]
        index = follow[index]
    if unknown & path.keys():
        raise LrkvError("a loop inside the loop over tiles has no constant number of passes")
    return path | {loop.last: 1}


def _within(inner, outer):
    return outer.first <= inner.first and inner.last <= outer.last


def _innermost(code, opcode):
    """The smallest loop with most of the instructions of this name."""

    def order(loop):
        named = sum(code[index].opcode.startswith(opcode) for index in loop.indices())
        return -named, loop.last - loop.first

    products = [i for i, line in enumerate(code) if line.opcode.startswith("HGMMA")]
    found = loops(code)
    if opcode != "HGMMA":
        # What the attending warpgroups copy is not of a tile: queries and factors.
        found = [loop for loop in found if not loop.first <= products[0] <= loop.last]
    if not products or not found:
        raise LrkvError(f"the code has no loop with {opcode}")
    return min(found, key=order)


def count(text, plan):
    """{"attend", "produce": {kind: instructions a warp and tile}, "flops", "shared_bytes"}.

    FLOPs and bytes of shared memory are one attending warpgroup's. Raises `LrkvError` if the
    products or the copies found are not the plan's.
    """
    code = parse(text)
    attend = steady_path(code, _innermost(code, "HGMMA"))
    produce = steady_path(code, _innermost(code, "UTMALDG"))
    flops = shared = 0
    for index, times in attend.items():
        _, opcode, operands, _ = code[index]
        if product := re.match(r"HGMMA\.64x(\d+)x16", opcode):
            flops += times * 2 * TILE * int(product[1]) * 16
            rows = int(product[1]) + (0 if re.match(r"R\d+, R\d+", operands) else TILE)
            shared += times * rows * 16 * ITEMSIZE
        elif code[index].kind == "shared":
            # Without what lanes that read one address save: an upper bound.
            shared += (
                times * SCHEDULERS * 32 * BYTES[opcode.split(".")[-1] if "." in opcode else ""]
            )
    copies = sum(times for i, times in produce.items() if code[i].opcode.startswith("UTMALDG"))
    expected = tile_flops(plan), tile_copies(plan)
    if (flops, copies) != expected:
        raise LrkvError(
            f"the code has {flops} FLOP and {copies} copies a tile, the plan {expected[0]} and "
            f"{expected[1]}: a loop was counted wrongly"
        )

    def by_kind(path):
        kinds = Counter()
        for index, times in path.items():
            kinds[code[index].kind] += times
        return dict(sorted(kinds.items()))

    kinds = {"attend": by_kind(attend), "produce": by_kind(produce)}
    return kinds | {"flops": flops, "shared_bytes": shared}


def tile_flops(plan):
    """FLOPs of the products of one tile and attending warpgroup."""
    latents = plan.heads * plan.rank_blocks
    narrow = plan.key_blocks + plan.value_blocks + latents * (1 if plan.full else 2)
    wide = 2 * latents if plan.full else 0
    return 2 * TILE * WIDTH * (narrow * plan.columns + wide * WIDTH)


def tile_copies(plan):
    """Copies that the producing warpgroup starts for one tile."""
    own = 2 * plan.heads * plan.rank_blocks + bool(plan.norm_heads)
    return plan.tile_slots + plan.warpgroups * own


def tile_bytes(plan):
    """Bytes of the cache for one tile and CTA, what several units read counted once."""
    widths = sum(plan.key_widths) + (0 if plan.values_in_keys else plan.value_width)
    shared = widths * plan.groups / plan.units
    own = plan.warpgroups * plan.heads * 2 * plan.rank
    norms = 1 / plan.units if plan.shared_norm else plan.warpgroups * plan.norm_heads
    return TILE * (ITEMSIZE * (shared + own) + 4 * norms)


def tile_cycles(plan):
    """Cycles that a tile's bytes take at a multiprocessor's share of the memory's bandwidth."""
    return tile_bytes(plan) * MULTIPROCESSORS * CLOCK / HARDWARE["h200"].memory_bandwidth


def shares(counted, plan):
    """{pipe: cycles that a tile needs of it, as a share of the cycles that its bytes take}."""
    everything = Counter()
    for kinds, warpgroups in ((counted["produce"], 1), (counted["attend"], plan.warpgroups)):
        for kind, number in kinds.items():
            everything[kind] += warpgroups * number
    # A warpgroup is one warp for each scheduler. Multiplications are counted as if they shared the
    # pipe of other integer instructions: an upper bound.
    everything["integer"] += everything["multiply"]
    lanes = 32 * SCHEDULERS
    cycles = {kind: everything[kind] * lanes / rate for kind, rate in LANES.items()}
    cycles["issue"] = everything.total() - everything["multiply"]
    moved = plan.warpgroups * counted["shared_bytes"] + tile_copies(plan) * SLOT_BYTES
    cycles["shared"] = moved / SHARED_BYTES
    cycles["tensor"] = plan.warpgroups * counted["flops"] / TENSOR_FLOPS
    return {pipe: need / tile_cycles(plan) for pipe, need in sorted(cycles.items())}
