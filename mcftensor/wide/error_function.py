"""The error function and the normal distribution, on guarded numbers.

erf is its Taylor polynomial at the nearest multiple of 1/2. For x >= 0, erfc(x) = exp(-x²) g(x).
The range of x + 9/8 between two powers of two is divided into four intervals; in each, g is its
Taylor polynomial at the midpoint, which is 0 for the first one.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials
from mcftensor.wide.exponentials import Result
from mcftensor.wide.guarded import SPARE, Guarded, chosen, polynomial, to_integer, where

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


def _scaled_erfc(x: Guarded) -> Guarded:
    """g(x) for x at least 0 and below the end."""
    base, leading = x.base, x.leading
    offset = (leading + float(_OFFSET)).view(base.integer) >> (base.precision - 3)
    bits = offset - 4 * base.max_exponent
    middles = _middles(base)
    (middle,) = chosen([c for _, c in middles], bits, 1, leading)
    (unit,) = chosen([Fraction(1, 2**e) for e, _ in middles], bits, 1, leading)
    return polynomial((x - middle).times(unit), _of_g, -3, bits)


def erfcx_of_size(x: Guarded) -> Result:
    """exp(x²) erfc(|x|), with |x| clamped to the end."""
    value = _scaled_erfc(_clamped(x))
    return value, value.leading


def _clamped(x: Guarded) -> Guarded:
    size, end = abs(x), _end(x.base)
    return where(size.leading < end, size, end)


def _complement(x: Guarded) -> tuple[Guarded, Tensor]:
    """erfc(|x|) as v 2^k, with |x| clamped to the end."""
    size = _clamped(x)
    q, k = exponentials.parts(-(size * size))
    return (1 + q) * _scaled_erfc(size), k


def erf(x: Guarded) -> Result:
    """The error function."""
    leading, size = x.leading, abs(x)
    is_inside = size.leading < _end_of_erf(x.base, x.count - 1)
    size = where(is_inside, size, 0.0)
    twice, bits = to_integer(2 * size.leading)
    value = where(is_inside, polynomial(size - twice * 0.5, _of_erf, -2, bits), 1.0)
    value = where(leading < 0, -value, value)
    return value, torch.where(leading == 0, leading, value.leading)


def _upper(x: Guarded) -> tuple[Guarded, Tensor]:
    """erfc(x) as v 2^k."""
    v, k = _complement(x)
    is_negative = x.leading < 0
    return where(is_negative, 2 - v.scaled(k), v), torch.where(is_negative, torch.zeros_like(k), k)


def erfc(x: Guarded) -> Result:
    """The complementary error function, 1 - erf(x)."""
    v, k = _upper(x)
    value = v.scaled(k)
    return value, torch.where(x.leading >= _end(x.base), 0.0, value.leading)


def ndtr(x: Guarded) -> Result:
    """The normal distribution function: erfc(-x / sqrt(2)) / 2."""
    v, k, is_inside = _normal(x)
    value = where(is_inside, v.scaled(k), (x.leading > 0).to(x.leading.dtype))
    return value, value.leading


def gelu(x: Guarded) -> Result:
    """x times the normal distribution function of x."""
    leading = x.leading
    v, k, is_inside = _normal(x)
    value = (v * where(is_inside, x, 1.0)).scaled(k)
    value = where(is_inside, value, x)
    # at -sqrt(2) end, the product lies 2 bits below the smallest subnormal
    plain = torch.where(leading <= -1.5 * _end(x.base), -0.0, value.leading)
    return value, torch.where(leading == 0, leading, torch.copysign(plain, leading))


def _normal(x: Guarded) -> tuple[Guarded, Tensor, Tensor]:
    """The normal distribution function as v 2^k, and where it is neither 0 nor 1."""
    is_inside = x.leading.abs() < 2 * _end(x.base)
    inner = where(is_inside, x, 1.0)
    v, k = _upper(inner * -exact.sqrt(Fraction(1, 2), x.bits))
    return v, k - 1, is_inside
