"""Sums without order as operators of PyTorch: for compilers, gradients and `torch.vmap`.

The gradient of a sum is spread over its terms, and the gradient of that is again an exact sum. So
no gradient of any order depends on the order of terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mcftensor.arithmetic.base_types import BASES
from mcftensor.kernels.columns import is_bare
from mcftensor.kernels.custom_ops import inline, opaque
from mcftensor.kernels.digit_sums import Finish, sums_of_rows
from mcftensor.sums.accumulators import accumulate, running
from mcftensor.sums.correct_rounding import rounded_mean, rounded_norm, rounded_sum
from mcftensor.sums.digits import grid_of, least_of

# Rows processed at once: accumulators of float64 rows take 600 bytes each.
_ROWS_AT_ONCE = 1 << 14


def _reduced(
    x: Tensor, y: Tensor | None, dims: Sequence[int], finish: str, dtype: torch.dtype
) -> Tensor:
    return x.new_empty([n for i, n in enumerate(x.shape) if i not in dims], dtype=dtype)


@opaque(_reduced, lays_out=True)
def exact_reduction(
    x: Tensor, y: Tensor | None, dims: Sequence[int], finish: str, dtype: torch.dtype
) -> Tensor:
    """Return the "sum" of x or of x * y, or the "mean" or "norm" of x, rounded once.

    y is None or has the shape and dtype of x. The dimensions `dims` are at least 0, and are
    removed from the result.
    """
    kept = [i for i in range(x.dim()) if i not in dims]
    shape, count = [x.shape[i] for i in kept], math.prod([x.shape[i] for i in dims])
    result = x.new_empty(shape, dtype=dtype)  # no view, since views cannot be changed in place here
    order, size = [*kept, *dims], (result.numel(), count)
    factors = x if finish == "norm" else y
    rows = _rows(x, order, size)
    other_rows = None if factors is None else _rows(factors, order, size)
    flat = result.view(-1)
    for i in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(i, i + _ROWS_AT_ONCE)
        part = None if other_rows is None else other_rows[some]
        _reduce_rows(rows[some], part, finish, flat[some])
    return result


def _rows(x: Tensor, order: list[int], size: tuple[int, int]) -> Tensor:
    return (x if order == list(range(x.dim())) else x.permute(order)).reshape(size)


def _reduce_rows(x: Tensor, y: Tensor | None, finish: str, out: Tensor) -> None:
    """Reduce rows by compiled code, or by PyTorch's operators with the same bits."""
    factors, count, dtype = 1 if y is None else 2, x.shape[1], out.dtype
    grid = grid_of(x.dtype, factors)
    if finish == "mean" and count == 0:
        out.fill_(torch.nan)
        return
    base, divisor = BASES[dtype], count if finish == "mean" else 1
    way = Finish(divisor, finish == "norm", base.precision, least_of(dtype, 1))
    least = least_of(x.dtype, factors)
    if sums_of_rows(x, y, out, grid.lowest, grid.count, least, way):
        return
    accumulator = accumulate(x, y, grid)
    if finish == "mean":
        out.copy_(rounded_mean(accumulator, count, dtype, grid))
    elif finish == "norm":
        out.copy_(rounded_norm(accumulator, dtype, grid))
    else:
        out.copy_(rounded_sum(accumulator, dtype, grid))


_reduction = inline(exact_reduction)


