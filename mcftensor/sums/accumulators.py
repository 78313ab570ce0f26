"""Accumulators: exact sums of floats, which merge by the addition of integers.

An accumulator is an int64 tensor. Its first dimension holds the digits of a grid, lowest position
first, and then five counts, from which sums of infinities, NaN and zeros follow IEEE 754. The sum
of two accumulators is the accumulator of the terms of both, whether a loop, a thread or an
all-reduce adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from mcftensor.kernels import digit_sums
from mcftensor.sums.digits import (
    WIDEST,
    WIDTH,
    Grid,
    least_of,
    positions_of,
    products_of,
    significand_digits,
)

COUNTS = 5
"""The counts behind the digits: terms that are +inf, -inf, NaN, -0, and other numbers."""

# Elements processed at once, so that intermediate results stay in the caches.
_AT_ONCE = 1 << 18
_RUNNING_AT_ONCE = 1 << 14

Fold = Callable[[Tensor], Tensor]


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
            _add_block(part, x[block], factors, grid, lambda counts: counts.sum(1))
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
    return (
        torch.zeros(WIDEST.count + COUNTS, dtype=torch.int64, device="cpu")
        if total is None
        else total
    )


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
        _add_block(result, block, None, grid, lambda counts: counts.cumsum(0))
        _carry(result[: grid.count])
        before = result[:, -1]
        yield result


def _add_block(result: Tensor, x: Tensor, y: Tensor | None, grid: Grid, fold: Fold) -> None:
    """Add the digits and the counts of a block of terms, folded along one dimension."""
    is_narrow = x.dtype != torch.float64
    wide = x.float() if is_narrow else x
    other = y.float() if is_narrow and y is not None else y
    is_finite = torch.isfinite(wide)
    shown = wide
    if other is not None:
        is_finite = is_finite & torch.isfinite(other)
        is_zero = (wide == 0) | (other == 0)
        shown = torch.where(is_finite & ~is_zero, 1.0, wide * other)
        other = torch.where(is_finite, other, 0)
    wide = torch.where(is_finite, wide, 0)
    plus, minus, nan, minus_zeros, others = result[grid.count :]
    if not bool(is_finite.all()):
        plus += fold(shown == torch.inf)
        minus += fold(shown == -torch.inf)
        nan += fold(shown.isnan())
    is_minus_zero = (shown == 0) & shown.signbit()
    minus_zeros += fold(is_minus_zero)
    others += fold(~is_minus_zero)
    for position, digits in (
        significand_digits(wide, other) if is_narrow else _positions(wide, other)
    ):
        if 0 <= position - grid.lowest < grid.count:
            result[position - grid.lowest] += fold(digits)


def _positions(x: Tensor, y: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Yield positions and digits of float64 numbers, or of their products."""
    for offset, numbers in [(0, x)] if y is None else products_of(x, y):
        for position, digits in positions_of(numbers):
            yield position + offset, digits


def _carry(digits: Tensor) -> None:
    """Carry the bits of digits above 31 to the next position, once.

    Digits are then below 2^31 + 2^32 in magnitude, except the highest, which keeps its bits.
    """
    above = digits >> WIDTH
    above[-1] = 0
    digits -= above << WIDTH
    digits[1:] += above[:-1]
