"""What must hold of a kernel's machine code: no spills, no products that are contracted with sums,
no flushed subnormals, and loads and stores as wide as they can be."""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from machine_code.gpus import Code, code_of
from mcftensor.kernels.program import Program, Signature, record
from mcftensor.kernels.triton import THREAD_BLOCK


@dataclass(frozen=True)
class Target:
    """What a multiprocessor, or one of AMD's compute units, holds.

    Attributes:
        lanes: threads of a warp.
        warps: at most, of all blocks together.
        registers: of 32 bits.
        most: registers that a thread can have.
        blocks: at most.
    """

    lanes: int
    warps: int
    registers: int
    most: int
    blocks: int


# CUDA C++ programming guide, "technical specifications per compute capability". AMD: a unit has
# four SIMDs with 512 registers in each lane and eight waves at most (CDNA 3 instruction set).
_LARGE = Target(lanes=32, warps=64, registers=65536, most=255, blocks=32)
_CONSUMER = Target(lanes=32, warps=48, registers=65536, most=255, blocks=24)
_CDNA = Target(lanes=64, warps=32, registers=4 * 512 * 64, most=512, blocks=16)
TARGETS = {
    "sm_80": _LARGE,
    "sm_89": _CONSUMER,
    "sm_90": _LARGE,
    "sm_100": _LARGE,
    "sm_120": _CONSUMER,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
}

_NVIDIA_FUSED = re.compile(r"\s[FD]FMA(2?)\b")  # HFMA2 of zeros are moves
_AMD_FUSED = re.compile(r"\sv_(pk_)?(?:fma|fmac|mad|mac|fmaak|fmamk)_(?:f16|f32|f64)")
# Loads and stores without a predicate in PTX. A load of a single 64-bit word reads a table of the
# launch; one of two 32-bit words reads elements.
_NVIDIA_ACCESS = {
    kind: re.compile(rf"^\s*{name}\.global(?:\.v(\d))?\.b(\d+)", re.MULTILINE)
    for kind, name in (("load", "ld"), ("store", "st"))
}
# Elements are read at a thread's own address ("off") or at a scalar base. So are tables, from their
# third word on and within 1024 bytes, the least distance of a thread's elements.
_AMD_ACCESS = {
    "load": re.compile(
        r"\bglobal_load_(\w+) [^,]+, [^,]+, (?:off\b|s\[\d+:\d+\](?! offset:\d{2,3}\b))"
    ),
    "store": re.compile(r"\bglobal_store_(\w+)"),
}
_AMD_WIDTHS = {"dwordx4": 16, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2}


@dataclass(frozen=True)
class Inspection:
    """One kernel for one target.

    Attributes:
        registers: the registers of a thread.
        warps: the warps of a block.
        occupancy: the warps that a unit holds by registers and blocks, over its maximum.
        spills: the spilled bytes of a thread.
        fused: products contracted with sums in the text; packed instructions count one by one.
        asked: the number in the program, its quotients and its roots.
        flushes: whether subnormal numbers become zero.
        loads: the widths in bytes of a thread's loads from whole blocks.
        stores: the widths of its stores.
        narrow: the number of loads and stores that are narrower than they could be.
    """

    registers: int
    warps: int
    occupancy: float
    spills: int
    fused: int
    asked: int
    flushes: bool
    loads: list[int]
    stores: list[int]
    narrow: int

    @property
    def faults(self) -> list[str]:
        """Return the violated requirements, in words."""
        found = {
            f"spills {self.spills} bytes": self.spills,
            f"{self.fused} fused products, {self.asked} asked for": self.fused > self.asked,
            "flushes subnormals": self.flushes,
            f"{self.narrow} narrow loads and stores": self.narrow,
        }
        return [text for text, is_so in found.items() if is_so]


