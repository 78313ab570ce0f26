"""Kernels for CPUs: the inner loop that a C++ compiler makes, and its time by LLVM's models."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcftensor.kernels import cpp, cpu
from mcftensor.kernels.program import Program


@dataclass(frozen=True)
class Assembly:
    """What lines of an assembly mean.

    Attributes:
        jump: a jump, with its label.
        vector: an operand that is a vector.
        stack: an operand on the stack.
        scalar: arithmetic on one number, or the move of one lane.
    """

    jump: re.Pattern[str]
    vector: re.Pattern[str]
    stack: re.Pattern[str]
    scalar: re.Pattern[str]


X86 = Assembly(
    jump=re.compile(r"j\w+\s+(\.L\w+)$"),
    vector=re.compile(r"%[xyz]mm"),
    stack=re.compile(r"\(%r[sb]p"),
    scalar=re.compile(
        r"v?(add|sub|mul|div|sqrt|min|max|u?comi|round|rndscale|fn?m(add|sub)\d+)s[sd]\b"
        r"|v?cvt\w*2s[sd]|v?cvtt?s[sd]2|imul|vp(ins|ext)r[bwd]|v(insert|extract)ps"
    ),
)
ARM = Assembly(
    jump=re.compile(r"(?:b(?:\.\w+)?|t?cbn?z|tbn?z)\s.*?(\.L\w+)$"),
    vector=re.compile(r"\b[vqd]\d"),
    stack=re.compile(r"\[(sp|x29)"),
    scalar=re.compile(r"f(?!mov|csel)\w+\s[hsd]\d|[su]cvtf\s[hsd]\d|mul\sx"),
)


@dataclass(frozen=True)
class InstructionSet:
    """A set of instructions, and a compiler's options for it.

    Attributes:
        options: of the compiler.
        width: bytes of a vector.
        assembly: what its lines mean.
        crosses: whether it takes the cross compiler of the package ziglang.
    """

    options: tuple[str, ...]
    width: int
    assembly: Assembly = X86
    crosses: bool = False


SETS = {
    "AVX-512": InstructionSet(("-march=x86-64-v4",), 64),
    "AVX2": InstructionSet(("-march=x86-64-v3",), 32),
}
NEON = InstructionSet(("-target", "aarch64-linux-gnu"), 16, ARM, crosses=True)

# What an instruction does, by the first pattern that its name matches.
_KINDS = {
    "divide": r"v?div",
    "root": r"v?sqrt",
    "convert": r"v?cvt",
    "compare": r"v?p?cmp|vptestn?m|vfpclass|k(or)?test",
    "mask": r"k(and|or|xor|not|mov|unpck|shift)|vpmovmskb|vpmov[mbwdq]2?[mbwdq]$",
    "shift": r"vp(s[lr]l|sra|rol|ror|sh[lr]d)",
    "shuffle": r"vp?(perm|shuf|unpck|ack|insert|extract|blend|broadcast|align)"
    r"|vpmov([sz]x|[wdq][bwd])",
    "float": r"v(add|sub|mul|max|min|fn?m|range|round|getexp|getmant|scalef)",
    "integer": r"vp(add|sub|mul|max|min|abs|and|or|xor|tern|sign)|v(and|or|xor)",
    "move": r"v?mov",
}


@dataclass(frozen=True)
class Loop:
    """The inner loop of a kernel.

    Attributes:
        lines: its instructions, in the assembler's words.
        elements: the elements that one pass through it computes.
        counts: instructions an element, by kind; loads and stores are counted separately, also if
            an instruction does something else as well. Of x86 alone.
        spills: loads and stores an element of vectors that registers have no room for.
        scalar: those lines that compute with one number, or move one lane.
    """

    lines: tuple[str, ...]
    elements: int
    counts: dict[str, float]
    spills: float
    scalar: tuple[str, ...]

    @property
    def instructions(self) -> float:
        """Return vector instructions an element, without loop control."""
        return sum(x for kind, x in self.counts.items() if kind not in ("load", "store"))


def loop_of(program: Program, target: InstructionSet, scratch: Path) -> Loop:
    """The loop over whole blocks.

    Raises:
        FileNotFoundError: there is no C++ compiler.
    """
    source, assembly = cpp.source(program, target.width), target.assembly
    (scratch / "kernel.cpp").write_text(source)
    flags = [flag for flag in cpu.FLAGS if flag != "-shared"]
    command = [*compiler(target), *flags, *target.options, "-S", "kernel.cpp", "-o", "kernel.s"]
    caches = {f"ZIG_{kind}_CACHE_DIR": str(scratch / "zig") for kind in ("GLOBAL", "LOCAL")}
    subprocess.run(command, cwd=scratch, check=True, capture_output=True, env=os.environ | caches)
    lines = _largest_loop((scratch / "kernel.s").read_text().splitlines(), assembly)
    (lanes,) = re.findall(r"#define LANES (\d+)", source)
    (blocks,) = re.findall(r"i \+ (\d+) \* LANES <= end", source)
    elements = int(lanes) * int(blocks)
    counts = Counter(kind for line in lines for kind in _kinds(line))
    on_stack = [x for x in lines if assembly.vector.search(x) and assembly.stack.search(x)]
    return Loop(
        tuple(lines),
        elements,
        {kind: count / elements for kind, count in counts.items()},
        len(on_stack) / elements,
        tuple(filter(assembly.scalar.match, lines)),
    )


def compiler(target: InstructionSet) -> list[str]:
    """Return the command of the compiler for a set of instructions.

    Raises:
        FileNotFoundError: it is not installed.
    """
    if not target.crosses:
        command = cpu.find()
    elif importlib.util.find_spec("ziglang"):
        command = [sys.executable, "-m", "ziglang", "c++"]
    else:
        command = None
    if command is None:
        raise FileNotFoundError("no C++ compiler for this set of instructions")
    return command


def _largest_loop(text: Sequence[str], assembly: Assembly) -> list[str]:
    """Of the loops without another in them the one with the most instructions on vectors.

    The function `careful`, for the rest of a row and for unusual blocks, does not count.
    """
    bounds = re.compile(r"_ZL7careful\S*:|\s+\.size\s+_ZL7careful")
    ends = [i for i, line in enumerate(text) if bounds.match(line)]
    for start, end in reversed(list(zip(ends[::2], ends[1::2], strict=True))):
        text = [*text[:start], *text[end:]]
    found = [re.match(r"\.L\w+(?=:)", line) for line in text]
    labels = {label[0]: i for i, label in enumerate(found) if label}
    loops = []
    for end, line in enumerate(text):
        jump = assembly.jump.match(line.strip())
        if jump and labels.get(jump[1], end) < end:
            loops.append((labels[jump[1]], end))
    inner = [
        (start, end)
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    bodies = [[x.strip() for x in text[start : end + 1] if _is_code(x)] for start, end in inner]
    return max(bodies, key=lambda body: sum(bool(assembly.vector.search(x)) for x in body))


def _is_code(line: str) -> bool:
    return line.startswith("\t") and not line.strip().startswith((".", "#", "//"))


def _kinds(line: str) -> list[str]:
    """What an instruction on vectors counts as."""
    name, _, operands = line.partition("\t")
    if not (X86.vector.search(operands) or re.search(r"%k\d", operands)):
        return []
    *sources, target = re.split(r",\s*(?![^(]*\))", operands)
    found = [next((k for k, pattern in _KINDS.items() if re.match(pattern, name)), "other")]
    if "(" in target:
        return [*found[: found != ["move"]], "store"]
    if any("(" in x for x in sources):
        return [*found[: found != ["move"]], "load"]
    return found


def cycles(loop: Loop, model: str) -> float:
    """Cycles an element, of a core that reads and writes its nearest cache, by a model of LLVM's.

    Raises:
        FileNotFoundError: llvm-mca is not installed.
    """
    tool = analyzer()
    command = [tool, "-mtriple=x86_64", f"-mcpu={model}", "-iterations=100"]
    text = "\n".join(line for line in loop.lines if not line.startswith("j"))
    said = subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout
    (total,) = re.findall(r"^Total Cycles:\s+(\d+)", said, re.MULTILINE)
    return int(total) / 100 / loop.elements


def analyzer() -> str:
    """Return the newest installed llvm-mca.

    Raises:
        FileNotFoundError: there is no llvm-mca.
    """
    for name in (*(f"llvm-mca-{version}" for version in range(25, 15, -1)), "llvm-mca"):
        path = shutil.which(name)
        if path:
            return path
    raise FileNotFoundError("llvm-mca, of the package llvm, is not installed")
