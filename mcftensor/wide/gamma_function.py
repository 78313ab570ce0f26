"""The gamma function, its logarithm, and two derivatives of that, on guarded expansions.

Arguments below 1/2 are reflected. Other arguments are shifted by the recurrence until Stirling's
series has all bits. The logarithm of the product P = x (x + 1) (x + 2) ... is then subtracted.
Taylor series are used near 1 and 2, where the logarithm of the gamma function is 0, and near the
positive zero of its derivative. Near zeros below 0 the error is relative to the cancelling parts.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials, logarithms
from mcftensor.wide.exponentials import bits_of, one
from mcftensor.wide.guarded import (
    SPARE,
    Coefficients,
    Terms,
    add,
    constants,
    div,
    exponent_of,
    finish,
    mul,
    neg,
    polynomial,
    precision_of,
    scaled,
    sub,
    times,
    where,
)
from mcftensor.wide.trigonometry import half_turns, remainder, turn

_LOG2_Z = -3
"""log2 of the distance from a zero within which the Taylor series is used."""


@functools.lru_cache(maxsize=16)
def _log2_start(base: Base, terms: int) -> int:
    """Return log2 of the argument where Stirling's series has all bits."""
    log2_start, wanted = 3, terms * base.precision + SPARE
    while all(
        exact.log2_of(exact.bernoulli(k)) - (2 * k - 1) * log2_start >= -wanted - 8
        for k in range(2, 2 << log2_start)
    ):
        log2_start += 1
    return log2_start


def _moved(y: Terms, terms: int, order: int) -> tuple[Terms, list[Terms], Tensor]:
    """Shift y by an integer i until Stirling's series has all bits.

    Returns y + i, the product y (y + 1) ... (y + i - 1) with `order` derivatives, all divided by a
    power of two, and log2 of this power.
    """
    m = terms + 1
    log2_start = _log2_start(BASES[y[0].dtype], terms)
    product: list[Terms] = [one(y[0])]
    power = torch.zeros_like(y[0])
    for i in range(1 << log2_start):
        is_before = y[0] + i < (1 << log2_start)
        factor = where(
            is_before, times(add(y, constants(i, 1, y[0]), m), 2.0**-log2_start), one(y[0])
        )
        slope = torch.where(is_before, 2.0**-log2_start, 0.0)
        raised = [mul(z, factor, m) for z in product]
        for k in range(1, min(order, len(product)) + 1):
            lower = times(product[k - 1], slope * k)
            if k < len(product):
                raised[k] = add(raised[k], lower, m)
            else:
                raised.append(lower)
        product = raised
        power = power + torch.where(is_before, 1.0, 0.0)
    return add(y, (power,), m), product, power * float(log2_start)


_COEFFICIENTS: tuple[Coefficients, ...] = (
    lambda k, base, terms: [exact.bernoulli(k + 1) / ((2 * k + 2) * (2 * k + 1))],
    lambda k, base, terms: [-exact.bernoulli(k + 1) / (2 * k + 2)],
    lambda k, base, terms: [exact.bernoulli(k + 1)],
)
"""Of Stirling's series for lgamma, and its first two derivatives."""


def _stirling(w: Terms, terms: int, order: int) -> Terms:
    """Sum Stirling's series without its logarithm and without nonnegative powers of w.

    The function is lgamma if `order` is 0, else its first or second derivative.
    """
    m = terms + 1
    log2_start = _log2_start(BASES[w[0].dtype], terms)
    inverse = _inverse(w, m)
    square = mul(inverse, inverse, m)
    value = polynomial(square, _COEFFICIENTS[order], -2.0 * log2_start, terms)
    if order == 0:
        return mul(value, inverse, m)
    if order == 1:
        return sub(mul(value, square, m), times(inverse, 0.5), m)
    value = mul(mul(value, square, m), inverse, m)
    return add(inverse, add(times(square, 0.5), value, m), m)


def _inverse(x: Terms, count: int) -> Terms:
    """1 / x, scaled so that no intermediate product overflows."""
    e = exponent_of(x[0])
    return scaled(div(one(x[0]), scaled(x, -e), count), -e)


def _reflected(x: Terms, terms: int) -> tuple[Terms, Tensor, Terms, Tensor]:
    """Reflect arguments below 1/2.

    Returns x or 1 - x, whether x was reflected, the distance of x from the nearest integer, and
    whether x is finite.
    """
    m, leading = terms + 1, x[0]
    is_finite = torch.isfinite(leading)
    x = where(is_finite, x, one(leading))
    is_below = x[0] < 0.5
    distance = remainder(x, 1.0, m)
    return where(is_below, sub(one(leading), x, m), x), is_below, distance, is_finite


