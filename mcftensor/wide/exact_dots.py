"""Sums of products of expansions, rounded once for each term of the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.sums.accumulators import accumulate
from mcftensor.sums.correct_rounding import rounded_sum
from mcftensor.sums.digits import WIDEST


def exact_dots(
    x: Sequence[Tensor], y: Sequence[Tensor], terms: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return the exact dot products of rows of expansions, rounded term by term.

    *Requires*: finite terms, each of shape (rows, n); x and y have one dtype.

    *Returns*: normalized terms of `dtype`, of shape (rows,).

    *Error*: each term is the exact remainder, rounded to nearest; only what follows the last is
    lost.

    *Cost*: one exact sum for each pair of terms.

    *Special values*: beyond the range of the dtype the leading term is infinite and the others 0.
    """
    rows = len(x[0])
    left = torch.cat([a for a in x for _ in y], 1)
    right = torch.cat([b for _ in x for b in y], 1)
    total = accumulate(left, right, WIDEST)
    found: list[Tensor] = []
    for _ in range(terms):
        rounded = rounded_sum(total, dtype, WIDEST)
        found.append(torch.where(found[0].isfinite(), rounded, 0) if found else rounded)
        rest = torch.where(rounded.isfinite(), -rounded, 0).view(rows, 1)
        total = total + accumulate(rest, None, WIDEST)
    return found
