"""The order of expansions: lexicographic in their terms, because they are normalized.

Operands are lists of terms of one base, equally many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Terms = Sequence[Tensor]


def equal(x: Terms, y: Terms) -> Tensor:
    """x == y, elementwise."""
    result = x[0] == y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        result = result & (a == b)
    return result


def less(x: Terms, y: Terms) -> Tensor:
    """x < y, elementwise."""
    result = x[-1] < y[-1]
    for a, b in zip(reversed(x[:-1]), reversed(y[:-1]), strict=True):
        result = (a < b) | ((a == b) & result)
    return result


def choose(condition: Tensor, x: Terms, y: Terms) -> list[Tensor]:
    """x where the condition holds, else y."""
    return [torch.where(condition, a, b) for a, b in zip(x, y, strict=True)]


def maximum(x: Terms, y: Terms) -> list[Tensor]:
    """The larger of x and y; NaN where either is NaN."""
    return choose(torch.isnan(x[0]) | less(y, x), x, y)


def minimum(x: Terms, y: Terms) -> list[Tensor]:
    """The smaller of x and y; NaN where either is NaN."""
    return choose(torch.isnan(x[0]) | less(x, y), x, y)


def clamp(x: Terms, low: Terms | None, high: Terms | None = None) -> list[Tensor]:
    """Clamp x to limits; either may be None."""
    if low is not None:
        x = maximum(x, low)
    return list(x if high is None else minimum(x, high))