def inspect(program: Program, target: str, scratch: Path) -> Inspection:
    """Compile the kernel as it is launched, and read its machine code."""
    code = code_of(program, target, scratch, whole=False)
    unit = TARGETS[target]
    elements = THREAD_BLOCK // (unit.lanes * code.warps)
    signature = program.signature
    # Some operands are not read, such as a momentum in the first step.
    inputs = [x.dtype for x in program.instructions if x.name == "vector"]
    outputs = [x for i, x in enumerate(signature.outputs) if not signature.shares(i)]
    if signature.accumulates:  # by atomic additions
        outputs = []
    loads, stores = _widths(inputs, elements), _widths(outputs, elements)
    found = {kind: _accesses(code, target, kind) for kind in ("load", "store")}
    return Inspection(
        code.registers,
        code.warps,
        occupancy(unit, code.registers, code.warps),
        code.spills,
        fused(code, target),
        _asked(program, target, elements),
        _flushes(code, target, program),
        sorted(loads & found["load"]),
        sorted(stores & found["store"]),
        ((loads - found["load"]) + (stores - found["store"])).total(),
    )


def occupancy(unit: Target, registers: int, warps: int) -> float:
    """The share of its warps that a unit has at a time."""
    each = -(-max(registers, 1) // 8) * 8 * unit.lanes  # they are given out by eights
    blocks = min(unit.registers // (each * warps), unit.blocks, unit.warps // warps)
    return blocks * warps / unit.warps


def fused(code: Code, target: str) -> int:
    """Contracted products in the text of a kernel, the subroutines of division aside."""
    text = _main(code, target)
    pattern = _AMD_FUSED if target.startswith("gfx") else _NVIDIA_FUSED
    return sum(2 if packed else 1 for packed in pattern.findall(text))


def _main(code: Code, target: str) -> str:
    """The kernel's own text, without subroutines that divide."""
    if target.startswith("gfx"):
        return code.text.partition(".section")[0]
    return re.split(r"^\s+\.type\s+\$__internal|^\$__internal|^\$kernel\$__internal", code.assembly,
                    maxsplit=1, flags=re.MULTILINE)[0]  # fmt: skip


def _asked(program: Program, target: str, elements: int) -> int:
    """How many a kernel may have: two ways, of whole blocks and of others, with so many elements a
    thread; numbers that all elements share count as much."""
    each = 0
    for x in program.instructions:
        if x.name == "fma":
            each += 1
        elif x.name in ("div", "sqrt"):
            each += _of_one(x.name, x.dtype, target)
    return 2 * elements * each


@functools.cache
def _of_one(name: str, dtype: torch.dtype, target: str) -> int:
    """The fused products of one correctly rounded quotient or root, by a kernel of that alone."""

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        return [vectors[0] / vectors[1] if name == "div" else vectors[0].sqrt()]

    program = record(body, Signature((dtype,) * (2 if name == "div" else 1), (), (dtype,)))
    with tempfile.TemporaryDirectory() as folder:
        code = code_of(program, target, Path(folder), whole=False)
    elements = THREAD_BLOCK // (TARGETS[target].lanes * code.warps)
    return -(-fused(code, target) // (2 * elements))


def _flushes(code: Code, target: str, program: Program) -> bool:
    """Whether a kernel asks for it. Quotients and roots may, inside, where nothing is subnormal."""
    if target.startswith("gfx"):
        modes = re.findall(r"\.amdhsa_float_denorm_mode_(?:32|16_64) (\d)", code.text)
        return modes != ["3", "3"]
    divides = any(x.name in ("div", "sqrt") for x in program.instructions)
    return ".ftz" in code.text or (not divides and ".FTZ" in _main(code, target))


def _widths(dtypes: Sequence[torch.dtype], elements: int) -> Counter[int]:
    """How many accesses of each width a thread needs at least for so many elements of these."""
    widths: Counter[int] = Counter()
    for dtype in dtypes:
        size = elements * dtype.itemsize
        widths[min(size, 16)] += -(-size // 16)
    return widths


def _accesses(code: Code, target: str, kind: str) -> Counter[int]:
    """The number of loads or stores of elements, by their widths in bytes."""
    if target.startswith("gfx"):
        found = _AMD_ACCESS[kind].findall(_main(code, target))
        return Counter(_AMD_WIDTHS.get(width, 1) for width in found)
    return Counter(
        int(many or 1) * int(bits) // 8
        for many, bits in _NVIDIA_ACCESS[kind].findall(code.text)
        if many or bits != "64"
    )
