"""The exponential function and what follows from it, on guarded expansions.

x = (16 k + j) log(2) / 16 + r with |j| <= 8 and |r| <= log(2) / 32, so that
exp(x) = 2^k 2^(j / 16) exp(r). The factor 2^(j / 16) comes from a table, exp(r) - 1 from its power
series. They give q = exp(x) / 2^k - 1, which keeps its relative error for x near 0.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.arithmetic.networks import two_sum
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.guarded import (
    SPARE,
    Terms,
    add,
    chosen,
    constant,
    constants,
    finish,
    gathered,
    mul,
    polynomial,
    power_of_two,
    precision_of,
    scaled,
    to_integer,
    two_prod,
    where,
)

_LOG2_R = math.log2(math.log(2) / 32) + 0.01


def bits_of(x: Tensor, terms: int) -> int:
    """Return the number of bits to which constants are needed."""
    return (terms + 1) * precision_of(x) + 32


def bounded(x: Terms, limit: float) -> Terms:
    """Replace x by 0 where |x| >= limit or x is NaN. Callers set the results there."""
    inside = x[0].abs() < limit
    return tuple(torch.where(inside, term, 0.0) for term in x)


def without_powers(x: Terms, unit: Fraction, terms: int) -> tuple[Terms, Tensor, Tensor]:
    """Write x = (16 k + j) unit + r; return r, k, and integers whose last bits are j + 8."""
    m = terms + 1
    multiple, bits = to_integer(x[0] * float(1 / unit))
    bits = bits + 8
    j = (bits & 15).to(x[0].dtype) - 8
    products = [v for u in constants(unit, m, x[0]) for v in two_prod(-multiple, u)]
    head, *tails = x
    rest = gathered([*two_sum(head, products[0]), products[1], *tails, *products[2:]], m)
    return rest, (multiple - j) * 0.0625, bits


def _coefficient(k: int, base: Base, terms: int) -> list[Fraction]:
    return [Fraction(1, math.factorial(k + 1))]


def expm1_of_rest(rest: Terms, bits: Tensor, terms: int) -> Terms:
    """2^(j / 16) exp(rest) - 1."""
    x, m = rest[0], terms + 1
    q = mul(rest, polynomial(rest, _coefficient, _LOG2_R, terms), m)
    table = [exact.value("power", bits_of(x, terms), 2, Fraction(j, 16)) - 1 for j in range(-8, 8)]
    d = chosen(table, bits, m, x)
    return add(d, add(q, mul(d, q, m), m), m)


def parts(x: Terms, terms: int) -> tuple[Terms, Tensor]:
    """Return q and k with exp(x) = 2^k (1 + q)."""
    unit = exact.log(2, bits_of(x[0], terms) + 8) / 16
    rest, k, bits = without_powers(x, unit, terms)
    return expm1_of_rest(rest, bits, terms), k


def one(like: Tensor) -> Terms:
    """The constant 1."""
    return (constant(1.0, like),)


def limit_of(x: Tensor) -> float:
    """Return a bound of |y| beyond which 2^y is 0 or infinite."""
    base = BASES[x.dtype]
    return float(base.max_exponent + 2 * base.precision)


def _power(x: Terms, found: tuple[Terms, Tensor], limit: float, terms: int) -> Terms:
    """2^k (1 + q), or 0 or infinity where |x| >= limit."""
    q, k = found
    leading = x[0]
    value = scaled(add(one(leading), q, terms + 1), k)
    plain = torch.where(leading < 0, 0.0, torch.inf)
    plain = torch.where(leading.abs() < limit, value[0], plain)
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def exp(x: Terms) -> Terms:
    """e^x."""
    limit = limit_of(x[0]) * math.log(2)
    return _power(x, parts(bounded(x, limit), len(x)), limit, len(x))


def exp2(x: Terms) -> Terms:
    """2^x. The decomposition x = k + j / 16 + r is exact, and r log(2) enters the series."""
    terms, limit = len(x), limit_of(x[0])
    rest, k, bits = without_powers(bounded(x, limit), Fraction(1, 16), terms)
    rest = mul(rest, constants(exact.log(2, bits_of(x[0], terms)), terms + 1, x[0]), terms + 1)
    return _power(x, (expm1_of_rest(rest, bits, terms), k), limit, terms)


def expm1(x: Terms) -> Terms:
    """e^x - 1 = 2^k (q + (1 - 2^-k))."""
    terms, leading = len(x), x[0]
    m, limit = terms + 1, limit_of(leading) * math.log(2)
    least = -(terms * precision_of(leading) + SPARE) * math.log(2)
    inside = bounded(x, limit)
    inside = tuple(torch.where(leading > least, t, 0.0) for t in inside)
    q, k = parts(inside, terms)
    value = scaled(add(two_sum(one(leading)[0], -_inverse_power(k, leading)), q, m), k)
    # two_sum(1, -2^-k) is exact while 2^-k is a float; smaller powers change no bit of the result.
    plain = torch.where(leading > least, value[0], -1.0)
    plain = torch.where(leading >= limit, torch.inf, plain)
    plain = torch.where(torch.isnan(leading) | (leading == 0), leading, plain)
    value = where(leading > least, value, (constant(-1.0, leading),))
    return finish(value, terms, plain)


def _inverse_power(k: Tensor, like: Tensor) -> Tensor:
    """2^-k, or another small power where k is too large for 2^-k to change the result."""
    most = float(BASES[like.dtype].max_exponent - 2)
    return power_of_two(-torch.where(k > most, most, k))
