"""Kernels for GPUs: what Triton makes of them for NVIDIA's and AMD's, without one being there."""

from __future__ import annotations

import importlib
import linecache
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcftensor.kernels import triton as kernels
from mcftensor.kernels.program import Program

_BRANCH = """\
    if begin + BLOCK <= length:
        element(row, numbers + owner * STEP, begin, length, BLOCK, ALIGNED, True)
    else:
        element(row, numbers + owner * STEP, begin, length, BLOCK, ALIGNED, False)
"""
_WHOLE = "    element(row, numbers + owner * STEP, begin, length, BLOCK, ALIGNED, True)\n"

# What an instruction does, by the first pattern that its name matches.
_NVIDIA = {
    "memory": r"LD|ST",
    "special": r"MUFU",
    "convert": r"[FI]2[FI]|F2FP|FRND",
    "double": r"D(ADD|MUL|FMA|SETP|MNMX)",
    "float": r"F(ADD|MUL|FMA)|FFMA",
    "multiply": r"IMAD(?!\.(MOV|SHL|U32|IADD|X))",
    "integer": r"I|V|LOP|PLOP|SHF|PRMT|SEL|SGXT|LEA|BMSK|P2R|R2P|F(SEL|SETP|MNMX|CHK|LO)",
    "move": r"MOV|S2|CS2|U|R2U|LDC",
    "control": r"BRA|BS|EXIT|CALL|RET|NOP|BAR|WARP|YIELD|DEPBAR|CCTL|ERR|RPC",
}
_AMD = {
    "memory": r"global_|buffer_|flat_",
    "special": r"v_(rcp|rsq|sqrt|exp|log|sin|cos)",
    "convert": r"v_cvt",
    "double": r"v_\w*f64",
    "float": r"v_(pk_)?(add|sub|subrev|mul|fma|mac|fmac|div|ldexp|frexp|max|min|med3)\w*_f32",
    "integer": r"v_",
    "scalar": r"s_",
    "shared": r"ds_",
}


@dataclass(frozen=True)
class Code:
    """The path of whole blocks through a kernel, without the detours of divisions.

    Attributes:
        counts: instructions an element, by kind.
        registers: the registers of a thread.
        spills: bytes of registers that a thread has no room for.
        warps: the warps of a block of threads.
        assembly: the whole assembly.
        text: its source, or other reports of the compiler.
    """

    counts: dict[str, float]
    registers: int
    spills: int
    warps: int
    assembly: str
    text: str

    @property
    def instructions(self) -> float:
        """Of vectors, an element."""
        return sum(x for kind, x in self.counts.items() if kind not in ("control", "scalar"))


def code_of(program: Program, target: str, scratch: Path, *, whole: bool = True) -> Code:
    """Return the kernel for compute capability `"sm_90"`, say, or for AMD's `"gfx942"`: its path of
    whole blocks alone, or all of it, as in launches.

    If registers do not suffice it has more threads, as launches do.

    Raises:
        ImportError: Triton is not installed.
    """
    lanes = lanes_of(target)
    warps = kernels.warps(program, lanes)
    while True:
        made = _compiled(program, target, warps, whole)
        is_amd = target.startswith("gfx")
        code = _amd(made, warps, lanes) if is_amd else _nvidia(made, warps, scratch)
        if not code.spills or warps * lanes >= kernels.MOST_THREADS:
            return code
        warps *= 2


def lanes_of(target: str) -> int:
    """The number of threads of a warp: 64 on AMD's GPUs for data centers, elsewhere 32."""
    return 64 if target.startswith("gfx9") else 32


def _compiled(program: Program, target: str, warps: int, whole: bool) -> Any:
    triton = importlib.import_module("triton")
    gpu = importlib.import_module("triton.backends.compiler").GPUTarget
    amd = target.startswith("gfx")
    source = kernels.source(program, (False,) * len(program.signature.scalars), rounds=not amd)
    assert _BRANCH in source
    source = source.replace(_BRANCH, _WHOLE) if whole else source
    name = f"<kernel {id(program)}, {whole}>"  # Triton reads it where files are
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    module: dict[str, Any] = {"__name__": "whole"}
    exec(compile(source, name, "exec"), module)
    options = {"STEP": 0, "BLOCK": kernels.THREAD_BLOCK, "ALIGNED": True}
    unit = triton.compiler.ASTSource(
        fn=module["kernel"],
        signature={"rows": "*i64", "owners": "*i32", "numbers": "*i64"}
        | dict.fromkeys(options, "constexpr"),
        constexprs=options,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    kind = gpu("hip", target, lanes_of(target)) if amd else gpu("cuda", int(target[3:]), 32)
    return triton.compile(
        unit, target=kind, options={"enable_fp_fusion": False, "num_warps": warps}
    ).asm


def _nvidia(made: Any, warps: int, scratch: Path) -> Code:
    triton = importlib.import_module("triton")
    path = scratch / "kernel.cubin"
    path.write_bytes(made["cubin"])

    def said(tool: Any, *options: str) -> str:
        command = [tool.path, *options, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    text = said(triton.knobs.nvidia.nvdisasm, "-c")
    usage = said(triton.knobs.nvidia.cuobjdump, "-res-usage")
    (registers,) = re.findall(r"REG:(\d+)", usage)
    names = [
        name
        for block in _blocks(text)
        if not any(x.startswith("CALL") for x in block)
        for name in block
    ]
    share = 32 * warps / kernels.THREAD_BLOCK  # of an instruction of a thread, an element
    counts = Counter(_kind(name, _NVIDIA) for name in names)
    return Code(
        {kind: count * share for kind, count in counts.items()},
        int(registers),
        sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        warps,
        text,
        made["ptx"],
    )


def _blocks(text: str) -> list[list[str]]:
    """Names of instructions up to the end of the kernel, by basic blocks."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if re.match(r"\.L\w+:", line):
            blocks.append([])
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]+)", line)
        if found:
            blocks[-1].append(found[2])
            if found[2].startswith("EXIT") and not found[1]:
                break
            if found[2].startswith("BRA"):
                blocks.append([])
    return blocks


def _amd(made: Any, warps: int, lanes: int) -> Code:
    text: str = made["amdgcn"]
    body = text.partition("s_endpgm")[0]
    names = re.findall(r"^\s+([a-z]+_\w+)", body, re.MULTILINE)
    share = warps * lanes / kernels.THREAD_BLOCK
    counts = Counter(_kind(name, _AMD) for name in names)
    (registers,) = re.findall(r"\.vgpr_count:\s+(\d+)", text)
    (spills,) = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
    return Code(
        {kind: count * share for kind, count in counts.items()},
        int(registers),
        4 * int(spills),
        warps,
        body,
        text,
    )


def _kind(name: str, kinds: dict[str, str]) -> str:
    return next((kind for kind, pattern in kinds.items() if re.match(pattern, name)), "other")
