"""Hard cases for expansion arithmetic, drawn as bit patterns.

Random reals hardly ever meet a tie, a power of two or a cancellation. Here sign, exponent and
significand are drawn each for itself, with a bias to the edges. `numbers`, `expansion` and
`partner` fill whole tensors from a numpy generator; the strategies draw single cases, which
hypothesis can shrink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from common.oracle import BASES, Array, is_normalized, round_fraction

Generator = np.random.Generator

_NUMPY = {torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}


@dataclass(frozen=True)
class Floats:
    """(-1)^negative * significand * 2^(exponent - p + 1), subnormals at the exponent emin."""

    dtype: torch.dtype
    negative: Array
    exponent: Array
    significand: Array

    @classmethod
    def of(cls, dtype: torch.dtype, negative: Array, exponent: Array, significand: Array) -> Floats:
        """Exponents below emin shift the significand out; those above emax are made emax."""
        base = BASES[dtype]
        shift = np.clip(base.emin - exponent, 0, 62)
        exponent = np.clip(exponent, base.emin, base.emax)
        return cls(dtype, negative, exponent, significand >> shift)

    def tensor(self) -> Tensor:
        """The numbers as torch has them."""
        base = BASES[self.dtype]
        fraction_bits = base.precision - 1
        hidden = np.int64(1) << fraction_bits
        field = np.where(self.significand >= hidden, self.exponent - base.emin + 1, 0)
        magnitude = (field << fraction_bits) | (self.significand & (hidden - 1))
        sign_bit = torch.iinfo(base.pattern).min
        pattern = np.where(self.negative, magnitude + sign_bit, magnitude)
        return torch.from_numpy(pattern.astype(_NUMPY[base.pattern])).view(self.dtype)

    def where(self, mask: Array, other: Floats) -> Floats:
        """self where mask holds, else other."""
        return Floats(
            self.dtype,
            np.where(mask, self.negative, other.negative),
            np.where(mask, self.exponent, other.exponent),
            np.where(mask, self.significand, other.significand),
        )

    def zero_where(self, mask: Array) -> Floats:
        """Positive zero where mask holds."""
        return Floats(
            self.dtype,
            self.negative & ~mask,
            self.exponent,
            np.where(mask, 0, self.significand),
        )

    @property
    def hidden(self) -> int:
        """The smallest significand of a normal number: the significand of a power of two."""
        return 1 << (BASES[self.dtype].precision - 1)


# ------------------------------------------------------------------------------- whole tensors


def _signs(rng: Generator, size: int) -> Array:
    return np.asarray(rng.integers(0, 2, size) == 1)


def _significands(rng: Generator, p: int, size: int) -> Array:
    """Half of them anything; else powers of two and their neighbours, or few bits at either end."""
    low, high = 1 << (p - 1), 1 << p
    anything = rng.integers(low, high, size)
    near = rng.choice(
        np.array([low, low, low + 1, low + 2, high - 1, high - 2, 3 << (p - 2)]), size
    )
    keep = rng.integers(1, p, size)
    few = (anything >> keep) << keep
    few = np.where(few < low, low, few)
    kind = rng.integers(0, 8, size)
    return np.select([kind < 4, kind < 7], [anything, near], few)


def numbers(rng: Generator, dtype: torch.dtype, size: int, low: int, high: int) -> Floats:
    """Numbers with exponents from low to high."""
    return Floats.of(
        dtype,
        _signs(rng, size),
        rng.integers(low, high + 1, size),
        _significands(rng, BASES[dtype].precision, size),
    )


def _tail(rng: Generator, before: Sequence[Floats]) -> Floats:
    """Return a next term: at most half an ulp of the last term, a tie only if that term is even."""
    last = before[-1]
    size, p, hidden = last.negative.size, BASES[last.dtype].precision, last.hidden
    negative = _signs(rng, size)
    if len(before) > 1:
        # Beside a tie the term after it may only point back.
        tie = (before[-1].significand == hidden) & (before[-1].exponent == before[-2].exponent - p)
        below = before[-1].exponent == before[-2].exponent - p - 1
        tie |= (before[-1].significand == hidden) & (before[-2].significand == hidden) & below
        negative = np.where(tie, ~before[-1].negative, negative)
    edge = last.exponent - p - ((last.significand == hidden) & (negative != last.negative))
    kind = rng.integers(0, 16, size)
    at_tie = (kind < 2) & (last.significand % 2 == 0)
    near_tie = (kind >= 2) & (kind < 5)
    gap = np.where(kind < 12, 0, rng.integers(0, 2 * p + 2, size))
    exponent = np.where(at_tie, edge, edge - 1 - np.where(near_tie, 0, gap))
    significand = _significands(rng, p, size)
    significand = np.where(near_tie, 2 * hidden - 1 - (kind == 4), significand)
    significand = np.where(at_tie, hidden, significand)
    tail = Floats.of(last.dtype, negative, exponent, significand)
    # Below a subnormal nothing can follow; nor below zero.
    return tail.zero_where((kind == 15) | (last.significand < hidden))


def terms_after(rng: Generator, first: Sequence[Floats], terms: int) -> list[Floats]:
    """Complete the leading terms of expansions to normalized expansions."""
    result = list(first)
    while len(result) < terms:
        result.append(_tail(rng, result))
    return result


def expansion_floats(
    rng: Generator, dtype: torch.dtype, terms: int, size: int, low: int, high: int
) -> list[Floats]:
    """Normalized expansions, as their terms."""
    return terms_after(rng, [numbers(rng, dtype, size, low, high)], terms)


def tensors(x: Sequence[Floats]) -> tuple[Tensor, ...]:
    """Terms as torch has them."""
    return tuple(term.tensor() for term in x)


def partner_floats(rng: Generator, x: Sequence[Floats], low: int, high: int) -> list[Floats]:
    """Expansions that are hard to combine with x: alike in exponent, or nearly its negative."""
    lead, terms, size = x[0], len(x), x[0].negative.size
    p, hidden = BASES[lead.dtype].precision, lead.hidden
    kind = rng.integers(0, 8, size)
    other = numbers(rng, lead.dtype, size, low, high)
    near, far = rng.integers(-2, 3, size), rng.integers(-2 * p - 2, 2 * p + 3, size)
    shifted = np.clip(lead.exponent + np.where(kind == 1, near, far), low, high)
    exponent = np.where((kind == 1) | (kind == 2), shifted, other.exponent)
    # Kind 3: the product is close to a power of two, where relative errors are largest.
    inverse = np.rint(2.0 * hidden / np.maximum(lead.significand, hidden) * hidden).astype(np.int64)
    inverse = np.clip(inverse + rng.integers(-1, 3, size), hidden, 2 * hidden - 1)
    significand = np.where(kind == 3, inverse, other.significand)
    other = Floats.of(lead.dtype, other.negative, exponent, significand)
    # From kind 4 on the leading term is that of -x, or a neighbour of it.
    step = np.where(kind >= 6, rng.integers(-1, 2, size), 0)
    bumped = np.clip(lead.significand + step, hidden, 2 * hidden - 1)
    bumped = np.where(lead.significand >= hidden, bumped, lead.significand)
    opposite = Floats(lead.dtype, ~lead.negative, lead.exponent, bumped)
    result = terms_after(rng, [opposite.where(kind >= 4, other)], terms)
    # Kinds 4 and 5 take more terms of -x, up to all of them.
    copied = rng.integers(1, terms + 1, size)
    minus = [
        Floats(t.dtype, ~t.negative & (t.significand > 0), t.exponent, t.significand) for t in x
    ]
    for count in range(2, terms + 1):
        alike = (kind >= 4) & (kind < 6) & (copied == count)
        candidate = terms_after(rng, minus[:count], terms)
        result = [c.where(alike, r) for c, r in zip(candidate, result, strict=True)]
    return result


def expansion(
    rng: Generator, dtype: torch.dtype, terms: int, size: int, low: int, high: int
) -> tuple[Tensor, ...]:
    """Normalized expansions whose leading terms have exponents from low to high."""
    return tensors(expansion_floats(rng, dtype, terms, size, low, high))


def pair(
    rng: Generator, dtype: torch.dtype, terms: int, size: int, low: int, high: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Two normalized expansions that are hard to combine."""
    x = expansion_floats(rng, dtype, terms, size, low, high)
    return tensors(x), tensors(partner_floats(rng, x, low, high))


