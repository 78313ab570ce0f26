"""Intermediate numbers of rules: float32 mantissas and an exponent, rounded when stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from mcftensor.scaling.event_counts import count
from mcftensor.scaling.exponents import (
    ANY,
    Exponent,
    exponent_of_largest,
    exponent_of_rms,
    exponent_tensor,
    floor_log2,
    known,
    largest,
    power_of_two,
    smallest,
    times_any_power,
    times_power,
)
from mcftensor.scaling.scaled import ScaledTensor, data_of, is_all, is_scaled, made_of
from mcftensor.scaling.scaled_format import FP8, ScaledFormat
from mcftensor.tensor.tensor import MCFTensor

Placing: TypeAlias = Literal["by rule", "to fit", "by size", "high"]
"""The choice of the exponent of a result.

- `"by rule"`: before the numbers are known; only 8-bit data is placed by its size.
- `"to fit"`: by rule, but higher if the largest number would not fit.
- `"by size"`: the root mean square of the data is in [1, 2), or lower if the largest number would
  not fit. All rebalancing does this.
- `"high"`: the largest number is placed as high as it fits. It is for squares, which have twice the
  exponent range.
"""


@dataclass(frozen=True)
class Unrounded:
    """mantissa · 2^exponent, not yet rounded to data."""

    mantissa: Tensor
    exponent: Exponent
    placing: Placing = "by rule"
    format: ScaledFormat | None = None  # if it differs from the operands' format

    def at(self, exponent: Exponent) -> Tensor:
        """Return the mantissas for an exponent not below this one's."""
        if exponent is self.exponent:
            return self.mantissa
        return times_power(self.mantissa, self.exponent - exponent)

    def raised(self, by: int) -> Unrounded:
        """Return the same number with an exponent larger by an integer."""
        return replace(self, mantissa=times_power(self.mantissa, -by), exponent=self.exponent + by)

    def to(self, device: torch.device) -> Unrounded:
        """Return the same number on another device."""
        if self.mantissa.device == device:
            return self
        exponent = self.exponent
        exponent = exponent.to(device) if isinstance(exponent, Tensor) else exponent
        return Unrounded(self.mantissa.to(device), exponent, self.placing, self.format)

    def plain(self) -> Tensor:
        """Return the numbers in float32, rounded once."""
        s = self.exponent
        if not isinstance(s, Tensor) and -126 <= s <= 127 and self.mantissa.dtype == torch.float32:
            return times_power(self.mantissa, s)
        return times_any_power(self.mantissa, s).to(torch.float32)


def number(x: Any) -> Unrounded:
    """Return a scaled tensor, a plain tensor, an expansion or a Python number as a number.

    A plain tensor is placed near 1 by its largest element, a Python number by its nearest power of
    two. Zeros and infinities fit every scale.
    """
    if isinstance(x, Unrounded):
        return x
    if is_scaled(x):
        *data, s = x._held()
        return Unrounded(x._format.load(data), known(s))
    if isinstance(x, MCFTensor):
        x = x._collapsed()
    if not isinstance(x, Tensor):
        if not x or not math.isfinite(x):
            return Unrounded(torch.tensor(float(x), device="cpu"), ANY)
        # |x| is in [√½, √2) · 2^exponent, so a factor x hardly changes the size of data.
        exponent = floor_log2(x * 2**0.5)
        return Unrounded(torch.tensor(x * 2.0**-exponent, device="cpu"), exponent)
    if not x.is_floating_point():
        return Unrounded(x.to(torch.float32), 0)
    if x.dtype.itemsize == 1:  # PyTorch has no maximum of 8-bit floats
        x = x.to(torch.float32)
    peak = exponent_of_largest(x)
    return Unrounded(times_any_power(x, -largest(peak, -1000)).to(torch.float32), peak)


def lead(x: Any) -> Unrounded:
    """Return an operand of a product: the leading term of a scaled expansion."""
    if is_scaled(x) and x._format.tail is not None:
        return Unrounded(x._format.lead.load([x._component0]), known(x.exponent))
    return number(x)


def stored(x: Unrounded, format: ScaledFormat, name: str = "") -> ScaledTensor:
    """Round a number to a new tensor of its format, or of `format` by default."""
    format = x.format or format
    is_by_rule = x.placing in ("by rule", "to fit")
    placing = "by size" if format.dtype in FP8 and is_by_rule else x.placing
    if placing == "by rule":
        mantissa, exponent = x.mantissa, x.exponent
    elif placing == "to fit":
        further = largest(exponent_of_largest(x.mantissa) - format.top, 0)
        mantissa, exponent = times_power(x.mantissa, -further), x.exponent + further
    else:
        if name and x.mantissa.dim():
            count("rescaled", name)
        mantissa, exponent = _placed(x, format, placing)
    return made_of(format.store(mantissa), exponent_tensor(exponent, mantissa.device), format)


def by_size(x: Any, format: ScaledFormat) -> ScaledTensor:
    """Return an operand in a format, placed by its size."""
    own = number(x)
    return stored(Unrounded(own.mantissa, own.exponent, "by size"), format)


