"""Logarithms, powers and the cube root, on guarded numbers.

x = 2^k f with f between the square roots of 1/2 and 2. A table gives a short float c near 1 / f, so
that z = c f - 1 is below 2^-5. Then log(x) = k log(2) - log(c) + 2 atanh(z / (2 + z)), and the last
part is a power series. Near x = 1, k = 0 and c = 1, so the relative error does not grow there.
A cube root is a polynomial, then a step of Halley's method, then a term a step.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials
from mcftensor.wide.exponentials import Result, bounded, limit_of
from mcftensor.wide.guarded import (
    Guarded,
    chosen,
    exponent_of,
    gathered,
    polynomial,
    to_integer,
    two_prod,
    where,
)

_NEAR = 1 / 64
"""The distance from 1 below which a number is represented by its distance from 1."""

_INVERSES = [Fraction(round(Fraction(256 * 32, i)), 256) for i in range(16, 48)]
"""c, for f rounded to 32nds."""

_LOG2_S2 = 2 * math.log2((1 / 45 + 1 / 256) / 2)


def _coefficient(k: int, base: Base, terms: int) -> list[Fraction]:
    return [Fraction(2, 2 * k + 1)]


@functools.lru_cache(maxsize=16)
def _table(bits: int) -> list[Fraction]:
    return [-exact.log(c, bits) for c in _INVERSES]


def parts(u: Guarded, near: Guarded | None = None) -> tuple[Guarded, Tensor]:
    """Return log(u) - k log(2) and k for normal numbers u above 0.

    If u = 1 + near and near is small, the result is computed from near.
    """
    k = exponent_of(u.leading)
    f = u.scaled(-k)
    is_large = f.leading > math.sqrt(2)
    k = torch.where(is_large, k + 1, k)
    f = where(is_large, f.times(0.5), f)
    _, bits = to_integer(f.leading * 32)
    bits = bits - 16
    (c,) = chosen(_INVERSES, bits, 1, f.leading)
    head, *tails = [v for term in f.terms for v in two_prod(term, c)]
    z = f.like(gathered([head - 1, *tails], f.count))
    if near is not None:
        z = where(near.leading.abs() < _NEAR, near, z)
    s = z / (2 + z)
    value = s * polynomial(s * s, _coefficient, _LOG2_S2)
    return value.chosen(_table(value.bits), bits) + value, k


def natural(u: Guarded, near: Guarded | None = None) -> Guarded:
    """log(u), for the arguments of `parts`."""
    return with_power(*parts(u, near))


def with_power(rest: Guarded, k: Tensor) -> Guarded:
    """rest + k log(2)."""
    return rest.of(k) * rest.of(exact.log_2) + rest


def shift_of(x: Guarded) -> float:
    """Return the exponent of the power of two by which `normal` multiplies small numbers."""
    return float(2 * x.base.precision)


def normal(x: Guarded) -> tuple[Guarded, Tensor]:
    """Multiply x by a power of two that makes it normal; return the product and the exponent.

    The product is 1 where x is not both positive and finite.
    """
    base = x.base
    x = where((x.leading > 0) & torch.isfinite(x.leading), x, 1.0)
    shift = shift_of(x)
    # No number about 1 is multiplied, though four terms of float32 and the guards end below range.
    end = min(base.min_exponent + (len(x.terms) + 1) * base.precision, -1)
    is_small = x.leading < 2.0**end
    return where(is_small, x.times(2.0**shift), x), torch.where(is_small, shift, 0.0)


def root_of_product(x: Guarded, y: Guarded) -> Guarded:
    """sqrt(x y) for y of at least 1 and x above 0, down to the smallest number."""
    x, shift = normal(x)
    half, _ = to_integer(exponent_of(x.leading) * 0.5)
    return (x.scaled(-2 * half) * y).sqrt().scaled(half - shift * 0.5)


def _log(x: Guarded, of_two: Fraction, of_e: Fraction) -> Result:
    """The logarithm to a base whose logarithms of 2 and e are `of_two` and `of_e`."""
    u, shift = normal(x)
    rest, k = parts(u)
    if of_e != 1:
        rest = rest * of_e
    value = rest.of(k - shift) * of_two + rest
    leading = x.leading
    plain = torch.where(leading == 0, -torch.inf, value.leading)
    plain = torch.where(leading == torch.inf, leading, plain)
    return value, torch.where(leading < 0, torch.nan, plain)


def of_size(x: Guarded) -> Guarded:
    """log|x|, for any x except 0, infinity and NaN."""
    u, shift = normal(where(x.leading < 0, -x, x))
    rest, k = parts(u)
    return with_power(rest, k - shift)


def log(x: Guarded) -> Result:
    """The natural logarithm."""
    return _log(x, exact.log_2(x.bits), Fraction(1))


def log2(x: Guarded) -> Result:
    """The logarithm to base 2."""
    return _log(x, Fraction(1), 1 / exact.log_2(x.bits))


def log10(x: Guarded) -> Result:
    """The logarithm to base 10."""
    of_ten = exact.log(10, x.bits)
    return _log(x, exact.log_2(x.bits) / of_ten, 1 / of_ten)


def of_one_plus(w: Guarded) -> Guarded:
    """log(1 + w) for w above -1."""
    u, shift = normal(1 + w)
    rest, k = parts(u, w)
    return with_power(rest, k - shift)


def log1p(x: Guarded) -> Result:
    """log(1 + x)."""
    leading, at_end = x.leading, (1 + x).leading
    value = of_one_plus(where(torch.isfinite(leading) & (at_end > 0), x, 0.0))
    plain = torch.where(at_end == 0, -torch.inf, value.leading)
    plain = torch.where((at_end < 0) | (leading < -1), torch.nan, plain)
    return value, torch.where((leading == torch.inf) | (leading == 0), leading, plain)


def softplus(x: Guarded) -> Result:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    leading, limit = x.leading, limit_of(x)
    is_negative = leading < 0
    q, k = exponentials.parts(bounded(where(is_negative, x, -x), limit))
    value = of_one_plus((1 + q).scaled(k))
    value = where(is_negative, 0.0, x) + where(leading.abs() >= limit, 0.0, value)
    plain = torch.where(leading == torch.inf, leading, value.leading)
    return value, torch.where(leading == -torch.inf, 0.0, plain)


# ------------------------------------------------------------------------------------- powers


def _is_whole(term: Tensor, precision: int) -> Tensor:
    """Whether a float is an integer; infinities count as integers."""
    least = 2.0 ** (precision - 1)
    size = term.abs()
    return (size >= least) | ((size + least) - least == size)


def pow(x: Guarded, y: Guarded) -> Result:
    """x^y, computed as exp(y log|x|) with the sign of x^y."""
    base, exponent, p = x.leading, y.leading, x.base.precision
    logarithm = of_size(x)
    of_base = torch.where(base == 0, -torch.inf, logarithm.leading)
    of_base = torch.where(base.abs() == torch.inf, torch.inf, of_base)
    of_base = torch.where(torch.isnan(base), base, of_base)
    about = of_base * exponent
    is_inside = (about.abs() < limit_of(x)) & torch.isfinite(of_base) & torch.isfinite(exponent)
    # For an exponent so large that splitting it overflows, the logarithm is tiny: rescale both.
    factor = 2.0 ** (x.base.max_exponent // 4)
    is_large = exponent.abs() > factor
    # Next to 1 it would lose bits below the smallest number: there log(1 + w) is w - w²/2.
    w = where(base < 0, -x, x) - 1
    is_next = w.leading.abs() < 2.0 ** (-x.wanted // 2)
    far = w.times(factor)
    far = where(is_next, far - far * w.times(0.5), logarithm.times(factor))
    logarithm = where(is_large, far, logarithm)
    y_inside = where(is_large, y.times(1 / factor), y)
    q, k = exponentials.parts(where(is_inside, logarithm, 0.0) * where(is_inside, y_inside, 0.0))
    value = (1 + q).scaled(k)
    plain = torch.where(about > 0, torch.inf, 0.0)
    plain = torch.where(is_inside, value.leading, plain)
    plain = torch.where(torch.isnan(about), torch.nan, plain)
    # Whether all terms of the exponent are integers, and whether their sum is odd.
    is_whole = exponent == exponent
    is_odd = exponent != exponent
    for term in y.terms:
        is_whole = is_whole & _is_whole(term, p)
        is_odd = is_odd ^ (_is_whole(term, p) & ~_is_whole(term * 0.5, p))
    is_undefined = (base < 0) & torch.isfinite(base) & ~is_whole
    plain = torch.where(is_undefined, torch.nan, plain)
    flips = torch.signbit(base) & is_odd & is_whole
    value = where(flips, -value, value)
    plain = torch.where(flips, -plain, plain)
    is_unit = base.abs() == 1
    for tail in x.terms[1:]:
        is_unit = is_unit & (tail == 0)
    is_one = (exponent == 0) | (is_unit & ((base == 1) | (exponent.abs() == torch.inf)))
    return where(is_one, 1.0, value), torch.where(is_one, 1.0, plain)


_FIRST = (0.497878, 0.713062, -0.265975, 0.060854, -0.005487)
"""A polynomial with a relative error of 2^-9 on [1/2, 4]. Halley's method cubes the error."""


def cube_root(x: Guarded) -> Result:
    """The cube root, with the sign of x."""
    leading, base = x.leading, x.base
    is_ordinary = torch.isfinite(leading) & (leading != 0)
    size = where(is_ordinary, abs(x), 1.0)
    lift = base.max_exponent // 12  # of the root, for numbers near the smallest
    is_tiny = size.leading < 2.0 ** (base.precision - base.max_exponent)
    size = where(is_tiny, size.times(8.0**lift), size)
    k, _ = to_integer(exponent_of(size.leading) * (1 / 3))
    size = size.scaled(-3.0 * k)
    root, first = torch.zeros_like(leading), size.leading
    for c in reversed(_FIRST):
        root = root * first + c
    for _ in range(2):
        cube = root * root * root
        root = root * ((cube + 2 * first) / (2 * cube + first))
    value = size.of(root)
    for _ in range(size.count - 1):
        rest = size - value * value * value
        terms = [*value.terms, rest.leading / (3 * root * root)]
        value = size.like(gathered(terms, len(terms)))
    value = value.scaled(k - torch.where(is_tiny, float(lift), 0.0))
    value = where(leading < 0, -value, value)
    return value, torch.where(is_ordinary, value.leading, leading)
