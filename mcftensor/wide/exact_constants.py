"""Constants of elementary functions as rationals of any number of bits, by mpmath.

Each function takes a number of bits, and returns a fraction that differs from the constant by less
than 2^-bits.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import mpmath
from mpmath.libmp import from_rational, to_rational

Constant = Fraction | int | float

_GUARD = 32
"""Extra bits of an evaluation."""


@functools.lru_cache(maxsize=4096)
def floats_of(value: Constant, precision: int, count: int) -> tuple[float, ...]:
    """Return a constant as `count` floats of `precision` bits, each nearest to the remainder."""
    rest, found = Fraction(value), []
    for _ in range(count):
        nearest = Fraction(*to_rational(from_rational(*rest.as_integer_ratio(), precision, "n")))
        found.append(float(nearest))
        rest -= nearest
    return tuple(found)


def log2_of(x: Constant) -> float:
    """log2 of a magnitude of any range, to a few digits."""
    x = Fraction(x)
    return math.log2(abs(x.numerator)) - math.log2(x.denominator) if x else -math.inf


def _context(bits: int) -> Any:
    """Return a context of mpmath, whose precision no other thread changes."""
    context = mpmath.MPContext()
    context.prec = bits + _GUARD
    return context


def _fraction(x: Any) -> Fraction:
    return Fraction(*to_rational(x._mpf_))


@functools.lru_cache(maxsize=4096)
def value(function: str, bits: int, *operands: Fraction | int) -> Fraction:
    """Return a function of rational numbers by its name in mpmath."""
    context = _context(bits)
    numbers = [context.mpf(x.numerator) / x.denominator for x in operands]
    return _fraction(getattr(context, function)(*numbers))


def pi(bits: int) -> Fraction:
    """The constant pi."""
    return value("acos", bits, -1)


def log(x: Fraction | int, bits: int) -> Fraction:
    """The natural logarithm."""
    return value("log", bits, x)


def sqrt(x: Fraction | int, bits: int) -> Fraction:
    """The square root."""
    return value("sqrt", bits, x)


@functools.lru_cache(maxsize=1024)
def bernoulli(k: int) -> Fraction:
    """The Bernoulli number B_2k, exactly."""
    return Fraction(*map(int, mpmath.bernfrac(2 * k)))


@functools.lru_cache(maxsize=4)
def root_of_digamma(bits: int) -> Fraction:
    """The positive zero of digamma."""
    context = _context(bits)
    return _fraction(context.findroot(context.digamma, 1.4616321449683622))


@functools.lru_cache(maxsize=256)
def scaled_erfc(c: Fraction, count: int, bits: int) -> tuple[Fraction, ...]:
    """The Taylor coefficients of g(x) = exp(x²) erfc(x) at c >= 0.

    They follow from g' = 2 x g - 2 / sqrt(pi), with more bits, since the computation cancels.
    """
    mp = _context(bits + math.ceil(float(c * c) * 1.5 + count * (math.log2(float(c) + 2) + 4)))
    x = mp.mpf(c.numerator) / c.denominator
    found = [mp.exp(x * x) * mp.erfc(x)]
    found.append(2 * x * found[0] - 2 / mp.sqrt(mp.pi))
    for k in range(1, count - 1):
        found.append(2 * (x * found[k] + found[k - 1]) / (k + 1))
    return tuple(map(_fraction, found))


@functools.lru_cache(maxsize=256)
def erf_series(c: Fraction, count: int, bits: int) -> tuple[Fraction, ...]:
    """The Taylor coefficients of erf at c >= 0, with an absolute error of 2^-bits.

    They follow from f'' = -2 x f', where an error grows at most e^(2 c) times.
    """
    mp = _context(bits + math.ceil(3 * c) + count)
    x = mp.mpf(c.numerator) / c.denominator
    found = [mp.erf(x), 2 / mp.sqrt(mp.pi) * mp.exp(-x * x)]
    for k in range(1, count - 1):
        found.append(-2 * (x * k * found[k] + (k - 1) * found[k - 1]) / (k * (k + 1)))
    return tuple(map(_fraction, found))
