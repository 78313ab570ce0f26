"""Machine floats as digits of 31 bits at fixed places, which integers add without a rounding.

The digit at position k counts multiples of 2^(31 k). A float is a few digits of its sign. The
digits of a sum of floats are the sums of their digits, position by position. These are sums of
integers, so they are exact and have no order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.eft import two_prod
from mcftensor.kernels.custom_ops import inline

WIDTH = 31
"""Bits of a digit."""

_MASK, _HALF = (1 << WIDTH) - 1, (1 << 24) - 1


@dataclass(frozen=True)
class Grid:
    """`count` consecutive positions from `lowest` on."""

    lowest: int
    count: int


@functools.lru_cache(maxsize=64)
def least_of(dtype: torch.dtype, factors: int) -> int:
    """Return the exponent of the smallest product of `factors` floats of a dtype."""
    base = BASES[dtype]
    return factors * (base.min_exponent - base.precision + 1)


@functools.lru_cache(maxsize=64)
def grid_of(dtype: torch.dtype, factors: int) -> Grid:
    """Return the positions of sums of up to 2^60 products of `factors` floats of a dtype."""
    lowest = least_of(dtype, factors) // WIDTH
    highest = (factors * (BASES[dtype].max_exponent + 1) + 60) // WIDTH
    return Grid(lowest, highest - lowest + 1)


WIDEST = grid_of(torch.float64, 2)
"""The positions of every sum and of every sum of products."""


def positions_of(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Positions from the highest down, and the digits there, int64 of the shape of x.

    *Requires*: x is float64 and finite.

    *Error*: none: the digits times 2^(31 position) add up to x. Each digit is x truncated to
    multiples of 2^(31 position), within the exponent range of x, and the difference is exact.
    """
    while largest := _largest(x):
        position = (math.frexp(largest)[1] - 1) // WIDTH
        digits = by_power(x, -WIDTH * position).trunc()
        yield position, digits.to(torch.int64)
        x = x - by_power(digits, WIDTH * position)


def significand_digits(x: Tensor, y: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Positions, and the digits there, of float32 numbers or of their products.

    Digits are zero at positions that no sum of such numbers has.

    *Requires*: x and y are finite, and of one shape.

    *Error*: none: significands of 24 bits and their products of 48 are integers.
    """
    number, exponent = _parts_of(x)
    if y is not None:
        other, more = _parts_of(y)
        number, exponent = number * other, exponent + more
    position = torch.div(exponent, WIDTH, rounding_mode="floor")
    shift = exponent - WIDTH * position
    size, is_negative = number.abs(), number < 0
    # 24 bits at a time, so that what is shifted has at most 54.
    low, high = (size & _HALF) << shift, (size >> 24) << shift
    above = (low >> WIDTH) + (high >> (WIDTH - 24))
    parts = (low & _MASK) + ((high << 24) & _MASK), above & _MASK, above >> WIDTH
    for here in position[number != 0].unique().tolist():
        is_here = position == here
        for i, digits in enumerate(parts):
            yield here + i, torch.where(is_here, torch.where(is_negative, -digits, digits), 0)


def _parts_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of at most 24 bits and exponents of their powers of two, int64."""
    bits = x.view(torch.int32).to(torch.int64)
    field = (bits >> 23) & 0xFF
    size = (bits & 0x7FFFFF) | torch.where(field != 0, 0x800000, 0)
    return torch.where(bits < 0, -size, size), field.clamp(min=1) - 150


def products_of(x: Tensor, y: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield positions and tensors that, times 2^(31 position), add up exactly to x * y.

    *Requires*: x and y are float64, finite and of one shape.

    *Error*: none: the numbers of both tensors are divided into classes whose products neither
    overflow nor have an error that underflows.
    """
    for i, a in _classes(x):
        for j, b in _classes(y):
            product, error = _two_prod(a, b)
            yield i + j, product
            yield i + j, error


def _classes(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield positions, and x / 2^(31 position), or zero below 2^-434 in magnitude.

    Each number is in one class.
    """
    while largest := _largest(x):
        position = (math.frexp(largest)[1] - 1) // WIDTH
        scaled = by_power(x, -WIDTH * position)
        is_here = scaled.abs() >= 2.0**-434
        yield position, torch.where(is_here, scaled, 0)
        x = torch.where(is_here, 0, x)


def _largest(x: Tensor) -> float:
    return x.abs().amax().item() if x.numel() else 0.0


def by_power(x: Tensor, exponent: int) -> Tensor:
    """x * 2^exponent, by two powers of two that neither overflow nor underflow."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)


_two_prod = inline(two_prod)
