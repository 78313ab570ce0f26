"""Accumulators: exact sums of floats, which merge by the addition of integers.

An accumulator is an int64 tensor. Its first dimension holds the digits of a grid, lowest position
first, and then five counts, from which sums of infinities, NaN and zeros follow IEEE 754. The sum
of two accumulators is the accumulator of the terms of both, whether a loop, a thread or an
all-reduce adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mcftensor.kernels import digit_sums
from mcftensor.kernels.digit_body import WIDTH, add_eagerly
from mcftensor.sums.digits import WIDEST, Grid, least_of

COUNTS = 5
"""The counts behind the digits: terms that are +inf, -inf, NaN, -0, and other numbers."""

SIZE = WIDEST.count + COUNTS
"""The length of an accumulator in the widest grid."""

# Elements processed at once, so that intermediate results stay in the caches.
_AT_ONCE = 1 << 18
_RUNNING_AT_ONCE = 1 << 14


def accumulate(x: Tensor, y: Tensor | None, grid: Grid) -> Tensor:
    """Return the accumulators of rows.

    Args:
        x: floats, of shape (rows, n).
        y: None, or factors of the same dtype and shape; the terms are then the products x * y.
        grid: the positions that hold all digits of the terms.

    Returns:
        int64, of shape (positions of the grid + 5, rows). Up to 2^29 accumulators can be added.
    """
    rows, length = x.shape
    by_row = x.new_zeros(rows, grid.count + COUNTS, dtype=torch.int64)
    if digit_sums.add_rows(x, y, by_row, grid.lowest, least_of(x.dtype, 1 if y is None else 2)):
        _carry(by_row.t()[: grid.count])
        return by_row.t()
    result = by_row.t().contiguous()
    wide = min(length, _AT_ONCE)
    high = max(_AT_ONCE // max(wide, 1), 1)
    for top in range(0, rows, high):
        part = result[:, top : top + high]
        for left in range(0, length, _AT_ONCE):
            block = (slice(top, top + high), slice(left, left + wide))
            factors = None if y is None else y[block]
            add_eagerly(
                part, x[block], factors, grid.lowest, grid.count, lambda counts: counts.sum(1)
            )
            _carry(part[: grid.count])
    return result


def accumulate_all(tensors: Iterable[Tensor], *, squares: bool = False) -> Tensor:
    """Return the accumulator of all elements of tensors, or of their squares, in the widest grid.

    Processes add their accumulators by an all-reduce of int64, whose result has no order.
    `rounded_sum` and `rounded_norm` of `correct_rounding.py` round an accumulator once.

    Args:
        tensors: bfloat16, float16, float32 and float64 tensors of any shape, on one device.
        squares: whether the terms are the squares of elements.

    Returns:
        int64, of 144 elements. Without tensors it is on the CPU, where it merges with any other.
    """
    total: Tensor | None = None
    for tensor in tensors:
        row = tensor.detach().reshape(1, -1)
        one = accumulate(row, row if squares else None, WIDEST)[:, 0]
        total = one if total is None else total + one
    return torch.zeros(SIZE, dtype=torch.int64, device="cpu") if total is None else total


def accumulate_dots(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the accumulators of the dot products of a tensor with others, in the widest grid.

    Args:
        x: floats, of shape (n,).
        others: tensors of the dtype and shape of x; x itself may be among them.

    Returns:
        int64, of shape (144, number of others).
    """
    rows = [accumulate(x.view(1, -1), y.view(1, -1), WIDEST) for y in others]
    return torch.cat(rows, 1)


def running(x: Tensor, grid: Grid) -> Iterator[Tensor]:
    """Yield the accumulators of the first, the first two, ..., all elements of columns, in blocks.

    Args:
        x: floats, of shape (n, columns).
        grid: the positions that hold all digits of the terms.

    Returns:
        int64 tensors of shape (positions of the grid + 5, m, columns), whose m add up to n.
    """
    length, columns = x.shape
    before = x.new_zeros(grid.count + COUNTS, columns, dtype=torch.int64)
    high = max(_RUNNING_AT_ONCE // max(columns, 1), 1)
    for top in range(0, length, high):
        block = x[top : top + high]
        result = before.unsqueeze(1).repeat(1, len(block), 1)
        add_eagerly(result, block, None, grid.lowest, grid.count, lambda counts: counts.cumsum(0))
        _carry(result[: grid.count])
        before = result[:, -1]
        yield result


def _carry(digits: Tensor) -> None:
    """Carry the bits of digits above 31 to the next position, once.

    Digits are then below 2^31 + 2^32 in magnitude, except the highest, which keeps its bits.
    """
    above = digits >> WIDTH
    above[-1] = 0
    digits -= above << WIDTH
    digits[1:] += above[:-1]
