"""Inputs of formulas: random bit patterns that satisfy the precondition."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from mpmath import mp

from fpcore.evaluation import Evaluation, Mask, Unsupported
from fpcore.exact import Exact
from fpcore.machine import Kind, Machine, entered
from fpcore.reading import Expression, Formula

Inputs: TypeAlias = list[list[Fraction]]
"""A list for each input; an element of a vector is an input."""

BATCH = 1 << 12
BATCHES = 64
"""How many inputs are drawn at once, and how often, until enough satisfy the precondition."""

INTEGERS: dict[torch.dtype, Any] = {
    torch.float16: np.int16,
    torch.float32: np.int32,
    torch.float64: np.int64,
}
FLOATS: dict[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}

Range: TypeAlias = tuple[float, float]


def inputs_of(formula: Formula) -> list[str]:
    """Names of all inputs; an element of a vector is `v 0`."""
    names = []
    for name, length in formula.arguments:
        names += [name] if length is None else [f"{name} {i}" for i in range(length)]
    return names


def scope(formula: Formula, columns: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a formula by name, of its inputs."""
    rest = list(columns)
    found: dict[str, Any] = {}
    for name, length in formula.arguments:
        found[name] = rest.pop(0) if length is None else [rest.pop(0) for _ in range(length)]
    return found


def _constant(e: Expression) -> float | None:
    """The value of an expression without variables."""
    try:
        return float(Evaluation(Machine(torch.float64, 1), {}).of(e, {})[0])
    except (Unsupported, IndexError, KeyError, TypeError):
        return None


def _variable(e: Expression) -> tuple[str, bool] | None:
    """The input that an expression is, and whether it is its magnitude."""
    if isinstance(e, list) and len(e) == 2 and e[0] in ("fabs", "abs"):
        inner = _variable(e[1])
        return inner and (inner[0], True)
    if isinstance(e, list) and len(e) == 3 and e[0] == "ref":
        return f"{e[1]} {e[2]}", False
    return (e, False) if isinstance(e, str) else None


def ranges(precondition: Expression, names: Sequence[str]) -> dict[str, Range]:
    """What comparisons with constants say of inputs; the rest is left to trial."""
    found = dict.fromkeys(names, (-math.inf, math.inf))
    for e in _conjuncts(precondition):
        operation, *operands = e
        if operation in (">", ">="):
            operands.reverse()
        elif operation not in ("<", "<="):
            continue
        for low, high in itertools.pairwise(operands):
            for bounded, other, is_upper in ((low, high, True), (high, low, False)):
                variable, bound = _variable(bounded), _constant(other)
                if variable is None or variable[0] not in found or bound is None:
                    continue
                name, is_magnitude = variable
                least, most = found[name]
                if is_upper:
                    least = max(least, -bound) if is_magnitude else least
                    most = min(most, bound)
                elif not is_magnitude:
                    least = max(least, bound)
                found[name] = least, most
    return found


def _conjuncts(e: Expression) -> Iterator[list[Any]]:
    if isinstance(e, list) and e:
        if e[0] == "and":
            for part in e[1:]:
                yield from _conjuncts(part)
        else:
            yield e


def _ordinal(x: float, dtype: torch.dtype) -> int:
    """The place of a float among all of its type; zero has 0."""
    top = float(torch.finfo(dtype).max)
    rounded = FLOATS[dtype](max(-top, min(top, x)))
    bits = int(rounded.view(INTEGERS[dtype]))
    return bits if bits >= 0 else -(bits & (2 ** (INTEGERS[dtype](0).itemsize * 8 - 1) - 1))


def patterns(
    dtype: torch.dtype, bounds: Range, count: int, rng: np.random.Generator
) -> npt.NDArray[Any]:
    """Floats between bounds, each as likely as any other."""
    low, high = (_ordinal(x, dtype) for x in bounds)
    places = rng.integers(low, max(low, high), count, endpoint=True)
    integer = INTEGERS[dtype]
    floats = np.abs(places).astype(integer).view(FLOATS[dtype])
    return np.where(places < 0, -floats, floats)


def satisfying(formula: Formula, others: Mapping[str, Formula], inputs: Inputs) -> Mask:
    """Which inputs satisfy the precondition, exactly."""
    lanes = len(inputs[0]) if inputs else 1
    precondition = formula.properties.get(":pre", "TRUE")
    with mp.workprec(400):
        columns = [[mp.mpf(x.numerator) / x.denominator for x in column] for column in inputs]
        return Evaluation(Exact(lanes), others).of(precondition, scope(formula, columns))


def drawn(
    formula: Formula, others: Mapping[str, Formula], dtype: torch.dtype, count: int
) -> Inputs:
    """Inputs that a dtype holds, up to a number; fewer if the precondition is hard to meet.

    Inputs that the precondition does not bound have the values of the formula's example, if it
    has one.
    """
    names = inputs_of(formula)
    precondition = formula.properties.get(":pre", "TRUE")
    bounds = ranges(precondition, names)
    example = {str(x[0]): _constant(x[1]) for x in formula.properties.get(":example", [])}
    seed = zlib.crc32(f"{formula.file} {formula.name} {dtype}".encode())
    rng = np.random.default_rng(seed)
    found: list[list[Fraction]] = [[] for _ in names]
    for _ in range(BATCHES if names else 0):
        columns = []
        for name in names:
            fixed = example.get(name)
            if fixed is not None and bounds[name] == (-math.inf, math.inf):
                columns.append(np.full(BATCH, fixed, FLOATS[dtype]))
            else:
                columns.append(patterns(dtype, bounds[name], BATCH, rng))
        plain = [torch.from_numpy(column).double() for column in columns]
        likely = Evaluation(Machine(torch.float64, BATCH), others).of(
            precondition, scope(formula, plain)
        )
        finite = np.logical_and.reduce([np.isfinite(column) for column in columns])
        chosen = np.flatnonzero(likely & finite)[: count - len(found[0])]
        batch = [[Fraction(float(column[i])) for i in chosen] for column in columns]
        keep: Any = satisfying(formula, others, batch) if len(chosen) else []
        for column, new in zip(found, batch, strict=True):
            column += [x for x, kept in zip(new, keep, strict=True) if kept]
        if len(found[0]) >= count:
            break
    return found


def stored(inputs: Inputs, kind: Kind) -> list[torch.Tensor]:
    """Inputs rounded to a kind of numbers."""
    return [entered(column, kind) for column in inputs]
