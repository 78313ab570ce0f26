"""The gamma function, its logarithm, and two derivatives of that, on guarded numbers.

Arguments below 1/2 are reflected. Other arguments are shifted by the recurrence until Stirling's
series has all bits. The logarithm of the product P = x (x + 1) (x + 2) ... is then subtracted.
Taylor series are used near 1 and 2, where the logarithm of the gamma function is 0, and near the
positive zero of its derivative. Near zeros below 0 the error is relative to the cancelling parts.
"""

from __future__ import annotations

import functools
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.base_types import Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials, logarithms
from mcftensor.wide.exponentials import Result
from mcftensor.wide.guarded import SPARE, Coefficients, Guarded, exponent_of, polynomial, where
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


def _moved(y: Guarded, order: int) -> tuple[Guarded, list[Guarded], Tensor]:
    """Shift y by an integer i until Stirling's series has all bits.

    Returns y + i, the product y (y + 1) ... (y + i - 1) with `order` derivatives, all divided by a
    power of two, and log2 of this power.
    """
    log2_start = _log2_start(y.base, y.count - 1)
    product = [y.of(1)]
    power = torch.zeros_like(y.leading)
    for i in range(1 << log2_start):
        is_before = y.leading + i < (1 << log2_start)
        factor = where(is_before, (y + i).times(2.0**-log2_start), 1.0)
        slope = torch.where(is_before, 2.0**-log2_start, 0.0)
        raised = [z * factor for z in product]
        for k in range(1, min(order, len(product)) + 1):
            lower = product[k - 1].times(slope * k)
            if k < len(product):
                raised[k] = raised[k] + lower
            else:
                raised.append(lower)
        product = raised
        power = power + torch.where(is_before, 1.0, 0.0)
    return y + power, product, power * float(log2_start)


_COEFFICIENTS: tuple[Coefficients, ...] = (
    lambda k, base, terms: [exact.bernoulli(k + 1) / ((2 * k + 2) * (2 * k + 1))],
    lambda k, base, terms: [-exact.bernoulli(k + 1) / (2 * k + 2)],
    lambda k, base, terms: [exact.bernoulli(k + 1)],
)
"""Of Stirling's series for lgamma, and its first two derivatives."""


def _stirling(w: Guarded, order: int) -> Guarded:
    """Sum Stirling's series without its logarithm and without nonnegative powers of w.

    The function is lgamma if `order` is 0, else its first or second derivative.
    """
    inverse = _inverse(w)
    square = inverse * inverse
    value = polynomial(square, _COEFFICIENTS[order], -2.0 * _log2_start(w.base, w.count - 1))
    if order == 0:
        return value * inverse
    if order == 1:
        return value * square - inverse.times(0.5)
    return inverse + (square.times(0.5) + value * square * inverse)


def _inverse(x: Guarded) -> Guarded:
    """1 / x, scaled so that no intermediate product overflows."""
    e = exponent_of(x.leading)
    return (1 / x.scaled(-e)).scaled(-e)


def _reflected(x: Guarded) -> tuple[Guarded, Tensor, Guarded, Tensor]:
    """Reflect arguments below 1/2.

    Returns x or 1 - x, whether x was reflected, the distance of x from the nearest integer, and
    whether x is finite.
    """
    is_finite = torch.isfinite(x.leading)
    x = where(is_finite, x, 1.0)
    is_below = x.leading < 0.5
    return where(is_below, 1 - x, x), is_below, remainder(x, 1.0), is_finite


def _at_one(k: int, base: Base, terms: int) -> list[Fraction]:
    """The coefficient of z^(k + 1) in lgamma(1 + z)."""
    bits = (terms + 1) * base.precision + 32
    return [exact.hurwitz(k + 1, Fraction(1), bits) * (-1) ** (k + 1) / (k + 1)]


