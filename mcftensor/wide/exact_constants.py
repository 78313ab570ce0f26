"""Constants of elementary functions as rationals of any number of bits, computed with integers.

Each function takes a number of bits, and returns a fraction that differs from the constant by less
than 2^-bits.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

Constant = Fraction | int | float

_GUARD = 32
"""Extra bits in sums of rounded terms."""


@functools.lru_cache(maxsize=4096)
def floats_of(value: Constant, precision: int, count: int) -> tuple[float, ...]:
    """Return a constant as `count` floats of `precision` bits, each nearest to the remainder."""
    rest, found = Fraction(value), []
    for _ in range(count):
        nearest = _nearest(rest, precision)
        found.append(float(nearest))
        rest -= nearest
    return tuple(found)


def _nearest(x: Fraction, precision: int) -> Fraction:
    """Round a number to `precision` bits, ties to even."""
    if not x:
        return x
    n, d = abs(x.numerator), x.denominator
    shift = precision - (n.bit_length() - d.bit_length())  # makes n / d as long, or a bit longer
    n, d = (n << shift, d) if shift >= 0 else (n, d << -shift)
    if n >= d << precision:
        d, shift = d << 1, shift - 1
    whole, rest = divmod(n, d)
    whole += 2 * rest > d or (2 * rest == d and whole & 1)
    found = Fraction(whole, 1 << shift) if shift >= 0 else Fraction(whole << -shift)
    return found if x > 0 else -found


def log2_of(x: Constant) -> float:
    """log2 of a magnitude of any range, to a few digits."""
    x = Fraction(x)
    return math.log2(abs(x.numerator)) - math.log2(x.denominator) if x else -math.inf


def _fixed(x: Fraction, bits: int) -> int:
    return (x.numerator << bits) // x.denominator


@functools.lru_cache(maxsize=256)
def atan(x: Fraction, bits: int) -> Fraction:
    """The arctangent of a number from 0 to 1, by Euler's series.

    Each term is the previous one times 2k / (2k + 1) x² / (1 + x²).
    """
    one = bits + _GUARD
    term = _fixed(x / (1 + x * x), one)
    ratio = x * x / (1 + x * x)
    total, k = 0, 0
    while term:
        total += term
        k += 1
        term = term * 2 * k * ratio.numerator // ((2 * k + 1) * ratio.denominator)
    return Fraction(total, 1 << one)


def pi(bits: int) -> Fraction:
    """The constant pi."""
    return 4 * atan(Fraction(1), bits + 4)


@functools.lru_cache(maxsize=1024)
def log(x: Fraction | int, bits: int) -> Fraction:
    """The natural logarithm of x = 2^n y, by the series of 2 atanh((y - 1) / (y + 1))."""
    x, one = Fraction(x), bits + _GUARD
    n = 0 if x == 2 else round(log2_of(x))
    y = (x / Fraction(2) ** n - 1) / (x / Fraction(2) ** n + 1)
    power, total, k = _fixed(y, one), 0, 1
    while power not in (0, -1):
        total += power // k
        power = power * y.numerator**2 // y.denominator**2
        k += 2
    return Fraction(2 * total, 1 << one) + (n * log(2, bits + 8) if n else 0)


@functools.lru_cache(maxsize=256)
def root_of_power(j: int, log2_root: int, bits: int) -> Fraction:
    """2^(j / 2^log2_root), by log2_root square roots."""
    one = bits + _GUARD
    x = 1 << (one + j)
    for _ in range(log2_root):
        x = math.isqrt(x << one)
    return Fraction(x, 1 << one)


def log_2(bits: int) -> Fraction:
    """log(2)."""
    return log(2, bits)


def sqrt(x: Fraction | int, bits: int) -> Fraction:
    """The square root."""
    one = bits + _GUARD
    return Fraction(math.isqrt(_fixed(Fraction(x), 2 * one)), 1 << one)


def exp(x: Fraction, bits: int) -> Fraction:
    """e^x for x >= 0, by its power series."""
    one = bits + _GUARD
    term, total, k = 1 << one, 0, 0
    while term:
        total += term
        k += 1
        term = term * x.numerator // (x.denominator * k)
    return Fraction(total, 1 << one)


@functools.lru_cache(maxsize=256)
def scaled_erfc(c: Fraction, count: int, bits: int) -> tuple[Fraction, ...]:
    """The Taylor coefficients of g(x) = exp(x²) erfc(x) at c >= 0.

    The first one follows from exp(x²) erf(x), the others from g' = 2 x g - 2 / sqrt(pi). Both
    computations cancel, so they use more bits.
    """
    one = bits + math.ceil(float(c * c) * 1.5 + count * (math.log2(float(c) + 2) + 4)) + _GUARD
    total = _scaled_erf(c, one)
    factor = _fixed(2 / sqrt(pi(one), one), one)
    series = [_fixed(exp(c * c, one), one) - (total * factor >> one)]
    twice = 2 * c
    series.append(series[0] * twice.numerator // twice.denominator - factor)
    for k in range(1, count):
        after = series[k] * twice.numerator // twice.denominator + 2 * series[k - 1]
        series.append(after // (k + 1))
    return tuple(_nearest(Fraction(x, 1 << one), bits) for x in series[:count])


@functools.lru_cache(maxsize=256)
def erf_series(c: Fraction, count: int, bits: int) -> tuple[Fraction, ...]:
    """The Taylor coefficients of erf at c >= 0, with an absolute error of 2^-bits.

    The others follow from f'' = -2 x f', where an error grows at most e^(2 c) times.
    """
    one = bits + math.ceil(float(c) * (float(c) * 1.5 + 3)) + count + _GUARD
    slope = _fixed(2 / (sqrt(pi(one), one) * exp(c * c, one)), one)
    slopes, twice = [slope], 2 * c
    for k in range(count - 2):
        after = slopes[k] * twice.numerator // twice.denominator
        slopes.append(-(after + (2 * slopes[k - 1] if k else 0)) // (k + 1))
    series = [_scaled_erf(c, one) * slope >> one, *(x // (k + 1) for k, x in enumerate(slopes))]
    return tuple(_nearest(Fraction(x, 1 << one), bits) for x in series)


def _scaled_erf(c: Fraction, one: int) -> int:
    """sqrt(pi) / 2 exp(c²) erf(c), the sum of 2^k c^(2k + 1) / (2k + 1)!!, in units of 2^-one."""
    square, term, total, k = c * c, _fixed(c, one), 0, 0
    while term:
        total += term
        k += 1
        term = term * 2 * square.numerator // (square.denominator * (2 * k + 1))
    return total


@functools.lru_cache(maxsize=8)
def _bernoulli(count: int) -> tuple[Fraction, ...]:
    """The Bernoulli numbers B_0, B_2, B_4, ..., exactly, each from all previous ones."""
    found = [Fraction(1), Fraction(-1, 2)]
    for n in range(2, 2 * count):
        total = Fraction(sum(math.comb(n + 1, k) * b for k, b in enumerate(found) if b))
        found.append(-total / (n + 1) if n % 2 == 0 else Fraction(0))
    return tuple(found[: 2 * count : 2])


def bernoulli(k: int) -> Fraction:
    """The Bernoulli number B_2k, exactly."""
    return _bernoulli(1 << max(k.bit_length(), 4))[k]


@functools.lru_cache(maxsize=512)
def hurwitz(s: int, x: Fraction, bits: int) -> Fraction:
    """The Hurwitz zeta function at an integer s above 1 and x from 1 to 2; at s = 1, -digamma(x).

    At x = 1 it is the Riemann zeta function, or Euler's constant. The Euler-Maclaurin formula sums
    the later terms.
    """
    count, one = bits // 4 + s, bits + _GUARD
    total = sum(
        (1 << one) * x.denominator**s // (x.numerator + i * x.denominator) ** s
        for i in range(count)
    )
    w = _nearest(x + count, one)
    rest = 1 / w ** (s - 1) / (s - 1) if s > 1 else -log(w, one)
    total += _fixed(rest + 1 / w**s / 2, one)
    part = s / w ** (s + 1)
    for k in range(1, count // 2):
        term = _fixed(bernoulli(k) / math.factorial(2 * k) * part, one)
        if term in (0, -1):
            break
        total += term
        part = _nearest(part * (s + 2 * k - 1) * (s + 2 * k) / w**2, one)
    return Fraction(total, 1 << one)


@functools.lru_cache(maxsize=4)
def root_of_digamma(bits: int) -> Fraction:
    """The positive zero of digamma, by Newton's method."""
    x, right = Fraction(1.4616321449683622), 48
    while right < bits:
        right = min(2 * right - 4, bits + 4)
        x = _nearest(x + hurwitz(1, x, right) / hurwitz(2, x, right), right)
    return x
