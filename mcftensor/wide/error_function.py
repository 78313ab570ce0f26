"""The error function and the normal distribution, on guarded expansions.

erf is its Taylor polynomial at the nearest multiple of 1/2. For x >= 0, erfc(x) = exp(-x²) g(x).
The range of x + 9/8 between two powers of two is divided into four intervals; in each, g is its
Taylor polynomial at the midpoint, which is 0 for the first one.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials
from mcftensor.wide.exponentials import bits_of, one
from mcftensor.wide.guarded import (
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
    scaled,
    size_of,
    sub,
    times,
    to_integer,
    where,
)

_OFFSET = Fraction(9, 8)
"""Added to x so that its exponent and two more bits are the index of an interval of g."""


def _end(base: Base) -> float:
    """Return the x beyond which erfc is less than half the smallest subnormal."""
    return math.sqrt((base.precision - base.min_exponent) * math.log(2))


def _end_of_erf(base: Base, terms: int) -> float:
    """Return the x beyond which erf is 1, to the bits of a function of `terms` terms."""
    return math.sqrt((terms * base.precision + SPARE) * math.log(2))


def _middles(base: Base) -> list[tuple[int, Fraction]]:
    """Return the exponent and the midpoint of each interval of g."""
    found: list[tuple[int, Fraction]] = []
    while not found or found[-1][1] + Fraction(2 ** found[-1][0], 8) < _end(base):
        e, j = divmod(len(found), 4)
        found.append((e, 2**e * (1 + (j + Fraction(1, 2)) / 4) - _OFFSET))
    return found


def _of_g(k: int, base: Base, terms: int) -> list[Fraction]:
    count = (terms * base.precision + SPARE) * 2 // 5 + 8
    bits = (terms + 1) * base.precision + 64
    return [exact.scaled_erfc(c, count, bits)[k] * 2 ** (e * k) for e, c in _middles(base)]


def _of_erf(k: int, base: Base, terms: int) -> list[Fraction]:
    count = (terms * base.precision + SPARE) // 3 + 8
    bits = (terms + 1) * base.precision + 64
    middles = range(round(2 * _end_of_erf(base, terms)) + 1)
    return [exact.erf_series(Fraction(c, 2), count, bits)[k] for c in middles]


def _scaled_erfc(x: Terms, terms: int) -> Terms:
    """g(x) for x at least 0 and below the end."""
    base = BASES[x[0].dtype]
    offset = (x[0] + float(_OFFSET)).view(base.integer) >> (base.precision - 3)
    bits = offset - 4 * base.max_exponent
    middles = _middles(base)
    (middle,) = chosen([c for _, c in middles], bits, 1, x[0])
    (unit,) = chosen([Fraction(1, 2**e) for e, _ in middles], bits, 1, x[0])
    h = times(sub(x, (middle,), terms + 1), unit)
    return polynomial(h, _of_g, -3, terms, bits)


def _complement(x: Terms, terms: int) -> tuple[Terms, Tensor]:
    """erfc(|x|) as v 2^k, with |x| clamped to the end."""
    m, base = terms + 1, BASES[x[0].dtype]
    size = size_of(x)
    end = constant(_end(base), x[0])
    size = where(size[0] < end, size, (end,))
    q, k = exponentials.parts(neg(mul(size, size, m)), terms)
    return mul(add(one(x[0]), q, m), _scaled_erfc(size, terms), m), k


def erf(x: Terms) -> Terms:
    """The error function."""
    terms, leading = len(x), x[0]
    base = BASES[leading.dtype]
    size = size_of(x)
    is_inside = size[0] < _end_of_erf(base, terms)
    size = where(is_inside, size, (torch.zeros_like(leading),))
    twice, bits = to_integer(2 * size[0])
    h = sub(size, (twice * 0.5,), terms + 1)
    value = where(is_inside, polynomial(h, _of_erf, -2, terms, bits), one(leading))
    value = where(leading < 0, neg(value), value)
    return finish(value, terms, torch.where(_passes(leading), leading, value[0]))


def _passes(x: Tensor) -> Tensor:
    return torch.isnan(x) | (x == 0)


def _upper(x: Terms, terms: int) -> tuple[Terms, Tensor]:
    """erfc(x) as v 2^k."""
    m, leading = terms + 1, x[0]
    v, k = _complement(x, terms)
    other = sub(constants(2, 1, leading), scaled(v, k), m)
    return where(leading < 0, other, v), torch.where(leading < 0, torch.zeros_like(k), k)


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