def _logarithm(x: Guarded, y: Guarded, is_small: Tensor) -> Guarded:
    """The logarithm of gamma(y) for y >= 1/2, or of gamma(1 + x) where x is small."""
    w, (product,), power = _moved(y, 0)
    large = x.base.max_exponent // 2
    is_large = w.leading > 2.0**large
    shift = 2.0 ** -(large // 2)
    first = where(is_large, w.times(shift), w - 0.5)
    value = first * (logarithms.natural(w) - 1)
    rest = _stirling(w, 0) - logarithms.natural(product)
    rest = rest - rest.of(power) * rest.of(exact.log_2)
    rest = rest + (exact.log(2 * exact.pi(x.bits + 8), x.bits) - 1) / 2
    value = value + where(is_large, 0.0, rest)
    value = where(is_large, value.times(1 / shift), value)
    # near 1 and 2
    from_one = where(is_small, x, y - 1)
    is_one = from_one.leading < 0.5
    z = where(is_one, from_one, from_one - 1)
    is_near = z.leading.abs() < 2.0**_LOG2_Z
    z = where(is_near, z, 0.0)
    near = z * polynomial(z, _at_one, _LOG2_Z)
    return where(is_near, near + where(is_one, 0.0, logarithms.of_one_plus(z)), value)


def lgamma(x: Guarded) -> Result:
    """The logarithm of |gamma(x)|."""
    y, is_below, distance, is_finite = _reflected(x)
    is_small = x.leading.abs() < 2.0**_LOG2_Z  # lgamma(1 + x) - log|x|
    value = _logarithm(x, y, is_small)
    # below 1/2
    is_pole = distance.leading == 0
    is_mirrored = is_below & ~is_pole & ~is_small
    sine, _ = turn(where(is_mirrored, distance, 0.25))
    mirrored = exact.log(exact.pi(x.bits + 8), x.bits) - logarithms.of_size(sine) - value
    small = value - logarithms.of_size(x)
    value = where(is_small, small, where(is_below, mirrored, value))
    plain = torch.where(is_below & is_pole, torch.inf, value.leading)
    return value, torch.where(is_finite, plain, torch.inf)


def gamma_of(x: Guarded) -> Result:
    """The gamma function: an exponential, divided by x near 0 and by a sine below 1/2."""
    leading, limit = x.leading, exponentials.limit_of(x)
    y, is_below, _, is_finite = _reflected(x)
    is_small = leading.abs() < 2.0**_LOG2_Z
    logarithm = _logarithm(x, y, is_small)
    is_mirrored = is_below & ~is_small
    logarithm = where(is_mirrored, -logarithm, logarithm)
    q, k = exponentials.parts(exponentials.bounded(logarithm, limit))
    sine, _ = half_turns(x)
    sine = where(leading < 0, -sine, sine)
    divisor = where(is_mirrored, sine, where(is_small, x, 1.0))
    is_pole = divisor.leading == 0
    divisor = where(is_pole, 1.0, divisor)
    e = exponent_of(divisor.leading)
    quotient = (1 + q) / divisor.scaled(-e)
    value = where(is_mirrored, quotient * x.of(exact.pi), quotient).scaled(k - e)
    plain = torch.where(logarithm.leading >= limit, torch.inf, value.leading)
    plain = torch.where(logarithm.leading <= -limit, 0.0 * sine.leading, plain)
    plain = torch.where(is_pole, torch.where(leading == 0, 1 / leading, torch.nan), plain)
    return value, torch.where(is_finite, plain, torch.where(leading > 0, leading, torch.nan))


def _at_root(k: int, base: Base, terms: int) -> list[Fraction]:
    """The coefficient of z^(k + 1) in digamma(root + z)."""
    root, bits = _root(base, terms), (terms + 1) * base.precision + 32
    return [(-1) ** k * exact.hurwitz(k + 2, root, bits)]


def _root(base: Base, terms: int) -> Fraction:
    return exact.root_of_digamma((2 * terms + 1) * base.precision + 32)


def _near_root(x: Guarded) -> tuple[Guarded, Tensor]:
    """digamma(x) near its positive root, and where x is near it."""
    terms = x.count - 1
    root = Guarded(x.terms, 2 * terms).of(_root(x.base, terms))
    # As x may have all leading bits of the root, the difference is exact.
    z = x.like(networks.distill([*x.terms, *(-root).terms], x.count))
    is_near = z.leading.abs() < 2.0**_LOG2_Z
    z = where(is_near, z, 0.0)
    return z * polynomial(z, _at_root, _LOG2_Z), is_near


def digamma(x: Guarded) -> Result:
    """The derivative of log|gamma(x)|."""
    leading = x.leading
    y, is_below, distance, is_finite = _reflected(x)
    is_small = leading.abs() < 2.0**-20  # x (x + 1) may have tails below the smallest number
    y, is_below = where(is_small, x + 1, y), is_below & ~is_small
    w, (product, slope), _ = _moved(y, 1)
    value = logarithms.natural(w) + _stirling(w, 1) - slope / product
    near, is_near = _near_root(y)
    value = where(is_near & ~is_below, near, value)
    is_pole = distance.leading == 0
    sine, cosine = turn(where(is_below & ~is_pole, distance, 0.25))
    value = where(is_below, value - cosine / sine * x.of(exact.pi), value)
    inverse = _inverse(where(is_small & (leading != 0), x, 1.0))
    is_tiny = leading.abs() < 2.0 ** -((x.count - 1) * x.base.precision + 6)
    value = where(is_small, where(is_tiny, -inverse, value - inverse), value)
    plain = torch.where(is_below & is_pole, torch.nan, value.leading)
    infinite = torch.copysign(torch.full_like(leading, torch.inf), -leading)
    plain = torch.where(leading == 0, infinite, plain)
    return value, torch.where(is_finite, plain, torch.where(leading > 0, leading, torch.nan))


def trigamma(x: Guarded) -> Result:
    """The second derivative of log|gamma(x)|."""
    leading = x.leading
    y, is_below, distance, is_finite = _reflected(x)
    w, (product, slope, bend), _ = _moved(y, 2)
    first = slope / product
    value = _stirling(w, 2) + first * first - bend / product
    is_pole = distance.leading == 0
    tiny = leading.abs() < 2.0 ** -(x.count * x.base.precision // 2)
    sine, _ = turn(where(is_below & ~is_pole & ~tiny, distance, 0.25))
    quotient = x.of(exact.pi) / sine
    value = where(is_below, quotient * quotient - value, value)
    inverse = _inverse(where(leading == 0, 1.0, x))
    value = where(tiny, inverse * inverse, value)
    plain = torch.where(is_below & is_pole, torch.inf, value.leading)
    return value, torch.where(is_finite, plain, torch.where(leading > 0, 0.0, torch.nan))
