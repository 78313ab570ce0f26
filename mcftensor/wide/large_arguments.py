"""Remainders of division by pi / 2 for arguments of any size, on guarded expansions.

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
from mcftensor.wide.guarded import (
    Terms,
    constant,
    constants,
    exponent_of,
    gathered,
    mul,
    power_of_two,
    times,
    to_integer,
    two_prod,
    where,
)

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
