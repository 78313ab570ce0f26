"""Sine, cosine and tangent on guarded expansions, by power series of the remainder.

The remainder of pi x is pi times that of x, which is exact.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.exponentials import bits_of, one
from mcftensor.wide.guarded import (
    Terms,
    constants,
    div,
    finish,
    gathered,
    mul,
    neg,
    polynomial,
    precision_of,
    size_of,
    sub,
    where,
)
from mcftensor.wide.large_arguments import without_quarters

_LOG2_R2 = 2 * math.log2(0.79)


def _sine_and_cosine(k: int, base: Base, terms: int) -> list[Fraction]:
    return [Fraction((-1) ** k, math.factorial(2 * k + odd)) for odd in (1, 0)]


def _remainder(x: Terms) -> tuple[Terms, Tensor]:
    is_finite = torch.isfinite(x[0])
    return without_quarters(tuple(torch.where(is_finite, t, 0.0) for t in x), len(x))


def of_remainder(r: Terms, is_cosine: Tensor, terms: int) -> Terms:
    """The sine of a remainder, or its cosine where `is_cosine` is set."""
    m = terms + 1
    value = polynomial(mul(r, r, m), _sine_and_cosine, _LOG2_R2, terms, is_cosine)
    return mul(value, where(is_cosine, one(r[0]), r), m)


def _from_multiple(x: Tensor, unit: float) -> Tensor:
    """x minus the nearest multiple of a power of two."""
    least = unit * 2.0 ** (precision_of(x) - 1)
    size = x.abs()
    rest = torch.where(size >= least, 0.0, size - ((size + least) - least))
    return torch.where(x < 0, -rest, rest)


def remainder(x: Terms, unit: float, count: int) -> Terms:
    """x minus the nearest multiple of a power of two, as `count` terms."""
    rest = gathered([_from_multiple(term, unit) for term in x], count)
    return gathered([_from_multiple(rest[0], unit), *rest[1:]], count)


def turn(distance: Terms, terms: int) -> tuple[Terms, Terms]:
    """The sine and cosine of pi times a distance of at most 1/2."""
    m = terms + 1
    like = distance[0]
    is_negative = like < 0
    size = where(is_negative, neg(distance), distance)
    is_far = size[0] > 0.25
    size = where(is_far, sub(constants(Fraction(1, 2), 1, like), size, m), size)
    angle = mul(size, constants(exact.pi(bits_of(like, terms)), m, like), m)
    sine = of_remainder(angle, is_far, terms)
    cosine = of_remainder(angle, ~is_far, terms)
    return where(is_negative, neg(sine), sine), cosine


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


def half_turns(x: Terms) -> tuple[Terms, Terms]:
    """The sine and cosine of pi |x|."""
    terms, leading = len(x), x[0]
    m = terms + 1
    size = size_of(tuple(torch.where(torch.isfinite(leading), t, 0.0) for t in x))
    rest = remainder(size, 2.0, m)
    is_negative = rest[0] < 0
    rest = size_of(rest)
    is_far = rest[0] > 0.5
    sine, cosine = turn(where(is_far, sub(one(leading), rest, m), rest), terms)
    return where(is_negative, neg(sine), sine), where(is_far, neg(cosine), cosine)


def sin_of_pi(x: Terms) -> Terms:
    """The sine of pi x; a zero has the sign of x."""
    leading = x[0]
    sine, _ = half_turns(x)
    sine = where(torch.signbit(leading), neg(sine), sine)
    plain = torch.where(sine[0] == 0, torch.copysign(sine[0], leading), sine[0])
    return finish(sine, len(x), _special(leading, plain))


def cos_of_pi(x: Terms) -> Terms:
    """The cosine of pi x; a zero is +0."""
    _, cosine = half_turns(x)
    return finish(cosine, len(x), _special(x[0], torch.where(cosine[0] == 0, 0.0, cosine[0])))
