"""Accumulators as floats: the sum, its quotient or its square root, rounded once.

The leading 124 bits of a sum, and whether any nonzero bit follows, decide how it is rounded. They
are stored as two integers of 62 bits each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, Base, power_of_two
from mcftensor.kernels.digit_body import WIDTH
from mcftensor.sums.digits import WIDEST, Grid

MOST_IN_A_MEAN = 2**31 - 1
"""The largest number of terms in a mean: a quotient of 62 bits by it must fit in int64."""

_BITS = 2 * WIDTH
_MASK = (1 << WIDTH) - 1

# Positions added below, so that five follow from the leading digit down, and above, for carries.
_BELOW, _ABOVE = 4, 2


@dataclass(frozen=True)
class Leading:
    """The magnitudes of sums, (high + low / 2^62) 2^exponent, and whether nonzero bits follow.

    `high` has 62 bits, or is 0 for a sum of zero; `low` has up to 62.
    """

    high: Tensor
    low: Tensor
    exponent: Tensor
    has_rest: Tensor
    is_negative: Tensor


def rounded_sum(accumulator: Tensor, dtype: torch.dtype, grid: Grid = WIDEST) -> Tensor:
    """Round the sums of accumulators, of shape (positions + 5, ...), to nearest, ties to even."""
    digits, counts = accumulator[: grid.count], accumulator[grid.count :]
    x = leading_of(digits, grid.lowest)
    return _with_specials(_rounded(x.high, x.exponent, x.low != 0, x, dtype), counts, dtype)


def rounded_mean(
    accumulator: Tensor, count: int, dtype: torch.dtype, grid: Grid = WIDEST
) -> Tensor:
    """Divide the sums by `count`, at most `MOST_IN_A_MEAN`, and round them once."""
    digits, counts = accumulator[: grid.count], accumulator[grid.count :]
    if count == 0:
        return torch.full(digits.shape[1:], torch.nan, dtype=dtype, device=digits.device)
    x = leading_of(digits, grid.lowest)
    quotient = x.high // count
    # The low part supplies the bits that the quotient lacks.
    shift = _BITS - _bit_length(quotient)
    shift = torch.where(x.high == 0, 0, shift)
    dividend = ((x.high - quotient * count) << shift) + (x.low >> (_BITS - shift))
    more = dividend // count
    rest = (dividend - more * count != 0) | ((x.low & ((1 << (_BITS - shift)) - 1)) != 0)
    mean = _rounded((quotient << shift) + more, x.exponent - shift, rest, x, dtype)
    return _with_specials(mean, counts, dtype)


def rounded_norm(accumulator: Tensor, dtype: torch.dtype, grid: Grid = WIDEST) -> Tensor:
    """Return the square roots of the sums of accumulators of squares, rounded once."""
    digits, counts = accumulator[: grid.count], accumulator[grid.count :]
    x = leading_of(digits, grid.lowest)
    # The square is an integer of 107 or 108 bits, times an even power of two: its root has 54.
    shift = 46 - (x.exponent & 1)
    rest = (x.low & ((1 << (_BITS - shift)) - 1)) != 0
    square = (x.high << shift) + (x.low >> (_BITS - shift))  # its last 64 bits
    # The root of the leading 61 or 62 bits, and 23 more by a division of what it leaves.
    high = x.high >> (46 - shift)
    leading = _root(high)
    rest_of_root = ((high - leading * leading) << 23) // (2 * leading).clamp(min=1)
    root = (leading << 23) + rest_of_root
    # The root is off by a few units, so the remainder has at most 64 bits.
    root = root + (square - root * root) // (2 * root).clamp(min=1)
    root = root - (square - root * root < 0).to(torch.int64)
    root = root + (square - root * root > 2 * root).to(torch.int64)
    rest = rest | (square != root * root)
    norm = _rounded(root << 8, ((x.exponent - shift) >> 1) - 8, rest, x, dtype)
    return _with_specials(norm, counts, dtype)


# The bits of the widest grid below the point, and the bits by which a root is longer than half.
_FRACTION, _GUARD = -WIDTH * WIDEST.lowest, 64


def sum_as_float(accumulator: Sequence[int]) -> float:
    """Round the sum of an accumulator in the widest grid once, to a Python float."""
    special = _special_as_float(accumulator)
    if special is not None:
        return special
    return _as_float(_whole(accumulator), _FRACTION)


def norm_as_float(accumulator: Sequence[int]) -> float:
    """Return the root of the sum of an accumulator of squares, rounded once, as a Python float."""
    special = _special_as_float(accumulator)
    if special is not None:
        return special
    square = _whole(accumulator) << 2 * _GUARD
    root = math.isqrt(square)
    root |= root * root != square  # a root that is not exact does not lie on a tie
    return _as_float(root, _FRACTION // 2 + _GUARD)


def _as_float(x: int, places: int) -> float:
    """Return x / 2^places, rounded once."""
    try:
        return x / (1 << places)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _whole(accumulator: Sequence[int]) -> int:
    """Return the sum of the digits, in units of the last place of the widest grid."""
    return sum(d << WIDTH * i for i, d in enumerate(accumulator[: WIDEST.count]) if d)


def _special_as_float(accumulator: Sequence[int]) -> float | None:
    plus, minus, nan, *_ = accumulator[WIDEST.count :]
    if nan or (plus and minus):
        return math.nan
    return math.inf if plus else -math.inf if minus else None


def _root(x: Tensor) -> Tensor:
    """The roots of integers of at most 62 bits, rounded down."""
    root = x.float().sqrt().to(torch.int64)
    for _ in range(2):  # 24 bits, 46, all
        root = root.clamp(1, _MASK)
        root = (root + x // root) >> 1
    root = root - (root * root > x).to(torch.int64)
    return root + ((root + 1) * (root + 1) <= x).to(torch.int64)


def leading_of(digits: Tensor, lowest: int) -> Leading:
    """Return the leading bits of sums of digits; dimension 0 starts at position `lowest`."""
    used = (
        digits.reshape(len(digits), -1).any(1).nonzero().flatten().tolist()
        if digits.numel()
        else []
    )
    first, last = (used[0], used[-1]) if used else (0, 0)
    shape = digits.shape[1:]
    below, above = digits.new_zeros(_BELOW, *shape), digits.new_zeros(_ABOVE, *shape)
    digits = torch.cat([below, digits[first : last + 1], above])
    is_negative = _carry(digits, torch.zeros_like(digits[0])) < 0
    digits ^= torch.where(is_negative, _MASK, 0)
    _carry(digits, is_negative.to(torch.int64))
    index = torch.arange(len(digits), device=digits.device).view(-1, *[1] * len(shape))
    leading = torch.where(digits != 0, index, _BELOW).amax(0)
    places = leading - torch.arange(5, device=digits.device).view(-1, *[1] * len(shape))
    parts = digits.gather(0, places)
    shift = (WIDTH - _bit_length(parts[0])).clamp(max=WIDTH - 1)
    # The five digits, shifted so that the first one is full.
    highs, lows = (parts << shift) & _MASK, parts >> (WIDTH - shift)
    chunks = highs[:-1] | lows[1:]
    follows = ((digits != 0) & (index < places[-1])).any(0) | (highs[-1] != 0)
    return Leading(
        (chunks[0] << WIDTH) | chunks[1],
        (chunks[2] << WIDTH) | chunks[3],
        (leading + (lowest + first - _BELOW - 1)) * WIDTH - shift,
        follows,
        is_negative,
    )


def _carry(digits: Tensor, carry: Tensor) -> Tensor:
    """Reduce digits below 2^31, from the lowest up, and return the last carry."""
    for digit in digits:
        digit += carry
        carry = digit >> WIDTH
        digit &= _MASK
    return carry


def _rounded(
    high: Tensor, exponent: Tensor, rest: Tensor, x: Leading, dtype: torch.dtype
) -> Tensor:
    """Round high * 2^exponent, followed by nonzero bits or not, to the precision of a dtype.

    The result is float32, or float64 for float64. Beyond the range of the dtype it is rounded as if
    the range had no end; the conversion to the dtype then makes it infinite, as rounding to nearest
    does.
    """
    base: Base = BASES[dtype]
    rest = rest | x.has_rest
    # The number of the 62 bits that are dropped; more of them for a subnormal result.
    least = base.min_exponent - base.precision + 1
    dropped = torch.maximum(
        torch.full_like(exponent, _BITS - base.precision), least - exponent
    ).clamp(max=_BITS + 1)
    kept = high >> dropped
    remainder, half = high - (kept << dropped), 1 << (dropped - 1)
    is_above = (remainder > half) | ((remainder == half) & (rest | (kept & 1 == 1)))
    kept = kept + is_above.to(torch.int64)
    unit = (exponent + dropped).clamp(least, base.max_exponent + 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    size = kept.to(wide) * power_of_two(unit // 2, wide) * power_of_two(unit - unit // 2, wide)
    return torch.where(x.is_negative, -size, size)


def _with_specials(values: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace the results where terms were infinite or NaN, or all of them -0."""
    plus, minus, nan, minus_zeros, others = counts.unbind()
    values = torch.where((values == 0) & (minus_zeros > 0) & (others == 0), -0.0, values)
    values = torch.where(plus > 0, torch.inf, values)
    values = torch.where(minus > 0, -torch.inf, values)
    values = torch.where((nan > 0) | ((plus > 0) & (minus > 0)), torch.nan, values)
    return values.to(dtype)


def _bit_length(x: Tensor) -> Tensor:
    """The bit lengths of numbers of at most 62 bits."""
    length = torch.zeros_like(x)
    for bits in (32, 16):
        high = x >> bits
        length = length + torch.where(high != 0, bits, 0)
        x = torch.where(high != 0, high, x)
    field = x.float().view(torch.int32).to(torch.int64) >> 23  # of 16 bits, which float32 holds
    return length + torch.where(x == 0, 0, field - 126)
