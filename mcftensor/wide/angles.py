"""Inverse trigonometric functions and the length of a vector, on guarded expansions.

For 0 <= y <= x, the angle of (x, y) is atan(c) + atan((y - c x) / (x + c y)), where c is a multiple
of 1 / 16 near y / x. The first angle is read from a table, the second is a power series.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.exponentials import bits_of, one
from mcftensor.wide.guarded import (
    Terms,
    add,
    chosen,
    constants,
    div,
    exponent_of,
    finish,
    mul,
    neg,
    polynomial,
    scaled,
    size_of,
    sqrt,
    sub,
    times,
    to_integer,
    where,
)
from mcftensor.wide.logarithms import root_of_product

_LOG2_T2 = 2 * math.log2(1 / 30)


def _coefficient(k: int, base: Base, terms: int) -> list[Fraction]:
    return [Fraction((-1) ** k, 2 * k + 1)]


@functools.lru_cache(maxsize=16)
def _table(bits: int) -> list[Fraction]:
    return [exact.value("atan", bits, Fraction(i, 16)) for i in range(16)]


def _angle(y: Terms, x: Terms, is_left: Tensor, terms: int) -> Terms:
    """The angle of the vector (x, y), or of (-x, y) where `is_left` is set.

    Both coordinates must be at least 0, and the larger one near 1.
    """
    m, bits = terms + 1, bits_of(x[0], terms)
    is_steep = y[0] > x[0]
    y, x = where(is_steep, x, y), where(is_steep, y, x)
    sixteenth = y[0] / x[0] * 16
    i, last = to_integer(torch.where(sixteenth > 15, 15.0, sixteenth))
    c = (i * 0.0625,)
    t = div(sub(y, mul(c, x, m), m), add(x, mul(c, y, m), m), m)
    value = mul(t, polynomial(mul(t, t, m), _coefficient, _LOG2_T2, terms), m)
    value = add(chosen(_table(bits), last, m, x[0]), value, m)
    pi = exact.pi(bits)
    value = where(is_steep, sub(constants(pi / 2, m, x[0]), value, m), value)
    return where(is_left, sub(constants(pi, m, x[0]), value, m), value)


def _signed(value: Terms, x: Terms, plain: Tensor, terms: int) -> Terms:
    is_negative = torch.signbit(x[0])
    plain = torch.where(is_negative, -plain, plain)
    return finish(where(is_negative, neg(value), value), terms, plain)


def _near_one(x: Terms, y: Terms) -> tuple[Terms, Terms, Tensor]:
    """Scale two numbers of at least 0 by a power of two such that the larger one is near 1.

    Returns both numbers and the exponent of the larger one. Infinite vectors and the zero vector
    are replaced by finite vectors of the same angle; callers set their length.
    """
    base = BASES[x[0].dtype]
    zero = (torch.zeros_like(x[0]),)
    x_is, y_is = x[0] == torch.inf, y[0] == torch.inf
    x = where(x_is, one(x[0]), where(y_is & ~x_is, zero, x))
    y = where(y_is, one(x[0]), where(x_is & ~y_is, zero, y))
    x = where((x[0] == 0) & (y[0] == 0), one(x[0]), x)
    shift = float(3 * base.precision)
    larger = torch.maximum(x[0], y[0])
    is_small = larger < 2.0 ** (base.min_exponent + 2 * base.precision)
    x, y = (where(is_small, times(z, 2.0**shift), z) for z in (x, y))
    e = exponent_of(torch.maximum(x[0], y[0]))
    return scaled(x, -e), scaled(y, -e), torch.where(is_small, e - shift, e)


def atan2(y: Terms, x: Terms) -> Terms:
    """The angle of the vector (x, y)."""
    terms = len(x)
    a, b, _ = _near_one(size_of(x), size_of(y))
    is_nan = torch.isnan(x[0]) | torch.isnan(y[0])
    a = where(is_nan, one(x[0]), a)
    b = where(is_nan, one(x[0]), b)
    value = _angle(b, a, torch.signbit(x[0]), terms)
    return _signed(value, y, torch.where(is_nan, torch.nan, value[0]), terms)


def atan(x: Terms) -> Terms:
    """The arctangent."""
    zero = torch.zeros_like(x[0])
    return atan2(x, (zero + 1, *[zero] * (len(x) - 1)))


def _legs(x: Terms) -> tuple[Terms, Terms, Tensor]:
    """|x| and sqrt(1 - x²), and whether |x| is at most 1."""
    m = len(x) + 1
    size = size_of(x)
    below = sub(one(x[0]), size, m)
    is_inside = below[0] >= 0
    inner = where(is_inside, size, one(x[0]))
    is_end = ~(below[0] > 0)
    root = root_of_product(where(is_end, one(x[0]), below), add(one(x[0]), inner, m), m)
    return inner, where(is_end, (torch.zeros_like(x[0]),), root), is_inside


def asin(x: Terms) -> Terms:
    """The arcsine."""
    terms = len(x)
    size, root, is_inside = _legs(x)
    value = _angle(size, root, root[0] < 0, terms)
    plain = torch.where(is_inside, value[0], torch.nan)
    return _signed(value, x, torch.where(x[0] == 0, 0.0, plain), terms)


def acos(x: Terms) -> Terms:
    """The arccosine."""
    terms = len(x)
    size, root, is_inside = _legs(x)
    value = _angle(root, size, x[0] < 0, terms)
    return finish(value, terms, torch.where(is_inside, value[0], torch.nan))


def hypot(x: Terms, y: Terms) -> Terms:
    """sqrt(x² + y²)."""
    terms, m = len(x), len(x) + 1
    a, b, e = _near_one(size_of(x), size_of(y))
    is_nan = torch.isnan(x[0]) | torch.isnan(y[0])
    total = add(mul(a, a, m), mul(b, b, m), m)
    value = scaled(sqrt(where(is_nan, one(x[0]), total), m), e)
    plain = torch.where((x[0] == 0) & (y[0] == 0), 0.0, value[0])
    plain = torch.where(is_nan, torch.nan, plain)
    is_infinite = (x[0].abs() == torch.inf) | (y[0].abs() == torch.inf)
    return finish(value, terms, torch.where(is_infinite, torch.inf, plain))
