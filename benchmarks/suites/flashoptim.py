"""FlashOptim's seven invariants of weights with 8- and 16-bit corrections, over our formats.

With e0, e8 and e16 the errors of bf16, of 8 and of 16 bits of correction, r0, r8 and r16 the same
relative to the number, and the thresholds t8 and t16 of its text, over all float32 numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcftensor as mcf

THRESHOLD = re.compile(r"threshold_(\d+)bit_ecc = ([\d.]+) / ([\d.]+)")
NAMES = re.compile(r"_INVARIANT_NAMES = \[(.*?)\]", re.DOTALL)
TOLERANCE = re.compile(r'\("bf16", "(\w+)"\): (\d+)')
CHUNK = 1 << 21


def parameters(folder: Path) -> tuple[list[str], dict[str, float], dict[str, int]]:
    """The names of the invariants, the thresholds by bits, and the exceptions that are allowed."""
    text = (folder / "test/test_ecc_invariants.py").read_text()
    names = re.findall(r'"(\w+)"', NAMES.findall(text)[0])
    thresholds = {bits: float(a) / float(b) for bits, a, b in THRESHOLD.findall(text)}
    allowed = dict.fromkeys(names, 0)
    for name, count in TOLERANCE.findall(text):
        allowed[name] = max(allowed[name], int(count))
    return names, thresholds, allowed


def exceptions(x: Tensor, t8: float, t16: float, format: mcf.Format) -> list[int]:
    """How many numbers break each invariant, in the order of the text; of the last, how many where
    neither correction leaves an error."""
    exact = x.double()
    narrow = x.to(torch.bfloat16)
    x, exact, narrow = (t[torch.isfinite(narrow)] for t in (x, exact, narrow))
    e0 = (narrow.double() - exact).abs()
    e8, e16 = (
        (mcf.as_plain(mcf.as_expansion(x, f), torch.float64) - exact).abs()
        for f in (format, mcf.bf16i16)
    )
    size = torch.where(exact == 0, 1.0, exact.abs())
    r0, r8, r16 = e0 / size, e8 / size, e16 / size
    broken = (
        (e0 == 0) & (e8 > 0),
        (e0 == 0) & (e16 > 0),
        (e8 == 0) & (e16 > 0),
        e16 > e8,
        (r0 >= t8) & (r8 >= t8),
        (r0 >= t16) & (r16 >= t16),
        (r0 >= t16) & (r0 < t8) & (e16 >= e8),
        (r0 >= t16) & (r0 < t8) & (e8 == 0) & (e16 == 0),
    )
    return [int(mask.sum()) for mask in broken]


def numbers(exponent: int, sign: int, begin: int, count: int) -> Tensor:
    """float32 numbers of an exponent, -127 for those that are not normal, by their mantissas."""
    bits = torch.arange(begin, begin + count, dtype=torch.int64) + ((exponent + 127) << 23)
    return sign * bits.to(torch.int32).view(torch.float32)


def run(folder: Path, step: int) -> dict[str, Any]:
    """Exceptions over all mantissas, of one in `step` exponents and of the smallest and largest.

    bf16i8 is tried rounded to nearest, as FlashOptim rounds, and balanced, as it is by default.
    """
    exponents = sorted({-127, -126, 127, *range(-127, 128, step)})
    formats = {"nearest": mcf.bf16i8.nearest, "balanced": mcf.bf16i8}
    return {
        "numbers": len(exponents) * 2 << 23,
        "exponents": len(exponents),
        "rounding": {name: _counted(folder, exponents, f) for name, f in formats.items()},
    }


def _counted(folder: Path, exponents: Sequence[int], format: mcf.Format) -> dict[str, Any]:
    """For each invariant the exceptions in all, and the most of an exponent and sign."""
    names, thresholds, allowed = parameters(folder)
    found = []
    for exponent in exponents:
        for sign in (1, -1):
            chunks = [
                exceptions(
                    numbers(exponent, sign, begin, CHUNK), thresholds["8"], thresholds["16"], format
                )
                for begin in range(0, 1 << 23, CHUNK)
            ]
            found.append([sum(column) for column in zip(*chunks, strict=True)])
    *columns, exact = zip(*found, strict=True)
    counts: dict[str, Any] = {
        name: {"in all": sum(column), "most": max(column), "allowed by its tests": allowed[name]}
        for name, column in zip(names, columns, strict=True)
    }
    counts[names[-1]]["both exact"] = sum(exact)
    return counts
