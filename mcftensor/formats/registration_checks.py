"""Checks that a user's format stores the numbers that every program writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mcftensor.arithmetic.noise import noise_of
from mcftensor.arithmetic.number_protocol import Sum

if TYPE_CHECKING:
    from mcftensor.formats.format import Format

_BLOCK = 32  # elements, since blocks of 32 may share a component


def require_codec(format: Format) -> None:
    """Encode and decode zero, one, the largest float of the leading component, infinity and NaN.

    Raises:
        TypeError: the dtype of the format is not floating, or `encode` returns other dtypes than
            the components'.
        ValueError: a number does not survive. Zero and one must be unchanged, the largest float
            finite, and infinity itself, a large number, or NaN if the format has no infinity.
    """
    name = f"{type(format).__name__} {format.name!r}"
    if not format.dtype.is_floating_point:
        raise TypeError(
            f"Format: the leading component of {name} is {format.dtype}; models compute with it, "
            "so it has to be a float. Put codes behind it, or give the class a floating `dtype`"
        )
    largest = torch.finfo(format.dtype).max
    index = torch.arange(_BLOCK, device="cpu").view(1, _BLOCK)
    noise = noise_of(format.rounding, torch.zeros((), dtype=torch.int64, device="cpu"), index)
    values = [0.0, 1.0, largest, torch.inf, torch.nan]
    stored = []
    for value in values:
        x = torch.full((1, _BLOCK), value, dtype=format.numbers.dtype, device="cpu")
        encoded = format.encode(Sum([x]), noise)
        dtypes = [c.dtype for c in encoded]
        if dtypes != [c.dtype for c in format.components]:
            raise TypeError(f"Format: encode of {name} gives {dtypes}, not its components' dtypes")
        stored.append(sum(x.flatten()[0].item() for x in reversed(format.decode(encoded))))
    zero, one, large, infinity, nan = stored
    is_large = infinity > 1 or infinity != infinity
    is_right = zero == 0 and one == 1 and 0 < large < torch.inf and is_large and nan != nan
    if not is_right:
        raise ValueError(
            f"Format: {name} stores {values} and reads {stored}; encode and decode do not belong "
            "together, or lose numbers that every program writes"
        )
