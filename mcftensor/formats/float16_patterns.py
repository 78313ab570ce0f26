"""float32 numbers as float16 patterns of 32 bits: a sign, 5 bits of exponent, 26 of fraction.

The first 16 bits of a pattern are a float16, and the other 16 continue it. Patterns and numbers
have the same order of magnitudes, across binades too. From 2^-14, the start of the normal range of
float16, a pattern holds all 24 bits of a float32; below, numbers are multiples of 2^-40.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.arithmetic.rounding import quiet

EXPONENT_OF_UNIT = -40
"""log2 of the unit of numbers below the normal range."""

_SIGN = -(1 << 31)
_SPARE = 3  # bits of a pattern's fraction beyond a float32's
_BIAS = (127 - 15) << 23  # the exponent bias of float32 less that of float16
_TOP = (127 + 16) << 23  # 2^16, beyond the range of float16
_NORMAL = (127 - 14) << 23  # 2^-14
_INFINITY, _NAN = 0x7C000000, 0x7E000000
_UNIT = 2.0**EXPONENT_OF_UNIT
# The last bit of a sum with 2^-14 is 8 units; the last bit of a sum with 1.5 * 2^-17 is one unit.
_COARSE, _FINE = 2.0**-14, 1.5 * 2.0**-17
_BITS_OF_COARSE, _BITS_OF_FINE = (127 - 14) << 23, ((127 - 17) << 23) | (1 << 22)


def pattern_of(number: Sum, lost: int, noise: Noise | None) -> Tensor:
    """Return the pattern of a number whose last `lost` bits, 0 or 8, will be rounded off.

    If `lost` is 0, the number is rounded to nearest. Otherwise it is rounded to odd, or, for
    rounding by noise below the normal range, to nearest. Numbers from 2^16 on become infinite.
    """
    rest = None
    if lost:
        x = number.to_odd()
    elif len(number.floats) == 1 and number.floats[0].dtype.itemsize <= 4:
        x = number.to(torch.float32)
    else:
        x, rest = number.split(torch.float32, 2)
    x = quiet(x)
    bits = x.view(torch.int32)
    magnitude = bits & ~_SIGN
    normal = (torch.where(magnitude > _TOP, _TOP, magnitude) - _BIAS) << _SPARE
    if rest is not None:
        rest = torch.where(bits < 0, -rest, rest)
    small = _below_normal(x.abs(), rest, lost, noise)
    pattern = torch.where(magnitude < _NORMAL, small, normal) | (bits & _SIGN)
    return torch.where(x.isnan(), _NAN, pattern)


def float32_of(pattern: Tensor) -> Tensor:
    """Return the float32 of a pattern; bits beyond the precision of float32 are cut off."""
    magnitude = pattern & ~_SIGN
    normal = ((magnitude >> _SPARE) + _BIAS).view(torch.float32)
    small = magnitude.to(torch.float32) * _UNIT
    x = torch.where(magnitude < (_NORMAL - _BIAS) << _SPARE, small, normal)
    x = torch.where(magnitude == _INFINITY, torch.inf, x)
    x = (x.view(torch.int32) | (pattern & _SIGN)).view(torch.float32)
    return torch.where(magnitude > _INFINITY, torch.nan, x)


def _below_normal(y: Tensor, rest: Tensor | None, lost: int, noise: Noise | None) -> Tensor:
    """Return a magnitude in units, given the rest that follows it, with its sign.

    Sums with larger numbers round the magnitude, in two parts, without subnormal numbers.
    """
    moved = y + _COARSE
    eights = moved.view(torch.int32) - _BITS_OF_COARSE
    left = y - (moved - _COARSE)
    moved = left + _FINE
    units = moved.view(torch.int32) - _BITS_OF_FINE
    pattern = (eights << _SPARE) + units
    kept = moved - _FINE
    if lost and noise is None:
        return (pattern - (kept > left).to(torch.int32)) | (kept != left).to(torch.int32)
    if rest is not None:  # resolve ties by the rest
        off = left - kept
        pattern = pattern + ((off == _UNIT / 2) & (rest > 0)).to(torch.int32)
        pattern = pattern - ((off == -_UNIT / 2) & (rest < 0)).to(torch.int32)
    return pattern
