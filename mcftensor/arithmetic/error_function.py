"""The error function and the normal distribution, on guarded expansions.

For x >= 0, erfc(x) = exp(-x²) g(x). The range of x + 1 between two powers of two is divided into
four intervals of x; in each, g is its Taylor polynomial at the midpoint. For small arguments, erf
is summed by its power series.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic import exact_constants as exact
from mcftensor.arithmetic import exponentials
from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.arithmetic.exponentials import bits_of, one
from mcftensor.arithmetic.guarded import (
    SPARE,
    Terms,
    add,
    chosen,
    constant,
    constants,
    finish,
    mul,
    neg,
    polynomial,
    precision_of,
    scaled,
    series,
    size_of,
    sub,
    times,
    where,
)

_SMALL = 0.5
"""The bound of |x| below which erf is summed by its power series."""

_LOG2_H = -3.0
"""log2 of half the width of an interval, divided by the power of two."""


def _end(base: Base) -> float:
    """Return the x beyond which erfc is less than half the smallest subnormal."""
    return math.sqrt((base.precision - base.min_exponent) * math.log(2))


def _middles(base: Base) -> list[tuple[int, Fraction]]:
    """Return the exponent and the midpoint of each interval.

    The last interval is repeated until their number is a power of two.
    """
    found: list[tuple[int, Fraction]] = []
    for i in range(32):
        e, j = divmod(i, 4)
        middle = 2**e * (1 + (j + Fraction(1, 2)) / 4) - 1
        found.append((e, middle) if middle - Fraction(2**e, 8) < _end(base) else found[-1])
    return found


@functools.lru_cache(maxsize=16)
def _polynomials(base: Base, terms: int) -> tuple[list[list[Fraction]], list[int]]:
    """Return the coefficients of each power of h / 2^e, and how many terms of them are needed.

    There is one coefficient for each interval.
    """
    wanted = terms * base.precision + SPARE
    count = wanted * 2 // 5 + 8
    bits = (terms + 1) * base.precision + 64
    columns = []
    for e, c in _middles(base):
        taylor = exact.scaled_erfc(c, count, bits)
        columns.append([g * 2 ** (e * k) for k, g in enumerate(taylor)])
    rows = [list(row) for row in zip(*columns, strict=True)]
    parts = [_part(row, rows[0], k) for k, row in enumerate(rows)]
    kept = max(k for k, part in enumerate(parts) if part > -wanted) + 1
    widths = [
        min(max(math.ceil((wanted + max(parts[k:kept])) / base.precision), 1), terms + 1)
        for k in range(kept)
    ]
    return rows[:kept], widths


def _part(row: list[Fraction], first: list[Fraction], k: int) -> float:
    """log2 of the largest contribution of a power to g, relative to g."""
    sizes = zip(row, first, strict=True)
    return max(exact.log2_of(a) - exact.log2_of(b) for a, b in sizes) + k * _LOG2_H


def _scaled_erfc(x: Terms, terms: int) -> Terms:
    """g(x) for x at least 0 and below the end."""
    base, m = BASES[x[0].dtype], terms + 1
    p = base.precision
    bits = ((x[0] + 1).view(base.integer) >> (p - 3)) - 4 * base.max_exponent
    middles = _middles(base)
    (middle,) = chosen([c for _, c in middles], bits, 1, x[0])
    (unit,) = chosen([Fraction(1, 2**e) for e, _ in middles], bits, 1, x[0])
    h = times(sub(x, (middle,), m), unit)
    rows, widths = _polynomials(base, terms)
    total = chosen(rows[-1], bits, widths[-1], x[0])
    for k in range(len(rows) - 2, -1, -1):
        product = mul(h, total, widths[k + 1])
        total = add(chosen(rows[k], bits, widths[k], x[0]), product, widths[k])
    return total


def _complement(x: Terms, terms: int) -> tuple[Terms, Tensor]:
    """erfc(|x|) as v 2^k, with |x| clamped to the end."""
    m, base = terms + 1, BASES[x[0].dtype]
    size = size_of(x)
    end = constant(_end(base), x[0])
    size = where(size[0] < end, size, (end,))
    q, k = exponentials.parts(neg(mul(size, size, m)), terms)
    return mul(add(one(x[0]), q, m), _scaled_erfc(size, terms), m), k


def _series(x: Terms, terms: int) -> Terms:
    """erf(x) for small |x|."""
    m = terms + 1
    inner = where(x[0].abs() < _SMALL, x, (torch.zeros_like(x[0]),))
    wanted = terms * precision_of(x[0]) + SPARE
    log2_square = 2 * math.log2(_SMALL)
    taylor = series(
        lambda k: Fraction((-1) ** k, math.factorial(k) * (2 * k + 1)), log2_square, wanted
    )
    value = mul(inner, polynomial(mul(inner, inner, m), taylor, log2_square, terms), m)
    bits = bits_of(x[0], terms)
    return mul(value, constants(2 / exact.sqrt(exact.pi(bits), bits), m, x[0]), m)


def erf(x: Terms) -> Terms:
    """The error function."""
    terms, leading = len(x), x[0]
    far = sub(one(leading), scaled(*_complement(x, terms)), terms + 1)
    far = where(leading < 0, neg(far), far)
    value = where(leading.abs() < _SMALL, _series(x, terms), far)
    return finish(value, terms, torch.where(_passes(leading), leading, value[0]))


def _passes(x: Tensor) -> Tensor:
    return torch.isnan(x) | (x == 0)


def _upper(x: Terms, terms: int) -> tuple[Terms, Tensor]:
    """erfc(x) as v 2^k."""
    m, leading = terms + 1, x[0]
    v, k = _complement(x, terms)
    is_near = leading.abs() < _SMALL
    whole = scaled(v, k)
    other = where(
        is_near,
        sub(one(leading), _series(x, terms), m),
        sub(constants(2, 1, leading), whole, m),
    )
    is_other = is_near | (leading < 0)
    return where(is_other, other, v), torch.where(is_other, torch.zeros_like(k), k)


def erfc(x: Terms) -> Terms:
    """The complementary error function, 1 - erf(x)."""
    terms, leading = len(x), x[0]
    value = scaled(*_upper(x, terms))
    plain = torch.where(leading >= _end(BASES[leading.dtype]), 0.0, value[0])
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def ndtr(x: Terms) -> Terms:
    """The normal distribution function: erfc(-x / sqrt(2)) / 2."""
    terms, leading = len(x), x[0]
    v, k, is_inside = _normal(x, terms)
    value = where(is_inside, scaled(v, k), ((leading > 0).to(leading.dtype),))
    return finish(value, terms, torch.where(torch.isnan(leading), leading, value[0]))


def gelu(x: Terms) -> Terms:
    """x times the normal distribution function of x."""
    terms, leading = len(x), x[0]
    v, k, is_inside = _normal(x, terms)
    value = scaled(mul(v, where(is_inside, x, one(leading)), terms + 1), k)
    value = where(is_inside, value, x)
    # at -sqrt(2) end, the product lies 2 bits below the smallest subnormal
    plain = torch.where(leading <= -1.5 * _end(BASES[leading.dtype]), -0.0, value[0])
    plain = torch.copysign(plain, leading)
    return finish(value, terms, torch.where(_passes(leading), leading, plain))


def _normal(x: Terms, terms: int) -> tuple[Terms, Tensor, Tensor]:
    """The normal distribution function as v 2^k, and where it is neither 0 nor 1."""
    leading = x[0]
    m, bits, end = terms + 1, bits_of(leading, terms), _end(BASES[leading.dtype])
    is_inside = leading.abs() < 2 * end
    inner = where(is_inside, x, one(leading))
    root_half = constants(-exact.sqrt(Fraction(1, 2), bits), m, leading)
    v, k = _upper(mul(inner, root_half, m), terms)
    return v, k - 1, is_inside