def values(rng: Generator, dtype: torch.dtype, count: int, size: int) -> tuple[Tensor, ...]:
    """Plain numbers in any order, with zeros, overlaps and cancellations among them."""
    p = BASES[dtype].precision
    span = min(2 * p, BASES[dtype].emax - 3)
    drawn = [numbers(rng, dtype, size, -span // 2, span) for _ in range(count)]
    for i in range(1, count):
        kind = rng.integers(0, 6, size)
        before = drawn[rng.integers(0, i)]
        exponent = before.exponent + rng.integers(-p - 1, p + 2, size)
        exponent = np.clip(exponent, -span // 2, span)
        near = Floats.of(dtype, drawn[i].negative, exponent, drawn[i].significand)
        minus = Floats(dtype, ~before.negative, before.exponent, before.significand)
        drawn[i] = minus.where(kind == 0, near.where(kind < 4, drawn[i])).zero_where(kind == 5)
    return tensors([drawn[i] for i in rng.permutation(count)])


# -------------------------------------------------------------------------------- single cases


@st.composite
def number(draw: st.DrawFn, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """One number, as a tensor without dimensions."""
    significand = draw(_significand(BASES[dtype].precision))
    exponent = draw(st.integers(low, high))
    return _encode(Fraction(significand) * Fraction(2) ** exponent, dtype)


@st.composite
def expansions(
    draw: st.DrawFn, dtype: torch.dtype, terms: int, low: int, high: int
) -> tuple[Tensor, ...]:
    """One normalized expansion, as tensors without dimensions: a wide integer, peeled."""
    p = BASES[dtype].precision
    rest = Fraction(draw(_significand(p * terms + 2 * terms))) * Fraction(2) ** draw(
        st.integers(low, high)
    )
    result = []
    for _ in range(terms):
        term = round_fraction(rest, dtype)
        result.append(_encode(term, dtype))
        rest -= term
    assume(is_normalized(result))
    return tuple(result)


def _significand(bits: int) -> st.SearchStrategy[Fraction]:
    """Magnitudes from 1 to 2 of this many bits and either sign, or zero."""
    one = 1 << (bits - 1)
    edges = st.sampled_from([0, 1, 2, 3, one - 1, one - 2, one >> 1, (one >> 1) + 1])
    sparse = st.lists(st.integers(0, bits - 2), max_size=3).map(
        lambda places: sum({1 << place for place in places})
    )
    fraction = st.one_of(edges, sparse, st.integers(0, one - 1))
    magnitude = fraction.map(lambda n: Fraction(one + n, one))
    signed = st.tuples(magnitude, st.booleans()).map(lambda pair: -pair[0] if pair[1] else pair[0])
    return st.one_of(signed, st.just(Fraction(0)))


def _encode(x: Fraction, dtype: torch.dtype) -> Tensor:
    """A number of the type, exactly."""
    base = BASES[dtype]
    scaled = abs(x) / Fraction(2) ** base.quantum
    assert scaled.denominator == 1
    n = scaled.numerator
    shift = max(n.bit_length() - base.precision, 0)
    significand = n >> shift
    assert significand << shift == n
    one = Floats(
        dtype,
        np.array([x < 0]),
        np.array([base.emin + shift]),
        np.array([significand]),
    )
    return one.tensor()[0]
