"""Sine, cosine and tangent on guarded expansions, by power series of the remainder.

The remainder of pi x is pi times that of x, which is exact. That of x, for arguments of any size,
is x * 2 / pi without its multiples of 4, times pi / 2.

Source: M. H. Payne and R. N. Hanek, "Radian reduction for trigonometric functions", ACM SIGNUM
Newsletter 18(1), 1983. A term of exponent e is multiplied only by those words of 2 / pi whose
products are neither multiples of 4 nor below the last relevant bit. Words and products are exact.
"""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.exponentials import bits_of, one
from mcftensor.wide.guarded import (
    Terms,
    constant,
    constants,
    div,
    exponent_of,
    finish,
    gathered,
    mul,
    neg,
    polynomial,
    power_of_two,
    precision_of,
    size_of,
    sub,
    times,
    to_integer,
    two_prod,
    where,
)

# --------------------------------------------------------------- remainders of large arguments

_NEAR = 0.78
"""The bound of |x| below which x is its own remainder."""

_CLOSE = 40
"""Bits, beyond those of the argument, that can cancel near a multiple of pi / 2."""


def _words_at_a_time(base: Base, terms: int) -> int:
    """Return how many words of p bits a product needs.

    They reach from the first word whose product is no multiple of 4 to twice the bits of the
    argument behind the binary point: as many bits may cancel, and as many must remain.
    """
    p = base.precision
    return math.ceil((2 * terms * p + _CLOSE + 2 * p + 1) / p)


def _last_start(base: Base) -> int:
    return max((base.max_exponent - base.precision - 1) // base.precision, 0)


@functools.lru_cache(maxsize=16)
def _words(base: Base, terms: int) -> list[Fraction]:
    """2 / pi as words of p bits, each an integer."""
    p = base.precision
    count = _last_start(base) + _words_at_a_time(base, terms)
    bits = count * p
    whole = math.floor(2 / exact.pi(bits + 64) * 2**bits)
    return [Fraction(whole >> (bits - p * (j + 1)) & ((1 << p) - 1)) for j in range(count)]


def _products(x: Tensor, terms: int, scale: float) -> list[list[Tensor]]:
    """x * 2 / pi, reduced by multiples of 4 and times `scale`, as values by powers of u."""
    base = BASES[x.dtype]
    p, count = base.precision, _words_at_a_time(base, terms)
    beyond = torch.maximum(exponent_of(x) - (p + 1), torch.zeros_like(x))
    start, bits = to_integer((beyond - (p - 1) / 2) * (1 / p))
    stages = _last_start(base).bit_length()
    last = 1 << stages
    words = [constant(float(w), x) for w in _words(base, terms)]
    words += [torch.zeros_like(words[0])] * (count + last - 1 - len(words))
    for stage in reversed(range(stages)):
        is_set = (bits & (1 << stage)) != 0
        pairs = zip(words[: count + (1 << stage) - 1], words[1 << stage :], strict=False)
        words = [torch.where(is_set, b, a) for a, b in pairs]
    own = x * power_of_two(start * -float(p))
    levels: list[list[Tensor]] = [[] for _ in range(count + 1)]
    for j, word in enumerate(words[:count]):
        product, error = two_prod(own, word * (scale * 2.0 ** (-p * (j + 1))))
        levels[j].append(_without_eights(product, scale) if j < 2 else product)
        levels[j + 1].append(_without_eights(error, scale) if j < 1 else error)
    return levels


def _without_eights(x: Tensor, scale: float) -> Tensor:
    """Subtract a multiple of 8 `scale`, or of 4 `scale` where x is a multiple of that."""
    limit = scale * 2.0 ** (BASES[x.dtype].precision + 2)
    magic = 1.5 * limit
    return torch.where(x.abs() < limit, x - ((x + magic) - magic), 0.0)


def without_quarters(x: Terms, terms: int) -> tuple[Terms, Tensor]:
    """Return x - k pi / 2, at most slightly above pi / 4, and bits that end with k; x is finite."""
    leading = x[0]
    base = BASES[leading.dtype]
    p, m = base.precision, terms + 1
    scale = 2.0 ** (64 if p < 53 else 256)
    by_term = [_products(term, terms, scale) for term in x]
    values = list(itertools.chain(*itertools.chain(*zip(*by_term, strict=True))))
    passes = math.ceil((2 * terms * p + _CLOSE) / p) + 1
    head, *tails = gathered(values, passes)
    k, bits = to_integer(head * (1 / scale))
    fraction = gathered([head - k * scale, *tails], m)
    half_pi = constants(exact.pi(m * p + 32) / 2, m, leading)
    found = times(mul(fraction, half_pi, m), 1 / scale)
    is_near = leading.abs() < _NEAR
    return where(is_near, x, found), torch.where(is_near, torch.zeros_like(bits), bits)


# ------------------------------------------------------------------------------------ functions

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
