"""The exponential function and what follows from it, on guarded numbers.

x = (16 k + j) log(2) / 16 + r with |j| <= 8 and |r| <= log(2) / 32, so that
exp(x) = 2^k 2^(j / 16) exp(r). The factor 2^(j / 16) comes from a table, exp(r) - 1 from its power
series. They give q = exp(x) / 2^k - 1, which keeps its relative error for x near 0.

A function returns its value, and the leading term with the results that are zero or not finite.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import Base
from mcftensor.arithmetic.networks import two_sum
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.guarded import (
    Guarded,
    constant,
    gathered,
    polynomial,
    power_of_two,
    to_integer,
    two_prod,
    where,
)

Result = tuple[Guarded, Tensor]

_LOG2_R = math.log2(math.log(2) / 32) + 0.01


def bounded(x: Guarded, limit: float) -> Guarded:
    """Replace x by 0 where |x| >= limit or x is NaN. Callers set the results there."""
    return where(x.leading.abs() < limit, x, 0.0)


def without_powers(x: Guarded, unit: Fraction) -> tuple[Guarded, Tensor, Tensor]:
    """Write x = (16 k + j) unit + r; return r, k, and integers whose last bits are j + 8."""
    multiple, bits = to_integer(x.leading * float(1 / unit))
    bits = bits + 8
    j = (bits & 15).to(x.leading.dtype) - 8
    products = [v for u in x.of(unit).terms for v in two_prod(-multiple, u)]
    head, *tails = x.terms
    sums = [*two_sum(head, products[0]), products[1], *tails, *products[2:]]
    return x.like(gathered(sums, x.count)), (multiple - j) * 0.0625, bits


def _coefficient(k: int, base: Base, terms: int) -> list[Fraction]:
    return [Fraction(1, math.factorial(k + 1))]


def expm1_of_rest(rest: Guarded, bits: Tensor) -> Guarded:
    """2^(j / 16) exp(rest) - 1."""
    q = rest * polynomial(rest, _coefficient, _LOG2_R)
    table = [exact.root_of_power(j, 4, rest.bits) - 1 for j in range(-8, 8)]
    d = rest.chosen(table, bits)
    return d + (q + d * q)


def parts(x: Guarded) -> tuple[Guarded, Tensor]:
    """Return q and k with exp(x) = 2^k (1 + q)."""
    rest, k, bits = without_powers(x, exact.log_2(x.bits + 8) / 16)
    return expm1_of_rest(rest, bits), k


def limit_of_power(x: Guarded) -> float:
    """Return a bound of |y| beyond which 2^y is 0 or infinite."""
    return float(x.base.max_exponent + 2 * x.base.precision)


def limit_of(x: Guarded) -> float:
    """Return a bound of |y| beyond which e^y is 0 or infinite."""
    return limit_of_power(x) * math.log(2)


def _power(x: Guarded, q: Guarded, k: Tensor, limit: float) -> Result:
    """2^k (1 + q), or 0 or infinity where |x| >= limit."""
    value = (1 + q).scaled(k)
    plain = torch.where(x.leading < 0, 0.0, torch.inf)
    return value, torch.where(x.leading.abs() < limit, value.leading, plain)


def exp(x: Guarded) -> Result:
    """e^x."""
    return _power(x, *parts(bounded(x, limit_of(x))), limit_of(x))


def exp2(x: Guarded) -> Result:
    """2^x. The decomposition x = k + j / 16 + r is exact, and r log(2) enters the series."""
    limit = limit_of_power(x)
    rest, k, bits = without_powers(bounded(x, limit), Fraction(1, 16))
    return _power(x, expm1_of_rest(rest * x.of(exact.log_2), bits), k, limit)


def expm1(x: Guarded) -> Result:
    """e^x - 1 = 2^k (q + (1 - 2^-k))."""
    limit, least = limit_of(x), -x.wanted * math.log(2)
    q, k = parts(where(x.leading > least, bounded(x, limit), 0.0))
    # two_sum(1, -2^-k) is exact while 2^-k is a float; smaller powers change no bit of the result.
    difference = x.like(two_sum(constant(1.0, x.leading), -_inverse_power(k, x)))
    value = where(x.leading > least, (difference + q).scaled(k), -1.0)
    plain = torch.where(x.leading >= limit, torch.inf, value.leading)
    return value, torch.where(x.leading == 0, x.leading, plain)


def _inverse_power(k: Tensor, like: Guarded) -> Tensor:
    """2^-k, or another small power where k is too large for 2^-k to change the result."""
    most = float(like.base.max_exponent - 2)
    return power_of_two(-torch.where(k > most, most, k))
