"""Sine, cosine and tangent on guarded expansions, by power series of the remainder."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.exponentials import one
from mcftensor.arithmetic.guarded import (
    SPARE,
    Terms,
    div,
    finish,
    mul,
    neg,
    polynomial,
    precision_of,
    series,
    where,
)
from mcftensor.arithmetic.large_arguments import without_quarters

_LOG2_R2 = 2 * math.log2(0.79)


def _coefficient(odd: int) -> Callable[[int], Fraction]:
    return lambda k: Fraction((-1) ** k, math.factorial(2 * k + odd))


def _remainder(x: Terms) -> tuple[Terms, Tensor]:
    is_finite = torch.isfinite(x[0])
    return without_quarters(tuple(torch.where(is_finite, t, 0.0) for t in x), len(x))


def of_remainder(r: Terms, is_cosine: Tensor, terms: int) -> Terms:
    """The sine of a remainder, or its cosine where `is_cosine` is set."""
    m = terms + 1
    bits = terms * precision_of(r[0]) + SPARE
    cosine = series(_coefficient(0), _LOG2_R2, bits)
    sine = [_coefficient(1)(k) for k in range(len(cosine))]
    value = polynomial(mul(r, r, m), sine, _LOG2_R2, terms, cosine, is_cosine)
    return mul(value, where(is_cosine, one(r[0]), r), m)


def _special(x: Tensor, value: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), value, torch.nan)


def _at(x: Terms, quarters: int) -> Terms:
    """The sine of x + quarters pi / 2."""
    terms = len(x)
    r, bits = _remainder(x)
    bits = bits + quarters
    value = of_remainder(r, (bits & 1) != 0, terms)
    value = where((bits & 2) != 0, neg(value), value)
    plain = _special(x[0], value[0])
    return finish(value, terms, plain if quarters else torch.where(x[0] == 0, x[0], plain))


def sin(x: Terms) -> Terms:
    """The sine."""
    return _at(x, 0)


def cos(x: Terms) -> Terms:
    """The cosine."""
    return _at(x, 1)


def tan(x: Terms) -> Terms:
    """The tangent: sine / cosine, or -cosine / sine after an odd number of quarter turns."""
    terms = len(x)
    r, bits = _remainder(x)
    is_odd = (bits & 1) != 0
    value = div(of_remainder(r, is_odd, terms), of_remainder(r, ~is_odd, terms), terms + 1)
    value = where(is_odd, neg(value), value)
    plain = torch.where(x[0] == 0, x[0], _special(x[0], value[0]))
    return finish(value, terms, plain)
