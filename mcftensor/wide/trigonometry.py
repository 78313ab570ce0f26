"""Sine, cosine and tangent on guarded numbers, by power series of the remainder.

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
from mcftensor.wide.exponentials import Result
from mcftensor.wide.guarded import (
    Guarded,
    constant,
    exponent_of,
    gathered,
    polynomial,
    power_of_two,
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


def _without_quarters(x: Guarded) -> tuple[Guarded, Tensor]:
    """Return x - k pi / 2, at most slightly above pi / 4, and bits that end with k.

    Numbers that are not finite are replaced by zero.
    """
    x = where(torch.isfinite(x.leading), x, 0.0)
    p, terms = x.base.precision, x.count - 1
    scale = 2.0 ** (64 if p < 53 else 256)
    by_term = [_products(term, terms, scale) for term in x.terms]
    values = list(itertools.chain(*itertools.chain(*zip(*by_term, strict=True))))
    passes = math.ceil((2 * terms * p + _CLOSE) / p) + 1
    head, *tails = gathered(values, passes)
    k, bits = to_integer(head * (1 / scale))
    fraction = x.like(gathered([head - k * scale, *tails], x.count))
    found = (fraction * x.of(lambda bits: exact.pi(bits) / 2)).times(1 / scale)
    is_near = x.leading.abs() < _NEAR
    return where(is_near, x, found), torch.where(is_near, torch.zeros_like(bits), bits)


# ------------------------------------------------------------------------------------ functions

_LOG2_R2 = 2 * math.log2(0.79)


def _sine_and_cosine(k: int, base: Base, terms: int) -> list[Fraction]:
    return [Fraction((-1) ** k, math.factorial(2 * k + odd)) for odd in (1, 0)]


def _of_remainder(r: Guarded, is_cosine: Tensor) -> Guarded:
    """The sine of a remainder, or its cosine where `is_cosine` is set."""
    return polynomial(r * r, _sine_and_cosine, _LOG2_R2, is_cosine) * where(is_cosine, 1.0, r)


def _from_multiple(x: Tensor, unit: float) -> Tensor:
    """x minus the nearest multiple of a power of two."""
    least = unit * 2.0 ** (BASES[x.dtype].precision - 1)
    size = x.abs()
    rest = torch.where(size >= least, 0.0, size - ((size + least) - least))
    return torch.where(x < 0, -rest, rest)


def remainder(x: Guarded, unit: float) -> Guarded:
    """x minus the nearest multiple of a power of two."""
    first, *others = gathered([_from_multiple(term, unit) for term in x.terms], x.count)
    return x.like(gathered([_from_multiple(first, unit), *others], x.count))


def turn(distance: Guarded) -> tuple[Guarded, Guarded]:
    """The sine and cosine of pi times a distance of at most 1/2."""
    is_negative = distance.leading < 0
    size = where(is_negative, -distance, distance)
    is_far = size.leading > 0.25
    angle = where(is_far, 0.5 - size, size) * size.of(exact.pi)
    sine = _of_remainder(angle, is_far)
    return where(is_negative, -sine, sine), _of_remainder(angle, ~is_far)


def _special(x: Guarded, plain: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x.leading), plain, torch.nan)


def _at(x: Guarded, quarters: int) -> Result:
    """The sine of x + quarters pi / 2."""
    r, bits = _without_quarters(x)
    bits = bits + quarters
    value = _of_remainder(r, (bits & 1) != 0)
    value = where((bits & 2) != 0, -value, value)
    return value, _special(x, value.leading)


def sin(x: Guarded) -> Result:
    """The sine."""
    value, plain = _at(x, 0)
    return value, torch.where(x.leading == 0, x.leading, plain)


def cos(x: Guarded) -> Result:
    """The cosine."""
    return _at(x, 1)


def tan(x: Guarded) -> Result:
    """The tangent: sine / cosine, or -cosine / sine after an odd number of quarter turns."""
    r, bits = _without_quarters(x)
    is_odd = (bits & 1) != 0
    value = _of_remainder(r, is_odd) / _of_remainder(r, ~is_odd)
    value = where(is_odd, -value, value)
    return value, torch.where(x.leading == 0, x.leading, _special(x, value.leading))


def half_turns(x: Guarded) -> tuple[Guarded, Guarded]:
    """The sine and cosine of pi |x|."""
    rest = remainder(abs(where(torch.isfinite(x.leading), x, 0.0)), 2.0)
    is_negative = rest.leading < 0
    rest = abs(rest)
    is_far = rest.leading > 0.5
    sine, cosine = turn(where(is_far, 1 - rest, rest))
    return where(is_negative, -sine, sine), where(is_far, -cosine, cosine)


def sin_of_pi(x: Guarded) -> Result:
    """The sine of pi x; a zero has the sign of x."""
    sine, _ = half_turns(x)
    sine = where(torch.signbit(x.leading), -sine, sine)
    signed_zero = torch.copysign(sine.leading, x.leading)
    return sine, _special(x, torch.where(sine.leading == 0, signed_zero, sine.leading))


def cos_of_pi(x: Guarded) -> Result:
    """The cosine of pi x; a zero is +0."""
    _, cosine = half_turns(x)
    return cosine, _special(x, torch.where(cosine.leading == 0, 0.0, cosine.leading))
