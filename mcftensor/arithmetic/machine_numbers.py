"""Numbers evaluated in a wider machine type.

For bases of 16 bits a float32 (two terms) or float64 (three terms) register holds more bits than
the format promises. Evaluating there and splitting once is cheaper than a network in the base,
and sharper: half a unit of u² and little more. What matters is the order of sums: leading terms
first, `(xh + yh) + (xl + yl)`, so that a cancellation of leading terms is exact. Never
`(xh + xl) + (yh + yl)`, whose relative error has no bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from mcftensor.arithmetic import eft
from mcftensor.arithmetic.base_types import NARROW
from mcftensor.arithmetic.number_protocol import Floats, Number, Numbers
from mcftensor.arithmetic.rounding import add_signed, as_floats
from mcftensor.kernels.without_float64 import Halves, has_float64


@dataclass(frozen=True)
class Machine(Numbers):
    """Numbers of a machine type."""

    dtype: torch.dtype

    def of(self, floats: Floats) -> Wide:
        """Floats enter as they are; a float64 or an integer takes two of float32."""
        entered = []
        if not has_float64(floats[0].device):
            return Wide([y.to(self.dtype) for x in floats for y in as_floats(x)])
        for x in floats:
            leading = x.to(self.dtype)
            entered.append(leading)
            if self.dtype == torch.float32 and x.dtype not in (*NARROW, torch.float32):
                rest = (x.to(torch.float64) - leading).to(self.dtype)
                entered.append(torch.nan_to_num(rest, 0.0, 0.0, 0.0))
        return Wide(entered)


class Wide(Number):
    """A number as levels of a machine type, leading one first.

    What is read from memory has as many as its terms, or more; what is computed has one.
    """

    def __init__(self, levels: Floats, value: Tensor | None = None) -> None:
        self.levels = levels
        self._value = value

    @property
    def value(self) -> Tensor:
        """The sum of the levels, last ones first, with the sign of the leading one, zeros too."""
        if self._value is None:
            leading, *tails = self.levels
            self._value = torch.copysign(_total(self.levels), leading) if tails else leading
        return self._value

    @property
    def floats(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The one float that was computed."""
        return (self.value,)

    def __neg__(self) -> Wide:
        value = None if self._value is None else -self._value
        return Wide([-level for level in self.levels], value)

    def __add__(self, other: Number | Tensor | float) -> Wide:
        """Two roundings, neither where leading terms cancel."""
        if not isinstance(other, Wide):
            return Wide([self.value + _value(other)])
        pairs = zip_longest(self.levels, other.levels)
        leading, *tails = [a if b is None else b if a is None else a + b for a, b in pairs]
        return Wide([add_signed(leading, _total(tails)) if tails else leading])

    def __mul__(self, other: Number | Tensor | float) -> Wide:
        """Three roundings."""
        return Wide([self.value * _value(other)])

    def __truediv__(self, other: Number | Tensor | float) -> Wide:
        """Three roundings."""
        return Wide([self.value / _value(other)])

    def sqrt(self) -> Wide:
        """One and a half roundings."""
        return Wide([eft.sqrt(self.value)])

    def fma(self, y: Number, z: Number) -> Wide:
        """In this order: the product meets the leading term of z."""
        return z + self * y  # type: ignore[return-value]

    def maximum(self, other: Number) -> Wide:
        """The larger of two numbers."""
        return Wide([torch.maximum(self.value, _value(other))])

    def moved_by(self, change: Number) -> Wide:
        """self + change: the change meets the tails first."""
        leading, *tails = self.levels
        moved = _value(change)
        return Wide([leading + (_total(tails) + moved if tails else moved)])

    def summed(self) -> Wide:
        """One level; the sign of a zero is not kept."""
        return Wide([_total(self.levels)])


def _total(levels: Floats) -> Tensor:
    """The sum of levels, last ones first."""
    result = levels[-1]
    for level in reversed(levels[:-1]):
        result = level + result
    return result


def _value(x: Number | Halves | Tensor | float) -> Tensor:
    if isinstance(x, Halves):
        return x.high
    return x.value if isinstance(x, Wide) else x  # type: ignore[return-value]