@opaque(lambda x, dim, dtype: x.new_empty(x.shape, dtype=dtype), lays_out=True)
def exact_running_sum(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the sums of the first elements along a dimension of at least 0, each rounded once."""
    columns = x.movedim(dim, 0)
    result = x.new_empty(x.shape, dtype=dtype)
    by_column = result.movedim(dim, 0)
    grid, first = grid_of(x.dtype, 1), 0
    for accumulators in running(columns.reshape(len(columns), math.prod(columns.shape[1:])), grid):
        sums = rounded_sum(accumulators, dtype, grid)
        by_column[first : first + len(sums)] = sums.view(len(sums), *columns.shape[1:])
        first += len(sums)
    return result


class Reduction(torch.autograd.Function):
    """`exact_reduction` with gradients, which are spread over the terms."""

    @staticmethod
    def forward(
        x: Tensor, y: Tensor | None, dims: Sequence[int], finish: str, dtype: torch.dtype
    ) -> Tensor:
        """Return the result of the operator."""
        return exact_reduction(x, y, dims, finish, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the factors of products, or x and the norm."""
        x, y, ctx.dims, ctx.finish, _ = inputs
        ctx.shape, ctx.dtype = x.shape, x.dtype
        saved = (x, output) if ctx.finish == "norm" else () if y is None else (x, y)
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of y."""
        if ctx.finish == "norm":
            x, norm = ctx.saved_tensors
            # The quotient x / norm is at most 1; the quotient of gradient and norm may overflow.
            sizes = Spread.apply(torch.where(norm == 0, 1, norm), ctx.dims, ctx.shape)
            slope = x / sizes * Spread.apply(gradient, ctx.dims, ctx.shape)
            return slope.to(ctx.dtype), None, None, None, None
        if ctx.finish == "mean":
            gradient = gradient / math.prod([ctx.shape[i] for i in ctx.dims])
        spread = Spread.apply(gradient.to(ctx.dtype), ctx.dims, ctx.shape)
        if not ctx.saved_tensors:
            return spread, None, None, None, None
        x, y = ctx.saved_tensors
        of_x, of_y, *_ = ctx.needs_input_grad
        return spread * y if of_x else None, spread * x if of_y else None, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        y: Tensor | None,
        dims: Sequence[int],
        finish: str,
        dtype: torch.dtype,
    ) -> tuple[Tensor, int]:
        """Reduce every member of a batch."""
        x = _with_batch_first(x, in_dims[0], info.batch_size)
        y = None if y is None else _with_batch_first(y, in_dims[1], info.batch_size)
        return Reduction.apply(x, y, [i + 1 for i in dims], finish, dtype), 0


def reduction(
    x: Tensor, y: Tensor | None, dims: Sequence[int], finish: str, dtype: torch.dtype
) -> Tensor:
    """Call `Reduction`, or the operator directly if no autograd, tracer or transform is active."""
    tensors = (x,) if y is None else (x, y)
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if is_recorded or forward_ad._current_level >= 0 or not is_bare(tensors):
        return Reduction.apply(x, y, dims, finish, dtype)
    return _reduction(x, y, dims, finish, dtype)


class Spread(torch.autograd.Function):
    """A tensor repeated along dimensions, whose gradient is an exact sum over these dimensions."""

    @staticmethod
    def forward(x: Tensor, dims: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a view of x expanded to `shape` along `dims`."""
        for dim in dims:
            x = x.unsqueeze(dim)
        return x.expand(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the dimensions."""
        _, ctx.dims, _ = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the exact sum over the dimensions."""
        return Reduction.apply(gradient, None, ctx.dims, "sum", gradient.dtype), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, dims: Sequence[int], shape: Sequence[int]
    ) -> tuple[Tensor, int]:
        """Spread every member of a batch."""
        x = _with_batch_first(x, in_dims[0], info.batch_size)
        return Spread.apply(x, [i + 1 for i in dims], [info.batch_size, *shape]), 0


class RunningSum(torch.autograd.Function):
    """`exact_running_sum` with gradients, which are running sums from the other end."""

    @staticmethod
    def forward(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """Return the result of the operator."""
        return exact_running_sum(x, dim, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the dimension."""
        x, ctx.dim, _ = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the sums of the last elements of the gradient."""
        later = RunningSum.apply(gradient.flip(ctx.dim), ctx.dim, ctx.dtype)
        return later.flip(ctx.dim), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        """Sum every member of a batch."""
        x = _with_batch_first(x, in_dims[0], info.batch_size)
        return RunningSum.apply(x, dim + 1, dtype), 0


def _with_batch_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
