"""Logarithms, powers and the cube root, on guarded expansions.

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

from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials
from mcftensor.wide.exponentials import bits_of, bounded, limit_of, one
from mcftensor.wide.guarded import (
    SPARE,
    Terms,
    add,
    chosen,
    constants,
    div,
    exponent_of,
    finish,
    gathered,
    mul,
    neg,
    polynomial,
    precision_of,
    scaled,
    size_of,
    sqrt,
    sub,
    times,
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


def parts(u: Terms, terms: int, near: Terms | None = None) -> tuple[Terms, Tensor]:
    """Return log(u) - k log(2) and k for normal numbers u above 0.

    If u = 1 + near and near is small, the result is computed from near.
    """
    m = terms + 1
    k = exponent_of(u[0])
    f = scaled(u, -k)
    is_large = f[0] > math.sqrt(2)
    k = torch.where(is_large, k + 1, k)
    f = where(is_large, times(f, 0.5), f)
    _, bits = to_integer(f[0] * 32)
    bits = bits - 16
    (c,) = chosen(_INVERSES, bits, 1, f[0])
    products = [v for term in f for v in two_prod(term, c)]
    head, *tails = products
    z = gathered([head - 1, *tails], m)
    if near is not None:
        z = where(near[0].abs() < _NEAR, near, z)
    s = div(z, add(add(one(c), one(c), 1), z, m), m)
    value = mul(s, polynomial(mul(s, s, m), _coefficient, _LOG2_S2, terms), m)
    return add(chosen(_table(bits_of(c, terms)), bits, m, c), value, m), k


def natural(u: Terms, terms: int, near: Terms | None = None) -> Terms:
    """log(u), for the arguments of `parts`."""
    rest, k = parts(u, terms, near)
    return with_power(rest, k, terms)


def with_power(rest: Terms, k: Tensor, terms: int) -> Terms:
    """rest + k log(2)."""
    log_2 = constants(exact.log(2, bits_of(k, terms)), terms + 1, k)
    return add(mul((k,), log_2, terms + 1), rest, terms + 1)


def shift_of(x: Tensor) -> float:
    """Return the exponent of the power of two by which `normal` multiplies small numbers."""
    return float(2 * BASES[x.dtype].precision)


def normal(x: Terms) -> tuple[Terms, Tensor]:
    """Multiply x by a power of two that makes it normal; return the product and the exponent.

    The product is 1 where x is not both positive and finite.
    """
    base = BASES[x[0].dtype]
    inside = (x[0] > 0) & torch.isfinite(x[0])
    x = where(inside, x, one(x[0]))
    shift = shift_of(x[0])
    # No number about 1 is multiplied, though four terms of float32 and the guards end below range.
    end = min(base.min_exponent + (len(x) + 1) * base.precision, -1)
    is_small = x[0] < 2.0**end
    return where(is_small, times(x, 2.0**shift), x), torch.where(is_small, shift, 0.0)


def root_of_product(x: Terms, y: Terms, count: int) -> Terms:
    """sqrt(x y) for y of at least 1 and x above 0, down to the smallest number."""
    x, shift = normal(x)
    half, _ = to_integer(exponent_of(x[0]) * 0.5)
    root = sqrt(mul(scaled(x, -2 * half), y, count), count)
    return scaled(root, half - shift * 0.5)


def _special(x: Terms, value: Terms) -> Tensor:
    """The leading term of a logarithm, with the results for 0, infinity, NaN and negative x."""
    leading = x[0]
    plain = torch.where(leading == 0, -torch.inf, value[0])
    plain = torch.where(leading == torch.inf, leading, plain)
    return torch.where((leading < 0) | torch.isnan(leading), torch.nan, plain)


def _log(x: Terms, of_two: Fraction, of_e: Fraction) -> Terms:
    """The logarithm to a base whose logarithms of 2 and e are `of_two` and `of_e`."""
    terms = len(x)
    u, shift = normal(x)
    rest, k = parts(u, terms)
    m = terms + 1
    if of_e != 1:
        rest = mul(rest, constants(of_e, m, k), m)
    value = add(mul((k - shift,), constants(of_two, m, k), m), rest, m)
    return finish(value, terms, _special(x, value))


def of_size(x: Terms, terms: int) -> Terms:
    """log|x| as a guarded number, for any x except 0, infinity and NaN."""
    u, shift = normal(where(x[0] < 0, neg(x), x))
    rest, k = parts(u, terms)
    return with_power(rest, k - shift, terms)


def log(x: Terms) -> Terms:
    """The natural logarithm."""
    return _log(x, exact.log(2, bits_of(x[0], len(x))), Fraction(1))


def log2(x: Terms) -> Terms:
    """The logarithm to base 2."""
    return _log(x, Fraction(1), 1 / exact.log(2, bits_of(x[0], len(x))))


def log10(x: Terms) -> Terms:
    """The logarithm to base 10."""
    bits = bits_of(x[0], len(x))
    return _log(x, exact.log(2, bits) / exact.log(10, bits), 1 / exact.log(10, bits))


def of_one_plus(w: Terms, terms: int) -> Terms:
    """log(1 + w) for guarded numbers w above -1."""
    u, shift = normal(add(one(w[0]), w, terms + 1))
    rest, k = parts(u, terms, w)
    return with_power(rest, k - shift, terms)


def log1p(x: Terms) -> Terms:
    """log(1 + x)."""
    terms, leading = len(x), x[0]
    is_inside = torch.isfinite(leading) & (add(one(leading), x, terms + 1)[0] > 0)
    value = of_one_plus(where(is_inside, x, (torch.zeros_like(leading),)), terms)
    at_end = add(one(leading), x, terms + 1)[0]
    plain = torch.where(at_end == 0, -torch.inf, value[0])
    plain = torch.where((at_end < 0) | (leading < -1), torch.nan, plain)
    plain = torch.where((leading == torch.inf) | (leading == 0), leading, plain)
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def softplus(x: Terms) -> Terms:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    terms, leading = len(x), x[0]
    is_negative = leading < 0
    inside = bounded(where(is_negative, x, neg(x)), limit_of(leading) * math.log(2))
    q, k = exponentials.parts(inside, terms)
    w = scaled(add(one(leading), q, terms + 1), k)
    value = of_one_plus(w, terms)
    is_beyond = leading.abs() >= limit_of(leading) * math.log(2)
    zero = (torch.zeros_like(leading),)
    value = add(where(is_negative, zero, x), where(is_beyond, zero, value), terms + 1)
    plain = torch.where(leading == torch.inf, leading, value[0])
    plain = torch.where(leading == -torch.inf, 0.0, plain)
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


# ------------------------------------------------------------------------------------- powers


def _is_whole(term: Tensor) -> Tensor:
    """Whether a float is an integer; infinities count as integers."""
    least = 2.0 ** (precision_of(term) - 1)
    size = term.abs()
    return (size >= least) | ((size + least) - least == size)


def pow(x: Terms, y: Terms) -> Terms:
    """x^y, computed as exp(y log|x|) with the sign of x^y."""
    terms, (base, exponent) = len(x), (x[0], y[0])
    m, logarithm = terms + 1, of_size(x, terms)
    limit = limit_of(base) * math.log(2)
    of_base = torch.where(base == 0, -torch.inf, logarithm[0])
    of_base = torch.where(base.abs() == torch.inf, torch.inf, of_base)
    of_base = torch.where(torch.isnan(base), base, of_base)
    about = of_base * exponent
    is_inside = (about.abs() < limit) & torch.isfinite(of_base) & torch.isfinite(exponent)
    zero = (torch.zeros_like(about),)
    # For an exponent so large that splitting it overflows, the logarithm is tiny: rescale both.
    factor = 2.0 ** (BASES[base.dtype].max_exponent // 4)
    is_large = exponent.abs() > factor
    # Next to 1 it would lose bits below the smallest number: there log(1 + w) is w - w²/2.
    w = sub(where(base < 0, neg(x), x), one(base), m)
    is_next = w[0].abs() < 2.0 ** (-(terms * precision_of(base) + SPARE) // 2)
    far = times(w, factor)
    far = where(is_next, sub(far, mul(far, times(w, 0.5), m), m), times(logarithm, factor))
    logarithm = where(is_large, far, logarithm)
    y_inside = where(is_large, times(y, 1 / factor), y)
    product = mul(where(is_inside, logarithm, zero), where(is_inside, y_inside, zero), m)
    q, k = exponentials.parts(product, terms)
    value = scaled(add(one(base), q, m), k)
    plain = torch.where(about > 0, torch.inf, 0.0)
    plain = torch.where(torch.isnan(about), torch.nan, torch.where(is_inside, value[0], plain))
    # Whether all terms of the exponent are integers, and whether their sum is odd.
    is_whole = exponent == exponent
    is_odd = exponent != exponent
    for term in y:
        is_whole = is_whole & _is_whole(term)
        is_odd = is_odd ^ (_is_whole(term) & ~_is_whole(term * 0.5))
    is_odd = is_odd & is_whole
    is_negative = torch.signbit(base)
    is_undefined = (base < 0) & torch.isfinite(base) & ~is_whole
    plain = torch.where(is_undefined, torch.nan, plain)
    flips = is_negative & is_odd
    value = where(flips, neg(value), value)
    plain = torch.where(flips, -plain, plain)
    is_unit = base.abs() == 1
    for tail in x[1:]:
        is_unit = is_unit & (tail == 0)
    is_one = (exponent == 0) | (is_unit & ((base == 1) | (exponent.abs() == torch.inf)))
    value = where(is_one, one(base), value)
    return finish(value, terms, torch.where(is_one, 1.0, plain))


_FIRST = (0.497878, 0.713062, -0.265975, 0.060854, -0.005487)
"""A polynomial with a relative error of 2^-9 on [1/2, 4]. Halley's method cubes the error."""


