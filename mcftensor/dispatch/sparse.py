"""Sparse gradients, as embeddings make them: their rows are added to those of an expansion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.compute import PRECISION, WIDE, compute
from mcftensor.dispatch.registry import implements
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


def add_(target: MCFTensor, source: Tensor, alpha: Any = 1) -> MCFTensor:
    """Add alpha times a sparse tensor in place; other elements stay as they are.

    Rows of the same place are summed first, exactly but for rounding in float64.
    """
    source = source.to(WIDE).coalesce()
    places = tuple(source.indices())
    rows = target[places] if places else target.clone()
    rows.add_(source.values(), alpha=alpha)
    target[places] = rows
    return target


@implements(aten.sparse_mask.default)  # SparseAdam
def sparse_mask(func: Any, x: Any, mask: Tensor) -> Tensor:
    """The elements where a sparse tensor has some, sparse and in float64."""
    if not isinstance(x, MCFTensor) or x.format.precision > PRECISION:
        return compute(func, x, mask)
    return func(x._collapsed(WIDE), mask.to(WIDE))
