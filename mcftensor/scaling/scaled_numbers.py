"""Intermediate numbers of rules: float32 mantissas and an exponent, rounded when stored."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

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
from mcftensor.scaling.scaled import ScaledTensor, is_all, is_scaled, made_of
from mcftensor.scaling.scaled_format import FP8, ScaledFormat, of_dtype
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
    dtype: torch.dtype | None = None  # of the data, if it is not the operands'

    def at(self, exponent: Exponent) -> Tensor:
        """Return the mantissas for an exponent not below this one's."""
        if exponent is self.exponent:
            return self.mantissa
        return times_power(self.mantissa, self.exponent - exponent)

    def raised(self, by: int) -> Unrounded:
        """Return the same number with an exponent larger by an integer."""
        return replace(self, mantissa=times_power(self.mantissa, -by), exponent=self.exponent + by)

    def viewed(self, shape: Sequence[int]) -> Unrounded:
        """Return the same number in another shape."""
        return replace(self, mantissa=self.mantissa.view(shape))

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
    """Round a number to a new tensor in a format, or in that of its own dtype if it has one.

    A choice of the exponent by the numbers is counted under `name`.
    """
    if x.dtype is not None:
        format = of_dtype(x.dtype)
    is_by_rule = x.placing in ("by rule", "to fit")
    placing = "by size" if format.dtype in FP8 and is_by_rule else x.placing
    mantissa, exponent = x.mantissa, x.exponent
    if placing == "to fit":
        further = largest(exponent_of_largest(mantissa) - format.top, 0)
        mantissa, exponent = times_power(mantissa, -further), exponent + further
    elif placing != "by rule":
        if name and mantissa.dim():
            count("rescaled", name)
        mantissa, exponent = _placed(x, format, placing)
    return made_of(format.store(mantissa), exponent_tensor(exponent, mantissa.device), format)


def by_size(x: Any, format: ScaledFormat, name: str = "") -> ScaledTensor:
    """Return an operand in a format, placed by its size."""
    own = number(x)
    return stored(Unrounded(own.mantissa, own.exponent, "by size"), format, name)


def _placed(
    x: Unrounded, format: ScaledFormat, placing: Placing, is_weight: bool = False
) -> tuple[Tensor, Exponent]:
    """Return mantissas and exponent, moved to a place that depends on the numbers.

    "By rule" the exponent is kept if possible. Otherwise it moves just enough that the root mean
    square of the data is at least 1, or in [1, 4) for weights, and the largest number fits.
    """
    peak = exponent_of_largest(x.mantissa)
    shift = largest(smallest(peak, 126), -126)
    near = times_power(x.mantissa, -shift)  # below 4, so that squares fit
    further = fits = largest(peak - shift - format.top, -format.top)
    if placing != "high":
        rms = largest(exponent_of_rms(near), -format.top)
        further = largest(rms, fits)
        if placing != "by size":
            least = largest(fits, rms - 1) if is_weight else fits
            further = smallest(largest(-shift, least), further)
    exponent = shift + further + x.exponent
    if isinstance(peak, Tensor):
        exponent = torch.where(peak == ANY, ANY, exponent).to(torch.int32)
    elif peak == ANY:
        exponent = ANY
    return times_power(near, -further), exponent


def write_to(target: Tensor, x: Unrounded) -> Tensor:
    """Write a number to a tensor, in place, with the exponent of the rule if possible.

    The root mean square of the data is at least 1. For parameters it stays below 4, so that
    products with them stay near 1.
    """
    if not is_scaled(target):
        target.copy_(x.plain())
        return target
    format = target.format
    placing: Placing = "high" if x.placing == "high" else "by rule"
    mantissa, exponent = _placed(x, format, placing, target.requires_grad)
    whole = target._base_components
    if whole is not None and not is_all(target):
        before = known(target.exponent)
        raised = largest(exponent, before)
        beside = format.load(whole) * power_of_two(before - raised)
        for part, new in zip(whole, format.store(beside), strict=True):
            part.copy_(new)
        mantissa = times_power(mantissa, exponent - raised)
        exponent = raised
    for part, new in zip(target._held()[:-1], format.store(mantissa), strict=True):
        part.copy_(new)
    if isinstance(exponent, Tensor):
        target.exponent.copy_(exponent)
    else:
        target.exponent.fill_(exponent)
    return target


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


# --------------------------------------------------------------------------------- counts of events

_COUNTS: ContextVar[Counter[tuple[str, str]] | None] = ContextVar("scaling_counts", default=None)


def count(event: str, name: str) -> None:
    """Count an event within `counting`; outside, do nothing."""
    counts = _COUNTS.get()
    if counts is not None:
        counts[event, name] += 1


@contextlib.contextmanager
def counting() -> Iterator[Counter[tuple[str, str]]]:
    """Count the events of scaling in a block.

    Backward passes are counted if they run on the thread of the call, as on a CPU. On a GPU,
    autograd has its threads.

    Yields:
        A Counter of pairs: `("rescaled", operator)`, an exponent chosen by the numbers instead of
        a rule; `("fp8", "native")` and `("fp8", "emulated")`, products of 8-bit data by the
        device or in float32; `("fallback", operator)`, operators computed in plain float32.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.ones(2, 3), mcf.scaling.scaled(torch.float16))
        >>> with mcf.scaling.counting() as counts:
        ...     y = mcf.scaling.rescale(x * 1e-3)
        >>> counts
        Counter({('rescaled', 'rescale'): 1})
    """
    counts: Counter[tuple[str, str]] = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)
