"""Each operation of a formula by itself: its error on the operands that it had."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mpmath import mp

import mcftensor as mcf
from fpcore.evaluation import Evaluation
from fpcore.exact import Exact
from fpcore.judging import FEW, FIRST_BITS, LEAST, base, precision
from fpcore.machine import Kind, Machine, terms
from fpcore.reading import Formula
from fpcore.sampling import Inputs, scope, stored

Worst = dict[str, tuple[float, list[list[float]]]]
"""By operation: the largest error in units of the last place of a format, and the operands."""


class Checked(Machine):
    """Numbers of PyTorch that keep the largest error of each operation."""

    def __init__(self, kind: Kind, lanes: int, worst: Worst) -> None:
        super().__init__(kind, lanes)
        self.worst = worst

    def apply(self, operation: str, operands: Sequence[Any]) -> torch.Tensor:
        """An operation on each lane, compared with the exact one on the same operands."""
        if len(operands) > 2 and operation in "+-*/":
            first = self.apply(operation, operands[:2])
            return self.apply(operation, [first, *operands[2:]])
        result = super().apply(operation, operands)
        rows = [terms(x) for x in operands]
        with mp.workprec(FIRST_BITS[base(self.kind)]):
            exact = Exact(self.lanes).apply(
                operation, [[_number(x) for x in column] for column in rows]
            )
            errors = [units(x, y, self.kind) for x, y in zip(terms(result), exact, strict=True)]
            for i, row in enumerate(zip(*rows, strict=True)):
                if any(0 < abs(sum(x)) < full_from(self.kind) for x in row):
                    errors[i] = 0.0
        lane = max(range(self.lanes), key=errors.__getitem__)
        if errors[lane] > self.worst.get(operation, (0.0, []))[0]:
            self.worst[operation] = errors[lane], [column[lane] for column in rows]
        return result


def _number(x: Sequence[float]) -> Any:
    return mp.fsum(x) if all(map(math.isfinite, x)) else mp.nan


def full_from(kind: Kind) -> float:
    """The least magnitude that has all bits."""
    if isinstance(kind, mcf.Format):
        return mcf.finfo(kind).full_precision_min
    return torch.finfo(kind).smallest_normal


def units(found: Sequence[float], exact: Any, kind: Kind) -> float:
    """The error of a result, in 2^-p of it; none where a number is too small for all bits."""
    if not mp.isfinite(exact):
        return 0.0
    if not all(map(math.isfinite, found)):
        return math.inf if abs(exact) < torch.finfo(base(kind)).max / 2 else 0.0
    error = abs(mp.fsum(found) - exact)
    if error <= FEW * LEAST[base(kind)] or 0 < abs(exact) < full_from(kind):
        return 0.0
    return float(error / abs(exact) * 2 ** precision(kind)) if exact else math.inf


def checked(
    formula: Formula, others: Mapping[str, Formula], inputs: Inputs, kind: Kind, worst: Worst
) -> None:
    """Evaluate a formula and note the largest error of each of its operations."""
    if inputs and inputs[0]:
        numbers = Checked(kind, len(inputs[0]), worst)
        Evaluation(numbers, others).of(formula.body, scope(formula, stored(inputs, kind)))
