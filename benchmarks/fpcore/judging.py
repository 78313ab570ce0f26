"""How many bits formulas lose, against exact results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from mpmath import mp

import mcftensor as mcf
from fpcore.evaluation import Evaluation
from fpcore.exact import Exact
from fpcore.machine import Kind, Machine, named, terms
from fpcore.reading import Formula
from fpcore.sampling import Inputs, drawn, satisfying, scope, stored
from mcftensor.arithmetic.base_types import BASES

AGREED = 160
"""Bits to which results in a precision and in twice as many bits must agree."""

MOST_BITS = 3000
"""Inputs whose results disagree in more bits than these are left out."""

FIRST_BITS = {torch.float16: 300, torch.bfloat16: 800, torch.float32: 800, torch.float64: 2400}
"""So many that no sum of two numbers of a type, or of two products, is rounded in them."""

LEAST = {dtype: math.ldexp(1, b.min_exponent - b.precision + 1) for dtype, b in BASES.items()}
"""The smallest numbers of each base."""

FEW = 8
"""Of these an error counts as none."""

SAMPLED = {torch.float16: torch.float16, torch.float64: torch.float64}
"""The floats that are drawn for a base; float32's for others."""


def precision(kind: Kind) -> int:
    """The bits of a kind of numbers."""
    return kind.precision if isinstance(kind, mcf.Format) else BASES[kind].precision


def base(kind: Kind) -> torch.dtype:
    """The machine float of which numbers are made."""
    return kind.dtype if isinstance(kind, mcf.Format) else kind


def _columns(result: Any) -> list[Any]:
    """The numbers of a result, of which an array has several."""
    is_array = isinstance(result, list) and result and isinstance(result[0], (list, torch.Tensor))
    return result if is_array else [result]


def exact(
    formula: Formula, others: Mapping[str, Formula], inputs: Inputs, first_bits: int
) -> list[list[Any]]:
    """The columns of exact results; NaN where there is none, or where it stays undecided."""
    lanes = len(inputs[0]) if inputs else 1

    def evaluated(bits: int, chosen: Sequence[int]) -> list[list[Any]]:
        with mp.workprec(bits):
            columns = [[mp.mpf(x[i].numerator) / x[i].denominator for i in chosen] for x in inputs]
            evaluation = Evaluation(Exact(len(chosen)), others)
            return _columns(evaluation.of(formula.body, scope(formula, columns)))

    bits, left = first_bits, list(range(lanes))
    shorter = evaluated(bits, left)
    found: list[list[Any]] = [[mp.nan] * lanes for _ in shorter]
    while left and bits < MOST_BITS:
        bits *= 2
        longer = evaluated(bits, left)
        rows = list(zip(*longer, strict=True))
        agreed = [_agree(a, b) for a, b in zip(zip(*shorter, strict=True), rows, strict=True)]
        for i, row, done in zip(left, rows, agreed, strict=True):
            for column, x in zip(found, row, strict=True):
                column[i] = x if done else mp.nan
        left = [i for i, done in zip(left, agreed, strict=True) if not done]
        shorter = [[x for x, done in zip(c, agreed, strict=True) if not done] for c in longer]
    return found


def _agree(shorter: Sequence[Any], longer: Sequence[Any]) -> bool:
    def alike(x: Any, y: Any) -> bool:
        if not mp.isfinite(x) or not mp.isfinite(y):
            return not mp.isfinite(x) and not mp.isfinite(y)
        return bool(x == y or abs(x - y) <= mp.ldexp(abs(y), -AGREED))

    return all(alike(x, y) for x, y in zip(shorter, longer, strict=True))


def right_bits(found: Sequence[float], expected: Any, kind: Kind) -> float:
    """The bits of a result that are right, at most all; errors of a few least numbers are none."""
    p = precision(kind)
    if not all(map(math.isfinite, found)):
        return 0.0
    with mp.workprec(2500):
        error = abs(mp.fsum(found) - expected)
        if error <= FEW * LEAST[base(kind)]:
            return float(p)
        if expected == 0:
            return 0.0
        return max(0.0, min(float(p), float(-mp.log(error / abs(expected), 2))))


def judged(
    formula: Formula, others: Mapping[str, Formula], kinds: Sequence[str], count: int
) -> dict[str, list[tuple[list[float], float]]]:
    """For each kind of numbers: inputs, as floats, and the bits that are right for each of them.

    Kinds of one base have the same inputs, unless their numbers round these. Inputs whose exact
    result is undefined, or beyond the largest number of the base, are left out.
    """
    results: dict[str, list[tuple[list[float], float]]] = {}
    known: dict[tuple[Any, ...], list[list[Any]]] = {}
    samples: dict[torch.dtype, Inputs] = {}
    for name in kinds:
        kind = named(name)
        floats = SAMPLED.get(base(kind), torch.float32)
        if floats not in samples:
            samples[floats] = drawn(formula, others, floats, count)
        inputs = _as_stored(formula, others, samples[floats], kind)
        lanes = len(inputs[0]) if inputs else 1
        results[name] = []
        if not lanes:
            continue
        key = (FIRST_BITS[base(kind)], *map(tuple, inputs))
        if key not in known:
            known[key] = exact(formula, others, inputs, FIRST_BITS[base(kind)])
        results[name] = _compared(formula, others, inputs, known[key], kind)
    return results


def _as_stored(
    formula: Formula, others: Mapping[str, Formula], inputs: Inputs, kind: Kind
) -> Inputs:
    """Inputs as numbers of a kind hold them, if the precondition still holds."""
    if not inputs or not inputs[0]:
        return inputs
    rows = [terms(column) for column in stored(inputs, kind)]
    lanes = range(len(rows[0]))
    finite = [i for i in lanes if all(math.isfinite(t) for column in rows for t in column[i])]
    held = [[sum(map(Fraction, column[i]), Fraction(0)) for i in finite] for column in rows]
    if held == inputs or not finite:
        return held
    keep = satisfying(formula, others, held)
    return [[x for x, kept in zip(column, keep, strict=True) if kept] for column in held]


def _compared(
    formula: Formula,
    others: Mapping[str, Formula],
    inputs: Inputs,
    expected: Sequence[Sequence[Any]],
    kind: Kind,
) -> list[tuple[list[float], float]]:
    largest = torch.finfo(base(kind)).max
    lanes = range(len(expected[0]))
    defined = [
        i
        for i in lanes
        if all(mp.isfinite(column[i]) and abs(column[i]) <= largest for column in expected)
    ]
    if not defined:
        return []
    chosen = [[column[i] for i in defined] for column in inputs]
    evaluation = Evaluation(Machine(kind, len(defined)), others)
    values = stored(chosen, kind)
    found = [terms(x) for x in _columns(evaluation.of(formula.body, scope(formula, values)))]
    bits = [
        min(right_bits(column[j], e[i], kind) for column, e in zip(found, expected, strict=True))
        for j, i in enumerate(defined)
    ]
    return [([float(c[j]) for c in chosen], right) for j, right in enumerate(bits)]