def _at_one(k: int, base: Base, terms: int) -> list[Fraction]:
    """The coefficient of z^(k + 1) in lgamma(1 + z)."""
    bits = (terms + 1) * base.precision + 32
    number = exact.value("zeta", bits, k + 1) if k else -exact.value("digamma", bits, 1)
    return [number * (-1) ** (k + 1) / (k + 1)]


def _logarithm(x: Terms, y: Terms, is_small: Tensor) -> Terms:
    """The logarithm of gamma(y) for y >= 1/2, or of gamma(1 + x) where x is small."""
    terms, leading = len(x), x[0]
    m, bits = terms + 1, bits_of(leading, terms)
    w, (product,), power = _moved(y, terms, 0)
    large = BASES[leading.dtype].max_exponent // 2
    is_large = w[0] > 2.0**large
    shift = 2.0 ** -(large // 2)
    first = where(is_large, times(w, shift), sub(w, constants(Fraction(1, 2), 1, leading), m))
    value = mul(first, sub(logarithms.natural(w, terms), one(leading), m), m)
    log_2 = exact.log(2, bits)
    rest = sub(_stirling(w, terms, 0), logarithms.natural(product, terms), m)
    rest = sub(rest, mul((power,), constants(log_2, m, leading), m), m)
    rest = add(rest, constants((exact.log(2 * exact.pi(bits + 8), bits) - 1) / 2, m, leading), m)
    value = add(value, where(is_large, (torch.zeros_like(leading),), rest), m)
    value = where(is_large, times(value, 1 / shift), value)
    # near 1 and 2
    from_one = where(is_small, x, sub(y, one(leading), m))
    is_one = from_one[0] < 0.5
    z = where(is_one, from_one, sub(from_one, one(leading), m))
    is_near = z[0].abs() < 2.0**_LOG2_Z
    z = where(is_near, z, (torch.zeros_like(leading),))
    near = mul(z, polynomial(z, _at_one, _LOG2_Z, terms), m)
    added = where(is_one, (torch.zeros_like(leading),), logarithms.of_one_plus(z, terms))
    return where(is_near, add(near, added, m), value)


def lgamma(x: Terms) -> Terms:
    """The logarithm of |gamma(x)|."""
    terms, leading = len(x), x[0]
    m = terms + 1
    y, is_below, distance, is_finite = _reflected(x, terms)
    is_small = leading.abs() < 2.0**_LOG2_Z  # lgamma(1 + x) - log|x|
    value = _logarithm(x, y, is_small)
    # below 1/2
    is_pole = distance[0] == 0
    is_mirrored = is_below & ~is_pole & ~is_small
    sine, _ = turn(where(is_mirrored, distance, constants(Fraction(1, 4), 1, leading)), terms)
    log_pi = constants(
        exact.log(exact.pi(bits_of(leading, terms) + 8), bits_of(leading, terms)), m, leading
    )
    mirrored = sub(sub(log_pi, logarithms.of_size(sine, terms), m), value, m)
    small = sub(value, logarithms.of_size(x, terms), m)
    value = where(is_small, small, where(is_below, mirrored, value))
    plain = torch.where(is_below & is_pole, torch.inf, value[0])
    plain = torch.where(is_finite, plain, torch.inf)
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def gamma_of(x: Terms) -> Terms:
    """The gamma function: an exponential, divided by x near 0 and by a sine below 1/2."""
    terms, leading = len(x), x[0]
    m, limit = terms + 1, exponentials.limit_of(leading) * math.log(2)
    y, is_below, _, is_finite = _reflected(x, terms)
    is_small = leading.abs() < 2.0**_LOG2_Z
    logarithm = _logarithm(x, y, is_small)
    is_mirrored = is_below & ~is_small
    logarithm = where(is_mirrored, neg(logarithm), logarithm)
    q, k = exponentials.parts(exponentials.bounded(logarithm, limit), terms)
    sine, _ = half_turns(x)
    sine = where(leading < 0, neg(sine), sine)
    divisor = where(is_mirrored, sine, where(is_small, x, one(leading)))
    is_pole = divisor[0] == 0
    divisor = where(is_pole, one(leading), divisor)
    e = exponent_of(divisor[0])
    quotient = div(add(one(leading), q, m), scaled(divisor, -e), m)
    pi = constants(exact.pi(bits_of(leading, terms)), m, leading)
    value = scaled(where(is_mirrored, mul(quotient, pi, m), quotient), k - e)
    plain = torch.where(logarithm[0] >= limit, torch.inf, value[0])
    plain = torch.where(logarithm[0] <= -limit, 0.0 * sine[0], plain)
    plain = torch.where(is_pole, torch.where(leading == 0, 1 / leading, torch.nan), plain)
    plain = torch.where(is_finite, plain, torch.where(leading > 0, leading, torch.nan))
    return finish(value, terms, plain)


def _at_root(k: int, base: Base, terms: int) -> list[Fraction]:
    """The coefficient of z^(k + 1) in digamma(root + z)."""
    root, bits = _root(base, terms), (terms + 1) * base.precision + 32
    return [(-1) ** k * exact.value("zeta", bits, k + 2, root)]


def _root(base: Base, terms: int) -> Fraction:
    return exact.root_of_digamma((2 * terms + 1) * base.precision + 32)


def _near_root(x: Terms, terms: int) -> tuple[Terms, Tensor]:
    """digamma(x) near its positive root, and where x is near it."""
    leading = x[0]
    root = _root(BASES[leading.dtype], terms)
    # As x may have all leading bits of the root, the difference is exact.
    z = networks.distill([*x, *neg(constants(root, 2 * terms, leading))], terms + 1)
    is_near = z[0].abs() < 2.0**_LOG2_Z
    z = where(is_near, z, (torch.zeros_like(leading),))
    return mul(z, polynomial(z, _at_root, _LOG2_Z, terms), terms + 1), is_near


def digamma(x: Terms) -> Terms:
    """The derivative of log|gamma(x)|."""
    terms, leading = len(x), x[0]
    m = terms + 1
    y, is_below, distance, is_finite = _reflected(x, terms)
    w, (product, slope), _ = _moved(y, terms, 1)
    value = add(logarithms.natural(w, terms), _stirling(w, terms, 1), m)
    value = sub(value, div(slope, product, m), m)
    near, is_near = _near_root(y, terms)
    value = where(is_near & ~is_below, near, value)
    is_pole = distance[0] == 0
    tiny = leading.abs() < 2.0 ** -(terms * precision_of(leading) + 6)
    safe = where(is_below & ~is_pole & ~tiny, distance, constants(Fraction(1, 4), 1, leading))
    sine, cosine = turn(safe, terms)
    pi = constants(exact.pi(bits_of(leading, terms)), m, leading)
    value = where(is_below, sub(value, mul(div(cosine, sine, m), pi, m), m), value)
    inverse = _inverse(where(leading == 0, one(leading), x), m)
    value = where(tiny, neg(inverse), value)
    plain = torch.where(is_below & is_pole, torch.nan, value[0])
    plain = torch.where(
        leading == 0, torch.copysign(torch.full_like(leading, torch.inf), -leading), plain
    )
    plain = torch.where(is_finite, plain, torch.where(leading > 0, leading, torch.nan))
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def trigamma(x: Terms) -> Terms:
    """The second derivative of log|gamma(x)|."""
    terms, leading = len(x), x[0]
    m = terms + 1
    y, is_below, distance, is_finite = _reflected(x, terms)
    w, (product, slope, bend), _ = _moved(y, terms, 2)
    first = div(slope, product, m)
    value = add(_stirling(w, terms, 2), mul(first, first, m), m)
    value = sub(value, div(bend, product, m), m)
    is_pole = distance[0] == 0
    tiny = leading.abs() < 2.0 ** -(m * precision_of(leading) // 2)
    safe = where(is_below & ~is_pole & ~tiny, distance, constants(Fraction(1, 4), 1, leading))
    sine, _ = turn(safe, terms)
    quotient = div(constants(exact.pi(bits_of(leading, terms)), m, leading), sine, m)
    value = where(is_below, sub(mul(quotient, quotient, m), value, m), value)
    inverse = _inverse(where(leading == 0, one(leading), x), m)
    value = where(tiny, mul(inverse, inverse, m), value)
    plain = torch.where(is_below & is_pole, torch.inf, value[0])
    plain = torch.where(is_finite, plain, torch.where(leading > 0, 0.0, torch.nan))
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))
