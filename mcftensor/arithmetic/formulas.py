"""Elementwise operations, each written once for all kinds of numbers."""

from __future__ import annotations

from collections.abc import Callable

from mcftensor.arithmetic.number_protocol import Number


def _lerp(start: Number, end: Number, weight: Number) -> Number:
    """start + weight * (end - start), from the nearer end."""
    difference = end - start
    near = weight.fma(difference, start)
    far = (weight - 1.0).fma(difference, end)
    return near.where(weight.is_below(0.5), far)


# What each comes to, on numbers of one kind. The error of each format stands in `expansion.py`.
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
