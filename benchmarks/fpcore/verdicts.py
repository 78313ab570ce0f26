"""What is kept of a suite of formulas: bits that are right, and where more terms are worse."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from fpcore.evaluation import Unsupported
from fpcore.judging import judged, precision
from fpcore.machine import named
from fpcore.operations import Worst, checked
from fpcore.reading import Expression, Formula, formulas

KINDS = ("float32", "float64", "bf16x2", "bf16x3", "fp16x2", "fp32x2", "fp32x3", "fp64x2")
LARGE, FEWEST = 400, 4
"""Formulas of more operations than these are tried on fewer inputs, and on at least so many."""

PAIRS = (("fp32x2", "float32"), ("fp32x3", "fp32x2"), ("fp64x2", "float64"))
"""Numbers of which the first must be right wherever the second are."""

RESOLUTION = 1.0
"""Bits: by less than this an input is not worse, since it is how far rounding errors differ."""


def size(e: Expression) -> int:
    """How many operations an expression has; those of a loop count as a hundred."""
    if not isinstance(e, list):
        return 0
    return (100 if e[:1] in (["while"], ["while*"]) else 1) * (1 + sum(map(size, e)))


def verdict(formula: Formula, others: dict[str, Formula], count: int) -> dict[str, Any]:
    """What a formula does in each kind of numbers; or why it is not judged, or what raised."""
    entry: dict[str, Any] = {"name": formula.name, "file": formula.file}
    few = max(FEWEST, min(count, count * LARGE // max(1, size(formula.body))))
    try:
        found = judged(formula, others, KINDS, few)
    except Unsupported as reason:
        return entry | {"not judged": f"{reason}"}
    except (NotImplementedError, RuntimeError, TypeError) as error:
        return entry | {"raised": f"{type(error).__name__}: {error}"}
    if not any(found.values()):
        return entry | {"not judged": "no input with an exact result was found"}
    bits = {name: [right for _, right in rows] for name, rows in found.items()}
    entry["right"] = {
        name: [round(statistics.fmean(x), 2), round(min(x), 2), len(x)]
        for name, x in bits.items()
        if x
    }
    entry["worse"] = {}
    for more, less in PAIRS:
        worse = _worse(found[more], found[less], more, less)
        if worse:
            worse["worst"]["operation"] = _at_fault(formula, others, worse["worst"]["at"], more)
            entry["worse"][f"{more} than {less}"] = worse
    return entry


def _at_fault(
    formula: Formula, others: dict[str, Formula], at: list[float], name: str
) -> tuple[str, float]:
    """The operation with the largest error at an input, in units of the last place of a format."""
    worst: Worst = {}
    checked(formula, others, [[Fraction(x)] for x in at], named(name), worst)
    return max(
        ((operation, round(error, 2)) for operation, (error, _) in worst.items()),
        key=lambda pair: pair[1],
        default=("none", 0.0),
    )


def _worse(more: Any, less: Any, name: str, other: str) -> dict[str, Any]:
    """By how much more terms are worse, on average and at the worst input; empty if nowhere."""
    p = precision(named(other))
    known = {tuple(inputs): right for inputs, right in less}
    pairs = [
        (min(p, right) - known[tuple(inputs)], inputs, right, known[tuple(inputs)])
        for inputs, right in more
        if tuple(inputs) in known
    ]
    if not pairs or min(pairs)[0] >= -RESOLUTION:
        return {}
    _, inputs, right, right_before = min(pairs)
    return {
        "mean": round(statistics.fmean(x[0] for x in pairs), 3),
        "inputs worse": sum(x[0] < -RESOLUTION for x in pairs),
        "inputs": len(pairs),
        "worst": {"at": list(inputs), name: round(right, 2), other: round(right_before, 2)},
    }


def suite(folder: Path, count: int, progress: Any = print) -> list[dict[str, Any]]:
    """Every formula of a folder."""
    found: Sequence[Formula] = formulas(folder)
    named_ones = {x.called: x for x in found if x.called}
    verdicts = []
    for i, x in enumerate(found):
        verdicts.append(verdict(x, named_ones, count))
        progress(f"{i + 1} of {len(found)}: {x.name}")
    return verdicts
