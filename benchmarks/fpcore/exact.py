"""Numbers of mpmath, in which operations without a real result give NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from mpmath import mp

from fpcore.evaluation import Mask, Unsupported

LARGEST_EXPONENT = 1 << 24
"""Beyond 2 to this power a number counts as undefined: no format has it."""

CONSTANTS = {"PI": lambda: +mp.pi, "E": lambda: +mp.e, "INFINITY": lambda: mp.inf}


def _power(x: Any, y: Any) -> Any:
    if x == 0:
        return mp.nan if y < 0 else mp.mpf(y == 0)
    if y == mp.floor(y) and abs(y) < 1 << 20:
        return x ** int(y)
    if x < 0:
        return mp.nan if y != mp.floor(y) else (-1) ** int(y % 2) * _power(-x, y)
    return _exponential(y * mp.log(x))


def _exponential(x: Any) -> Any:
    return mp.exp(x) if abs(x) < LARGEST_EXPONENT else mp.nan


def _truncated(x: Any) -> Any:
    return mp.floor(x) if x > 0 else mp.ceil(x)


def _cube_root(x: Any) -> Any:
    return mp.cbrt(x) if x >= 0 else -mp.cbrt(-x)


def _within(x: Any) -> Any:
    """Where hyperbolic functions have a result that is not too large."""
    return x if abs(x) < LARGEST_EXPONENT else mp.nan


OPERATIONS: dict[str, Callable[..., Any]] = {
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "fma": lambda x, y, z: x * y + z,
    "fabs": abs,
    "sqrt": lambda x: mp.sqrt(x) if x >= 0 else mp.nan,
    "cbrt": _cube_root,
    "hypot": lambda x, y: mp.sqrt(x * x + y * y),
    "pow": _power,
    "exp": _exponential,
    "exp2": lambda x: _exponential(x * mp.log(2)),
    "expm1": lambda x: mp.expm1(_within(x)),
    "log": lambda x: mp.log(x) if x > 0 else mp.nan,
    "log2": lambda x: mp.log(x) / mp.log(2) if x > 0 else mp.nan,
    "log10": lambda x: mp.log10(x) if x > 0 else mp.nan,
    "log1p": lambda x: mp.log1p(x) if x > -1 else mp.nan,
    "sin": mp.sin,
    "cos": mp.cos,
    "tan": mp.tan,
    "asin": lambda x: mp.asin(x) if abs(x) <= 1 else mp.nan,
    "acos": lambda x: mp.acos(x) if abs(x) <= 1 else mp.nan,
    "atan": mp.atan,
    "atan2": mp.atan2,
    "sinh": lambda x: mp.sinh(_within(x)),
    "cosh": lambda x: mp.cosh(_within(x)),
    "tanh": lambda x: mp.tanh(_within(x)),
    "asinh": mp.asinh,
    "acosh": lambda x: mp.acosh(x) if x >= 1 else mp.nan,
    "atanh": lambda x: mp.atanh(x) if abs(x) < 1 else mp.nan,
    "fmin": min,
    "fmax": max,
    "floor": mp.floor,
    "ceil": mp.ceil,
    "trunc": _truncated,
    "fmod": lambda x, y: x - y * _truncated(x / y),
    "copysign": lambda x, y: abs(x) if y >= 0 else -abs(x),
}

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
}


class Exact:
    """Lists of mpmath's numbers, in its precision of the moment."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def constant(self, value: Fraction | str) -> list[Any]:
        """A number, or a constant by its name, on all lanes."""
        if isinstance(value, str):
            return [CONSTANTS.get(value, lambda: mp.nan)()] * self.lanes
        return [mp.mpf(value.numerator) / value.denominator] * self.lanes

    def apply(self, operation: str, operands: Sequence[Any]) -> list[Any]:
        """An operation on each lane; NaN where there is no real result, or one too large."""
        if operation == "+":
            return [_settled(sum(row[1:], row[0])) for row in zip(*operands, strict=True)]
        if operation == "-":
            signed = [operands[0], *([-x for x in column] for column in operands[1:])]
            if len(operands) == 1:
                return [-x for x in operands[0]]
            return self.apply("+", signed)
        if operation in ("*", "/") and len(operands) == 1:
            return self.apply(operation, [self.constant(Fraction(1)), *operands])
        if operation in ("*", "/") and len(operands) > 2:
            first = self.apply(operation, operands[:2])
            return self.apply(operation, [first, *operands[2:]])
        if operation not in OPERATIONS:
            raise Unsupported(f"{operation} is no operation here")
        function = OPERATIONS[operation]
        return [_defined(function, row) for row in zip(*operands, strict=True)]

    def compare(self, operation: str, x: Any, y: Any) -> Mask:
        """A comparison on each lane."""
        function = COMPARISONS[operation]
        return np.array([bool(function(a, b)) for a, b in zip(x, y, strict=True)])

    def choose(self, mask: Mask, x: Any, y: Any) -> Any:
        """x on the lanes of a mask, y on the others."""
        return [a if chosen else b for chosen, a, b in zip(mask.tolist(), x, y, strict=True)]


def _defined(function: Callable[..., Any], row: Sequence[Any]) -> Any:
    if any(not mp.isfinite(x) for x in row):
        return mp.nan
    try:
        return _settled(function(*row))
    except (ZeroDivisionError, ValueError, OverflowError):
        return mp.nan


def _settled(x: Any) -> Any:
    if mp.isfinite(x) and x and abs(x.exp + x.bc) > LARGEST_EXPONENT:
        return mp.nan
    return x
