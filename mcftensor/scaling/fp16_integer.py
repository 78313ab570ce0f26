"""float16 with an integer of 8 bits that goes on where its own end.

Sign aside, float16 and tail are one pattern, of an exponent and 18 bits behind it, and the float16
is the nearest one to it, ties away from zero. Below 2^-14, the normal range of float16, the tail
goes on too: there numbers are multiples of 2^-32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.arithmetic.rounding import collapse_odd

BITS = 8

_LOST = 24 - 11 - BITS  # bits of a float32 that a pattern has not
_BIAS = (127 - 15) << 23  # of the exponent
_UNIT = 2.0 ** -(24 + BITS)  # of numbers below that
_INFINITY = 31 << 10


def in_two_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats as float16 and int8, rounded once, to nearest; what is not finite has no tail."""
    bits = collapse_odd((x,)).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - _BIAS + ((magnitude >> _LOST) & 1) + (1 << (_LOST - 1)) - 1) >> _LOST
    small = (magnitude.view(torch.float32) / _UNIT).clamp(max=1 << 24).round().to(torch.int32)
    pattern = torch.where(magnitude < _BIAS + (1 << 23), small, normal)
    own = (pattern + (1 << (BITS - 1))) >> BITS
    leading = (own | ((bits >> 16) & 0x8000)).to(torch.int16).view(torch.float16)
    is_finite = own < _INFINITY
    tail = torch.where(is_finite, pattern - (own << BITS), 0)
    return torch.where(is_finite, leading, x.to(torch.float16)), tail.to(torch.int8)


def of_two_parts(leading: Tensor, tail: Tensor) -> Tensor:
    """The numbers as float32, exactly."""
    own = leading.abs().view(torch.int16).to(torch.int32)
    pattern = (own << BITS) + tail.to(torch.int32)
    normal = ((pattern << _LOST) + _BIAS).view(torch.float32)
    small = pattern.to(torch.float32) * _UNIT
    x = torch.where(pattern < (1 << (10 + BITS)), small, normal)
    x = torch.where(own < _INFINITY, x, leading.abs().to(torch.float32))
    return x.copysign(leading.to(torch.float32))
