"""Kernels for x86-64: the inner loop that the C++ compiler makes, and its time by LLVM's models."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcftensor.kernels import cpp, cpu
from mcftensor.kernels.program import Program

# Name of a set of instructions: what the compiler calls it, and bytes of its vectors.
SETS = {"AVX-512": ("x86-64-v4", 64), "AVX2": ("x86-64-v3", 32)}
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
_JUMP = re.compile(r"j\w+\s+(\.L\w+)$")
_STACK = re.compile(r"\(%r[sb]p")
_VECTOR = re.compile(r"%[xyz]mm")


@dataclass(frozen=True)
class Loop:
    """The inner loop of a kernel.

    Attributes:
        lines: its instructions, in the assembler's words.
        elements: the elements that one pass through it computes.
        counts: instructions an element, by kind; loads and stores are counted separately, also if
            an instruction does something else as well.
        spills: loads and stores an element of vectors that registers have no room for.
    """

    lines: tuple[str, ...]
    elements: int
    counts: dict[str, float]
    spills: float

    @property
    def instructions(self) -> float:
        """Return vector instructions an element, without loop control."""
        return sum(x for kind, x in self.counts.items() if kind not in ("load", "store"))


def loop_of(program: Program, name: str, scratch: Path) -> Loop:
    """The loop over whole blocks, for a set of instructions.

    Raises:
        FileNotFoundError: there is no C++ compiler.
    """
    command = cpu.find()
    if command is None:
        raise FileNotFoundError("no C++ compiler")
    march, width = SETS[name]
    source = cpp.source(program, width)
    (scratch / "kernel.cpp").write_text(source)
    flags = [flag for flag in cpu.FLAGS if flag != "-shared"]
    whole = [*command, *flags, f"-march={march}", "-S", "kernel.cpp", "-o", "kernel.s"]
    subprocess.run(whole, cwd=scratch, check=True, capture_output=True)
    lines = _largest_loop((scratch / "kernel.s").read_text().splitlines())
    (lanes,) = re.findall(r"#define LANES (\d+)", source)
    (blocks,) = re.findall(r"for \(; i \+ (\d+) \* LANES <= end", source)
    elements = int(lanes) * int(blocks)
    counts = Counter(kind for line in lines for kind in _kinds(line))
    return Loop(
        tuple(lines),
        elements,
        {kind: count / elements for kind, count in counts.items()},
        sum("(%rsp" in line or "(%rbp" in line for line in lines if _VECTOR.search(line))
        / elements,
    )


def _largest_loop(text: Sequence[str]) -> list[str]:
    """Of the loops without another in them the one with the most instructions on vectors."""
    labels = {line[:-1]: i for i, line in enumerate(text) if re.fullmatch(r"\.L\w+:", line)}
    loops = []
    for end, line in enumerate(text):
        jump = _JUMP.search(line.strip())
        if jump and labels.get(jump[1], end) < end:
            loops.append((labels[jump[1]], end))
    inner = [
        (start, end)
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    bodies = [[x.strip() for x in text[start : end + 1] if _is_code(x)] for start, end in inner]
    return max(bodies, key=lambda body: sum(bool(_VECTOR.search(x)) for x in body))


def _is_code(line: str) -> bool:
    return line.startswith("\t") and not line.strip().startswith((".", "#"))


def _kinds(line: str) -> list[str]:
    """What an instruction on vectors counts as."""
    name, _, operands = line.partition("\t")
    if not (_VECTOR.search(operands) or re.search(r"%k\d", operands)):
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