def cube_root(x: Terms) -> Terms:
    """The cube root, with the sign of x."""
    terms, leading = len(x), x[0]
    m, base = terms + 1, BASES[leading.dtype]
    is_ordinary = torch.isfinite(leading) & (leading != 0)
    size = where(is_ordinary, size_of(x), one(leading))
    lift = base.max_exponent // 12  # of the root, for numbers near the smallest
    is_tiny = size[0] < 2.0 ** (base.precision - base.max_exponent)
    size = where(is_tiny, times(size, 8.0**lift), size)
    k, _ = to_integer(exponent_of(size[0]) * (1 / 3))
    size = scaled(size, -3.0 * k)
    root = torch.zeros_like(leading)
    for c in reversed(_FIRST):
        root = root * size[0] + c
    for _ in range(2):
        cube = root * root * root
        root = root * ((cube + 2 * size[0]) / (2 * cube + size[0]))
    slope = 3 * root * root
    value: Terms = (root,)
    for _ in range(terms):
        rest = sub(size, mul(mul(value, value, m), value, m), m)
        value = gathered([*value, rest[0] / slope], len(value) + 1)
    value = scaled(value, k - torch.where(is_tiny, float(lift), 0.0))
    value = where(leading < 0, neg(value), value)
    return finish(value, terms, torch.where(is_ordinary, value[0], leading))
