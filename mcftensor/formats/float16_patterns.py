"""float32 numbers as float16 patterns of 32 bits: a sign, 5 bits of exponent, 26 of fraction.

The first 16 bits of a pattern are a float16, and the others go on where it ends. Magnitudes of
patterns and of numbers have the same order, across binades too. From 2^-14, the normal range of
float16, a pattern has room for all 24 bits of a float32; below, numbers are multiples of 2^-40.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.arithmetic.rounding import quiet

EXPONENT_OF_UNIT = -40
"""Of the numbers below the normal range."""

_SIGN = -(1 << 31)
_SPARE = 3  # bits of a fraction that a float32 has not
_BIAS = (127 - 15) << 23  # what the exponent of a float32 is above that of a float16
_TOP = (127 + 16) << 23  # 2^16, which is no float16
_NORMAL = (127 - 14) << 23  # 2^-14
_INFINITY, _NAN = 0x7C000000, 0x7E000000
_UNIT = 2.0**EXPONENT_OF_UNIT
# The last bit of a sum with 2^-14 is 8 units, and of one with 1.5 * 2^-17 a unit.
_COARSE, _FINE = 2.0**-14, 1.5 * 2.0**-17
_BITS_OF_COARSE, _BITS_OF_FINE = (127 - 14) << 23, ((127 - 17) << 23) | (1 << 22)


def pattern_of(number: Sum, lost: int, noise: Noise | None) -> Tensor:
    """The pattern of a number of which the last `lost` bits are to be rounded off, 0 or 8.

    Where none are, it is rounded to nearest; where bits are to be rounded to nearest, to odd. Below
    the normal range noise rounds what was rounded to nearest. From 2^16 on it is infinity.
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
    """The float32 that has a pattern; bits that a float32 does not hold are cut off."""
    magnitude = pattern & ~_SIGN
    normal = ((magnitude >> _SPARE) + _BIAS).view(torch.float32)
    small = magnitude.to(torch.float32) * _UNIT
    x = torch.where(magnitude < (_NORMAL - _BIAS) << _SPARE, small, normal)
    x = torch.where(magnitude == _INFINITY, torch.inf, x)
    x = (x.view(torch.int32) | (pattern & _SIGN)).view(torch.float32)
    return torch.where(magnitude > _INFINITY, torch.nan, x)


def _below_normal(y: Tensor, rest: Tensor | None, lost: int, noise: Noise | None) -> Tensor:
    """A magnitude in units, and what follows it, of the sign that it has beside a magnitude.

    Sums with numbers of other sizes round it, in two parts, without subnormal numbers.
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
    if rest is not None:  # on which side of a tie the number is
        off = left - kept
        pattern = pattern + ((off == _UNIT / 2) & (rest > 0)).to(torch.int32)
        pattern = pattern - ((off == -_UNIT / 2) & (rest < 0)).to(torch.int32)
    return pattern
