"""Round trips: elements that another format stores as other numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.convert import as_plain
from mcftensor.dispatch.operands import value_in
from mcftensor.formats import Format
from mcftensor.tensor import MCFTensor


def in_format(format: Format, x: Tensor, count: Tensor | None = None) -> Tensor:
    """Return a tensor in a format, or as a plain one, rounded once."""
    if format.arithmetic == "plain":
        return as_plain(x, format.dtype)
    return value_in(x, format, count)


def differing(x: Tensor, y: Tensor) -> int:
    """Return the number of elements of two tensors in one format with other bits, NaNs aside."""
    differ = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    for a, b in zip(components_of(x), components_of(y), strict=True):
        other = a != b
        if a.is_floating_point():
            other = (other & ~(a.isnan() & b.isnan())) | (a.signbit() != b.signbit())
        differ |= other
    return int(differ.sum())


def components_of(x: Tensor) -> Sequence[Tensor]:
    """Return the components of an expansion, or a plain tensor itself."""
    return x.components if isinstance(x, MCFTensor) else [x]
