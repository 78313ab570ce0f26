"""Elementwise operations, each written once for all kinds of numbers."""

from __future__ import annotations

from collections.abc import Callable

from mcftensor.arithmetic.number_protocol import Number
from mcftensor.wings import wing


def _lerp(start: Number, end: Number, weight: Number) -> Number:
    """start + weight * (end - start), computed from the nearer end."""
    difference = end - start
    near = weight.fma(difference, start)
    far = (weight - 1.0).fma(difference, end)
    return near.where(weight.is_below(0.5), far)


# Each operation on numbers of one kind. `passes/expansion.py` states its error in each format.
OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "square": lambda x: x * x,
    "sqrt": lambda x: x.sqrt(),
    "fma": lambda x, y, z: x.fma(y, z),
    "fnma": lambda x, y, z: (-x).fma(y, z),
    "addcmul": lambda x, a, b, value: (value * a).fma(b, x),
    "addcdiv": lambda x, a, b, value: x + value * a / b,
    "lerp": _lerp,
}


def operation(name: str) -> Callable[..., Number]:
    """Return an operation by its name. Elementary functions are those of the wing `wide`."""
    found: Callable[..., Number] = OPERATIONS.get(name) or wing("wide").FUNCTIONS[name]
    return found