def _placed(x: Unrounded, format: ScaledFormat, placing: Placing) -> tuple[Tensor, Exponent]:
    """Return mantissas and exponent, moved to the place given by the size of the numbers."""
    near, peak, shift = _near_one(x.mantissa)
    further = largest(peak - shift - format.top, -format.top)
    if placing == "by size":
        further = largest(exponent_of_rms(near), further)
    return times_power(near, -further), _unless_zero(peak, shift + further + x.exponent)


def _near_one(mantissa: Tensor) -> tuple[Tensor, Exponent, Exponent]:
    """Return mantissas below 4, so that squares fit; the exponent of the largest; and the shift."""
    peak = exponent_of_largest(mantissa)
    shift = largest(smallest(peak, 126), -126)
    return times_power(mantissa, -shift), peak, shift


def _unless_zero(peak: Exponent, exponent: Exponent) -> Exponent:
    """Return an exponent, or that of zeros."""
    if isinstance(peak, Tensor):
        return torch.where(peak == ANY, ANY, exponent).to(torch.int32)
    return ANY if peak == ANY else exponent


def write_to(target: Tensor, x: Unrounded) -> Tensor:
    """Write a number to a tensor, in place.

    The exponent of the rule is kept if possible. Otherwise it moves just enough that the root mean
    square of the data is at least 1 and the largest number fits. For parameters the root mean
    square stays below 4, so that products with them stay near 1.
    """
    if not is_scaled(target):
        target.copy_(x.plain())
        return target
    format = target.format
    mantissa, exponent = (
        _placed(x, format, x.placing)
        if x.placing == "high"
        else _moved_little(x, format, target.requires_grad)
    )
    whole = target._base_components
    if whole is not None and not is_all(target):
        before = known(target.exponent)
        raised = largest(exponent, before)
        beside = format.load(whole) * power_of_two(before - raised)
        for part, new in zip(whole, format.store(beside), strict=True):
            part.copy_(new)
        mantissa = times_power(mantissa, exponent - raised)
        exponent = raised
    for part, new in zip(data_of(target), format.store(mantissa), strict=True):
        part.copy_(new)
    if isinstance(exponent, Tensor):
        target.exponent.copy_(exponent)
    else:
        target.exponent.fill_(exponent)
    return target


def _moved_little(x: Unrounded, format: ScaledFormat, is_weight: bool) -> tuple[Tensor, Exponent]:
    near, peak, shift = _near_one(x.mantissa)
    rms = largest(exponent_of_rms(near), -format.top)
    least = largest(peak - shift - format.top, -format.top)
    most = largest(rms, least)
    if is_weight:
        least = largest(least, rms - 1)
    further = smallest(largest(-shift, least), most)
    return times_power(near, -further), _unless_zero(peak, shift + further + x.exponent)


FAR = 10
"""The number of binades below 1 beyond which data is moved near 1."""


def close(x: Unrounded) -> Unrounded:
    """Return the same number with data near 1 if all data lies far below; zeros fit every scale."""
    peak = exponent_of_largest(x.mantissa)
    if not isinstance(peak, Tensor) and peak >= -FAR:
        return x
    lower = smallest(peak, 0)
    if isinstance(lower, Tensor):
        lower = torch.where(lower < -FAR, lower, 0)
    mantissa = times_power(x.mantissa, -largest(lower, -126))
    return replace(x, mantissa=mantissa, exponent=largest(x.exponent + lower, ANY))


def aligned(operands: Sequence[Any]) -> tuple[Exponent, list[Unrounded]]:
    """Return the largest exponent of operands other than zeros, and the operands as numbers.

    Data far below 1 is moved near 1 before. If exponents are known and close together, no data is
    read.
    """
    numbers = [number(x) for x in operands]
    exponents = [s for s in (x.exponent for x in numbers) if isinstance(s, Tensor) or s != ANY]
    if not any(isinstance(s, Tensor) for s in exponents):
        least = min(exponents, default=ANY)
        numbers = [close(x) if x.exponent > least + FAR else x for x in numbers]
    elif len(exponents) > 1:
        numbers = [close(x) if x.mantissa.dim() else x for x in numbers]
    s: Exponent = ANY
    for x in numbers:
        s = largest(s, x.exponent)
    return s, numbers


def sum_of(x: Any, y: Any) -> Unrounded:
    """x + y at the larger exponent, which is √(2^2s + 2^2t), rounded down."""
    s, (a, b) = aligned([x, y])
    return Unrounded(a.at(s) + b.at(s), s)


def product_of(x: Any, y: Any) -> Unrounded:
    """x · y, element by element."""
    if not isinstance(y, Tensor | Unrounded) and y == 1:
        return number(x)
    a, b = number(x), number(y)
    return Unrounded(a.mantissa * b.mantissa, a.exponent + b.exponent)


def where_of(condition: Tensor, x: Any, y: Any) -> Unrounded:
    """x where the condition holds, else y, at the larger exponent."""
    s, (a, b) = aligned([x, y])
    return Unrounded(torch.where(condition, a.at(s), b.at(s)), s)
