"""Numbers as rules have them: float32 mantissas and an exponent, rounded once they are stored."""

from __future__ import annotations

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
"""How the exponent of a result is found.

- `"by rule"`: it is known before the numbers are, and 8-bit data alone is placed by its size.
- `"to fit"`: by rule, but higher where the largest number would not fit.
- `"by size"`: the data's root mean square is put into [1, 2), or lower if the largest number would
  not fit. All who rebalance do this.
- `"high"`: the largest number is put as high as it fits: squares, which have twice the range.
"""


@dataclass(frozen=True)
class Unrounded:
    """mantissa · 2^exponent, of which nothing has been rounded to data yet."""

    mantissa: Tensor
    exponent: Exponent
    placing: Placing = "by rule"
    format: ScaledFormat | None = None  # where it is not that of the operands

    def at(self, exponent: Exponent) -> Tensor:
        """The mantissas for an exponent that is not below the own one."""
        if exponent is self.exponent:
            return self.mantissa
        return times_power(self.mantissa, self.exponent - exponent)

    def to(self, device: torch.device) -> Unrounded:
        """The same on another device."""
        if self.mantissa.device == device:
            return self
        exponent = self.exponent
        exponent = exponent.to(device) if isinstance(exponent, Tensor) else exponent
        return Unrounded(self.mantissa.to(device), exponent, self.placing, self.format)

    def plain(self) -> Tensor:
        """The numbers in float32, rounded once."""
        s = self.exponent
        if not isinstance(s, Tensor) and -126 <= s <= 127 and self.mantissa.dtype == torch.float32:
            return times_power(self.mantissa, s)
        return times_any_power(self.mantissa, s).to(torch.float32)


def number(x: Any) -> Unrounded:
    """An operand as a number: a scaled tensor, a plain one, an expansion, or a Python number.

    A plain tensor is put near 1 by its largest element, and a Python number by the power of two
    that is nearest to it.
    """
    if is_scaled(x):
        *data, s = x._held()
        return Unrounded(x._format.load(data), known(s))
    if isinstance(x, MCFTensor):
        x = x._collapsed()
    if not isinstance(x, Tensor):
        exponent = nearest_exponent(x)
        return Unrounded(torch.tensor(x * 2.0**-exponent if x else 0.0, device="cpu"), exponent)
    if not x.is_floating_point():
        return Unrounded(x.to(torch.float32), 0)
    if x.dtype.itemsize == 1:  # of which PyTorch does not tell the largest
        x = x.to(torch.float32)
    peak = exponent_of_largest(x)
    return Unrounded(times_any_power(x, -largest(peak, -1000)).to(torch.float32), peak)


def lead(x: Any) -> Unrounded:
    """An operand of a product: of a scaled expansion the leading term."""
    if is_scaled(x) and x._format.tail is not None:
        return Unrounded(x._format.lead.load([x._component0]), known(x.exponent))
    return number(x)


def nearest_exponent(x: float) -> int:
    """e for which |x| is in [√½, √2) · 2^e, so that x times a number hardly moves its data."""
    return floor_log2(x * 2**0.5) if x else ANY


def stored(x: Unrounded, format: ScaledFormat, name: str = "") -> ScaledTensor:
    """A number as a tensor of a format, or its own, with memory and an exponent of its own."""
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
    """An operand in a format, placed by its size."""
    own = number(x)
    return stored(Unrounded(own.mantissa, own.exponent, "by size"), format)


def _placed(x: Unrounded, format: ScaledFormat, placing: Placing) -> tuple[Tensor, Exponent]:
    """Mantissas and exponent, moved to where the size of the numbers says."""
    near, peak, shift = _near_one(x.mantissa)
    further = largest(peak - shift - format.top, -format.top)
    if placing == "by size":
        further = largest(exponent_of_rms(near), further)
    return times_power(near, -further), _unless_zero(peak, shift + further + x.exponent)


def _near_one(mantissa: Tensor) -> tuple[Tensor, Exponent, Exponent]:
    """Mantissas below 4, so that squares fit; the exponent of the largest, and what of it that
    took."""
    peak = exponent_of_largest(mantissa)
    shift = largest(smallest(peak, 126), -126)
    return times_power(mantissa, -shift), peak, shift


def _unless_zero(peak: Exponent, exponent: Exponent) -> Exponent:
    """An exponent, or that of zeros."""
    if isinstance(peak, Tensor):
        return torch.where(peak == ANY, ANY, exponent).to(torch.int32)
    return ANY if peak == ANY else exponent


def write_to(target: Tensor, x: Unrounded, name: str = "") -> Tensor:
    """Write a number into a tensor, in place.

    The exponent that the rule says is kept if it can be: it moves as little as brings the root mean
    square of the data to 1 or more, and the largest number to where it fits. For parameters the
    root mean square stays below 4, so that products with them stay near 1.
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
"""Binades by which the largest element of data may lie below 1, and the exponent counts."""


def close(x: Unrounded) -> Unrounded:
    """The same number with data near 1, if all of it lies far below; zeros go with every scale."""
    peak = exponent_of_largest(x.mantissa)
    if not isinstance(peak, Tensor) and peak >= -FAR:
        return x
    lower = smallest(peak, 0)
    if isinstance(lower, Tensor):
        lower = torch.where(lower < -FAR, lower, 0)
    mantissa = times_power(x.mantissa, -largest(lower, -126))
    return replace(x, mantissa=mantissa, exponent=largest(x.exponent + lower, ANY))


def leveled(numbers: Sequence[Unrounded]) -> tuple[Exponent, list[Unrounded]]:
    """Numbers that are to have one exponent, the largest, and that; without those of zeros.

    Where exponents are known and near each other, nobody looks at the data.
    """
    exponents = [x.exponent for x in numbers]
    known_ones = [s for s in exponents if not isinstance(s, Tensor)]
    if len(known_ones) < len(exponents):
        numbers = [close(x) if x.mantissa.dim() else x for x in numbers]
    else:
        least = min((s for s in known_ones if s != ANY), default=ANY)
        numbers = [close(x) if x.exponent > least + FAR else x for x in numbers]
    s: Exponent = ANY
    for x in numbers:
        s = largest(s, x.exponent)
    return s, list(numbers)


def sum_of(a: Unrounded, b: Unrounded, exponent: Exponent | None = None) -> Unrounded:
    """a + b at the larger exponent: that is √(2^2s + 2^2t), rounded down."""
    if exponent is None:
        s, (a, b) = leveled([a, b])
    else:
        s = exponent
    return Unrounded(a.at(s) + b.at(s), s)


def aligned(operands: Sequence[Any]) -> tuple[Exponent, list[Unrounded]]:
    """Operands as numbers, and the largest of their exponents."""
    return leveled([number(x) for x in operands])


def product_of(a: Unrounded, b: Unrounded) -> Unrounded:
    """a · b, element by element."""
    return Unrounded(a.mantissa * b.mantissa, a.exponent + b.exponent)
