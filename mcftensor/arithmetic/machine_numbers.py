"""Numbers evaluated in a wider machine type.

For 16-bit bases, float32 (two terms) or float64 (three terms) holds more bits than the format
promises. Evaluating in that type and splitting once is cheaper than a network in the base, and more
accurate: the error is half a unit of u² and little more. The order of sums matters. Leading terms
are added first, `(xh + yh) + (xl + yl)`, so that a cancellation of leading terms is exact. The sum
`(xh + xl) + (yh + yl)` has no bound on its relative error.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from mcftensor.arithmetic import eft
from mcftensor.arithmetic.base_types import NARROW
from mcftensor.arithmetic.network_numbers import Network
from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.number_protocol import Floats, Number, Numbers
from mcftensor.arithmetic.rounding import add_signed, as_floats, split_by_noise
from mcftensor.kernels.without_float64 import Pieces, widest


@dataclass(frozen=True)
class Machine(Numbers):
    """Numbers evaluated in a machine type."""

    dtype: torch.dtype

    def of(self, floats: Floats) -> Wide:
        """Return a number with a level for each float, and two float32 levels for longer inputs.

        Longer inputs are float64 and integers where the machine type is float32.
        """
        entered = []
        if widest(floats[0].device) == torch.float32:
            return Wide([y.to(self.dtype) for x in floats for y in as_floats(x)])
        for x in floats:
            leading = x.to(self.dtype)
            entered.append(leading)
            if self.dtype == torch.float32 and x.dtype not in (*NARROW, torch.float32):
                rest = (x.to(torch.float64) - leading).to(self.dtype)
                entered.append(torch.nan_to_num(rest, 0.0, 0.0, 0.0))
        return Wide(entered)

    def available(self) -> Numbers:
        """Return this kind; without float64, two float32 terms (48 bits) replace float64."""
        is_available = self.dtype != torch.float64 or widest() == self.dtype
        return self if is_available else Network(torch.float32, 2)


class Wide(Number):
    """A number as levels of a machine type, leading one first.

    A number read from memory has at least as many levels as terms. A computed number has one.
    """

    def __init__(self, levels: Floats, value: Tensor | None = None) -> None:
        self.levels = levels
        self._value = value

    @property
    def value(self) -> Tensor:
        """The sum of the levels, added from the last one, with the sign of the leading one."""
        if self._value is None:
            leading, *tails = self.levels
            self._value = torch.copysign(_total(self.levels), leading) if tails else leading
        return self._value

    @property
    def floats(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The value, as a tuple of one float."""
        return (self.value,)

    def __neg__(self) -> Wide:
        value = None if self._value is None else -self._value
        return Wide([-level for level in self.levels], value)

    def __add__(self, other: Number | Tensor | float) -> Wide:
        """The sum, with two roundings, or none where leading terms cancel."""
        if not isinstance(other, Wide):
            return Wide([self.value + _value(other)])
        pairs = zip_longest(self.levels, other.levels)
        leading, *tails = [a if b is None else b if a is None else a + b for a, b in pairs]
        return Wide([add_signed(leading, _total(tails)) if tails else leading])

    def __mul__(self, other: Number | Tensor | float) -> Wide:
        """The product, with three roundings."""
        return Wide([self.value * _value(other)])

    def __truediv__(self, other: Number | Tensor | float) -> Wide:
        """The quotient, with three roundings."""
        return Wide([self.value / _value(other)])

    def sqrt(self) -> Wide:
        """The square root, with one and a half roundings."""
        return Wide([eft.sqrt(self.value)])

    def fma(self, y: Number, z: Number) -> Wide:
        """self * y + z. The product is added to the leading term of z first."""
        return z + self * y  # type: ignore[return-value]

    def maximum(self, other: Number) -> Wide:
        """The larger of two numbers."""
        return Wide([torch.maximum(self.value, _value(other))])

    def moved_by(self, change: Number) -> Wide:
        """self + change. The change is added to the tails first."""
        leading, *tails = self.levels
        moved = _value(change)
        rest = _total(tails) + moved if tails else moved
        return Wide([leading, rest], leading + rest)

    def split(self, base: torch.dtype, terms: int, noise: Noise | None = None) -> Floats:
        """Return normalized terms of a base.

        Noise rounds the levels of a float32 number, not their sum; the terms are two of bfloat16.
        """
        if noise is None or self.value.dtype != torch.float32:
            return super().split(base, terms, noise)
        return split_by_noise(self.value, self.levels, noise)

    def summed(self) -> Wide:
        """Return the number as one level; the sign of a zero is not kept."""
        return Wide([_total(self.levels)])


def _total(levels: Floats) -> Tensor:
    """The sum of the levels, added from the last one."""
    result = levels[-1]
    for level in reversed(levels[:-1]):
        result = level + result
    return result


def _value(x: Number | Pieces | Tensor | float) -> Tensor:
    if isinstance(x, Pieces):
        return x.high
    return x.value if isinstance(x, Wide) else x  # type: ignore[return-value]
