"""Terms of sums as digits of 31 bits, which integers add exactly and without order.

The digit at position k counts multiples of 2^(31 k). The significand of a term is an integer. It is
shifted left by less than 31 bits and cut into digits of the term's sign. All of it is arithmetic on
integers, so that no device rounds, fuses or flushes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels.program import Body, Signature

WIDTH = 31
"""Bits of a digit."""

NOTHING = -1
"""The place of a term without digits: zero, infinite or NaN."""

BELOW = 4
"""Added to places, so that places below the lowest position, whose digits are zero, are not
negative."""

KINDS = 5
"""Kinds of terms: +inf, -inf, NaN, -0, and other numbers. A term's word has a one in the field of
its kind, so that the words of a block of threads can be added."""

FIELD = 12
"""Bits of a field, for blocks of fewer than 2^12 terms."""

_MASK = (1 << WIDTH) - 1
_LIMB = 26
_BIAS = 70  # positions above the lowest of any product

Fold = Callable[[Tensor], Tensor]


def digits_of_term(dtype: torch.dtype, factors: int) -> int:
    """Return the number of digits of a product of `factors` floats."""
    if dtype != torch.float64:
        return 1 + factors
    return 3 if factors == 1 else 5


def signature_of_digits(dtype: torch.dtype, factors: int) -> Signature:
    """Return the signature of the body; its outputs are added to accumulators."""
    outputs = (torch.int64,) * (2 + digits_of_term(dtype, factors))
    return Signature((dtype,) * factors, (torch.int64,) * 2, outputs, accumulates=True)


@functools.lru_cache(maxsize=16)
def body_of_digits(dtype: torch.dtype, factors: int) -> Body:
    """Return the body (x[, y]; lowest position, positions) -> place, word, digits.

    A term is x or x * y. Its digits belong to the positions place - BELOW + lowest, and up.
    """

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> list[Tensor]:
        parts = [_Parts(x) for x in vectors]
        return _digits(parts, scalars[0], is_wide=dtype == torch.float64)

    return body


class _Parts:
    """The sign, significand, exponent and kind of floats, as int64 and truth values."""

    def __init__(self, x: Tensor) -> None:
        if x.dtype == torch.float64:
            bits, precision, exponents = x.view(torch.int64), 53, 0x7FF
        else:
            bits = x.to(torch.float32).view(torch.int32).to(torch.int64)
            precision, exponents = 24, 0xFF
        mantissa = precision - 1
        size = bits & ((1 << (exponents.bit_length() + mantissa)) - 1)
        field = size >> mantissa
        infinite = exponents << mantissa
        self.is_negative = bits < 0
        self.is_finite = size < infinite
        self.is_infinite = size == infinite
        self.is_zero = size == 0
        leading = torch.where(field != 0, 1 << mantissa, 0)
        self.significand = (size & ((1 << mantissa) - 1)) | leading
        last = torch.maximum(field, torch.ones_like(field))
        self.exponent = last - (exponents // 2 + mantissa)


def _digits(parts: Sequence[_Parts], lowest: Any, is_wide: bool) -> list[Tensor]:
    x, y = parts[0], parts[-1]
    is_product = len(parts) > 1
    exponent, is_negative, is_zero = x.exponent, x.is_negative, x.is_zero
    is_finite, is_infinite = x.is_finite, x.is_infinite
    if is_product:
        exponent, is_negative = exponent + y.exponent, is_negative ^ y.is_negative
        is_infinite = (is_infinite & (y.is_infinite | (y.is_finite & ~y.is_zero))) | (
            y.is_infinite & x.is_finite & ~x.is_zero
        )
        is_finite = is_finite & y.is_finite
        is_zero = (is_zero | y.is_zero) & is_finite
    # The quotient by 31 is rounded down by a multiplication, exact below 2^13.
    biased = exponent + WIDTH * _BIAS
    position = ((biased * (2**22 // WIDTH + 1)) >> 22) - _BIAS
    shift = exponent - position * WIDTH
    digits = _of_limbs(_limbs(x, y, is_product, is_wide), shift)
    has_digits = is_finite & ~is_zero
    place = torch.where(has_digits, position - lowest + BELOW, NOTHING)
    word = torch.where(is_zero & is_negative, 1 << 3 * FIELD, 1 << 4 * FIELD)
    word = torch.where(is_finite, word, 1 << 2 * FIELD)
    word = torch.where(is_infinite, torch.where(is_negative, 1 << FIELD, 1), word)
    signed = [torch.where(is_negative, -x, x) for x in digits]
    return [place, word, *(torch.where(has_digits, x, 0) for x in signed)]


def _limbs(x: _Parts, y: _Parts, is_product: bool, is_wide: bool) -> list[Tensor]:
    """Integers below 2^29, the last one, and 2^26, which times 2^(26 i) add up to the significand
    of a term."""
    last = (1 << _LIMB) - 1
    a, b = x.significand, y.significand
    if not is_wide:
        if not is_product:
            return [a]
        product = a * b
        return [product & last, product >> _LIMB]
    low, high = a & last, a >> _LIMB
    if not is_product:
        return [low, high]
    other, above = b & last, b >> _LIMB
    first = low * other
    second = low * above + high * other + (first >> _LIMB)
    third = high * above + (second >> _LIMB)
    return [first & last, second & last, third & last, third >> _LIMB]


def _of_limbs(limbs: Sequence[Tensor], shift: Tensor) -> list[Tensor]:
    """Digits, each a sum of parts below 2^31, of limbs that are shifted left by less than 31."""
    digits: list[Tensor | None] = [None] * (2 * len(limbs) + 1)

    def add(place: int, part: Tensor) -> None:
        there = digits[place]
        digits[place] = part if there is None else there + part

    for i, limb in enumerate(limbs):
        shifted = limb << shift  # below 2^59
        place, more = divmod(_LIMB * i, WIDTH)
        add(place, (shifted & (_MASK >> more)) << more if more else shifted & _MASK)
        rest = shifted >> (WIDTH - more)
        if more == 0:  # of 28 bits at most
            add(place + 1, rest)
        else:
            add(place + 1, rest & _MASK)
            add(place + 2, rest >> WIDTH)
    return [x for x in digits if x is not None]


def add_eagerly(
    result: Tensor, x: Tensor, y: Tensor | None, lowest: int, positions: int, fold: Fold
) -> None:
    """Add terms, folded along one dimension, to digits and counts, dimension 0 of `result`."""
    factors = [x] if y is None else [x, y]
    body = body_of_digits(x.dtype, len(factors))
    place, word, *digits = body(factors, [lowest, positions], x)
    for kind in range(KINDS):
        result[positions + kind] += fold((word >> kind * FIELD) & 1)
    for here in place.unique().tolist():
        if here != NOTHING:
            is_here = place == here
            for i, digit in enumerate(digits, here - BELOW):
                if 0 <= i < positions:
                    result[i] += fold(torch.where(is_here, digit, 0))
