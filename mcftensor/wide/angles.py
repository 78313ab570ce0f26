"""Inverse trigonometric functions and the length of a vector, on guarded numbers.

For 0 <= y <= x, the angle of (x, y) is atan(c) + atan((y - c x) / (x + c y)), where c is a multiple
of 1 / 16 near y / x. The first angle is read from a table, the second is a power series.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.exponentials import Result
from mcftensor.wide.guarded import Guarded, exponent_of, polynomial, to_integer, where
from mcftensor.wide.logarithms import root_of_product

_LOG2_T2 = 2 * math.log2(1 / 30)


def _coefficient(k: int, base: Base, terms: int) -> list[Fraction]:
    return [Fraction((-1) ** k, 2 * k + 1)]


@functools.lru_cache(maxsize=16)
def _table(bits: int) -> list[Fraction]:
    return [exact.atan(Fraction(i, 16), bits) for i in range(16)]


def _angle(y: Guarded, x: Guarded, is_left: Tensor) -> Guarded:
    """The angle of the vector (x, y), or of (-x, y) where `is_left` is set.

    Both coordinates must be at least 0, and the larger one near 1.
    """
    is_steep = y.leading > x.leading
    y, x = where(is_steep, x, y), where(is_steep, y, x)
    sixteenth = y.leading / x.leading * 16
    i, last = to_integer(torch.where(sixteenth > 15, 15.0, sixteenth))
    c = x.of(i * 0.0625)
    t = (y - c * x) / (x + c * y)
    value = t * polynomial(t * t, _coefficient, _LOG2_T2)
    value = value.chosen(_table(value.bits), last) + value
    pi = exact.pi(value.bits)
    value = where(is_steep, pi / 2 - value, value)
    return where(is_left, pi - value, value)


def _signed(value: Guarded, x: Guarded, plain: Tensor) -> Result:
    is_negative = torch.signbit(x.leading)
    return where(is_negative, -value, value), torch.where(is_negative, -plain, plain)


def _near_one(x: Guarded, y: Guarded) -> tuple[Guarded, Guarded, Tensor]:
    """Scale two numbers of at least 0 by a power of two such that the larger one is near 1.

    Returns both numbers and the exponent of the larger one. Infinite vectors and the zero vector
    are replaced by finite vectors of the same angle; callers set their length.
    """
    x_is, y_is = x.leading == torch.inf, y.leading == torch.inf
    x = where(x_is, 1.0, where(y_is & ~x_is, 0.0, x))
    y = where(y_is, 1.0, where(x_is & ~y_is, 0.0, y))
    x = where((x.leading == 0) & (y.leading == 0), 1.0, x)
    shift = float(3 * x.base.precision)
    larger = torch.maximum(x.leading, y.leading)
    is_small = larger < 2.0 ** (x.base.min_exponent + 2 * x.base.precision)
    x, y = (where(is_small, z.times(2.0**shift), z) for z in (x, y))
    e = exponent_of(torch.maximum(x.leading, y.leading))
    return x.scaled(-e), y.scaled(-e), torch.where(is_small, e - shift, e)


def atan2(y: Guarded, x: Guarded) -> Result:
    """The angle of the vector (x, y)."""
    a, b, _ = _near_one(abs(x), abs(y))
    is_nan = torch.isnan(x.leading) | torch.isnan(y.leading)
    value = _angle(where(is_nan, 1.0, b), where(is_nan, 1.0, a), torch.signbit(x.leading))
    return _signed(value, y, torch.where(is_nan, torch.nan, value.leading))


def atan(x: Guarded) -> Result:
    """The arctangent."""
    return atan2(x, x.of(torch.ones_like(x.leading)))


def _legs(x: Guarded) -> tuple[Guarded, Guarded, Tensor]:
    """|x| and sqrt(1 - x²), and whether |x| is at most 1."""
    size = abs(x)
    below = 1 - size
    is_inside = below.leading >= 0
    inner = where(is_inside, size, 1.0)
    is_end = ~(below.leading > 0)
    root = root_of_product(where(is_end, 1.0, below), 1 + inner)
    return inner, where(is_end, 0.0, root), is_inside


def asin(x: Guarded) -> Result:
    """The arcsine."""
    size, root, is_inside = _legs(x)
    value = _angle(size, root, root.leading < 0)
    plain = torch.where(is_inside, value.leading, torch.nan)
    return _signed(value, x, torch.where(x.leading == 0, 0.0, plain))


def acos(x: Guarded) -> Result:
    """The arccosine."""
    size, root, is_inside = _legs(x)
    value = _angle(root, size, x.leading < 0)
    return value, torch.where(is_inside, value.leading, torch.nan)


def hypot(x: Guarded, y: Guarded) -> Result:
    """sqrt(x² + y²)."""
    a, b, e = _near_one(abs(x), abs(y))
    is_nan = torch.isnan(x.leading) | torch.isnan(y.leading)
    value = where(is_nan, 1.0, a * a + b * b).sqrt().scaled(e)
    plain = torch.where((x.leading == 0) & (y.leading == 0), 0.0, value.leading)
    plain = torch.where(is_nan, torch.nan, plain)
    is_infinite = (x.leading.abs() == torch.inf) | (y.leading.abs() == torch.inf)
    return value, torch.where(is_infinite, torch.inf, plain)
