"""Rules of reductions.

The sum of n independent numbers has √n times their size. Reductions by order, such as max, act on
the data and keep the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import half_log2, times_power
from mcftensor.scaling.rule_shapes import on_data
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_format import of_dtype
from mcftensor.scaling.scaled_numbers import Placing, Unrounded, number

Dims = int | Sequence[int] | None

on_data(
    *(aten.max.dim, aten.min.dim, aten.median.dim, aten.max.default, aten.min.default),
    *(aten.median.default, aten.amax, aten.amin, aten.topk.default, aten.kthvalue.default),
    *(aten.sort.default, aten.sort.stable, aten.cummax.default, aten.cummin.default),
)


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(
    x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Unrounded:
    """Add floor(½ log2 n) to the exponent; place scalars by size, which costs nothing."""
    n = _count_of(x, dim)
    half = half_log2(n)
    summed = number(x).mantissa.sum(dims_of(x, dim), keepdim)
    return Unrounded(
        times_power(summed, -half), x.exponent + half, _placing(summed), _format(dtype)
    )


@rule(aten.mean.default, aten.mean.dim)
def _mean(
    x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Unrounded:
    """A sum divided by n."""
    half = half_log2(_count_of(x, dim))
    mean = number(x).mantissa.mean(dims_of(x, dim), keepdim)
    return Unrounded(times_power(mean, half), x.exponent - half, _placing(mean), _format(dtype))


@rule(aten.norm.ScalarOpt_dim, aten.norm.Scalar)
def _norm(x: Any, order: float | None = 2, dim: Dims = None, keepdim: bool = False) -> Unrounded:
    return _vector_norm(x, 2 if order is None else order, dim, keepdim)


@rule(aten.linalg_vector_norm)
def _vector_norm(
    x: Any,
    order: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Unrounded:
    """Norms are proportional to their numbers. They are float32, as are factors for clipping."""
    norm = torch.linalg.vector_norm(number(x).mantissa, order, dim, keepdim)
    format = of_dtype(torch.float32) if norm.dim() == 0 else None
    exponent = 0 if order == 0 else x.exponent  # a count has no scale
    return Unrounded(norm, exponent, _placing(norm), _format(dtype) or format)


def _variance(x: Any, dim: Dims, correction: Any, keepdim: bool) -> Unrounded:
    correction = 1 if correction is None else correction
    made = number(x).mantissa.var(dims_of(x, dim), correction=correction, keepdim=keepdim)
    return Unrounded(made, x.exponent * 2, _placing(made))


def _deviation(x: Any, dim: Dims, correction: Any, keepdim: bool) -> Unrounded:
    made = _variance(x, dim, correction, keepdim).mantissa.sqrt()
    return Unrounded(made, x.exponent, _placing(made))


def _spread_by(operator: Any, spread: Callable[..., Unrounded], *, and_mean: bool = False) -> None:
    @rule(operator)
    def compute(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        found = spread(x, dim, correction, keepdim)
        return (found, _mean(x, dim, keepdim)) if and_mean else found


_spread_by(aten.var.correction, _variance)
_spread_by(aten.std.correction, _deviation)
_spread_by(aten.var_mean.correction, _variance, and_mean=True)
_spread_by(aten.std_mean.correction, _deviation, and_mean=True)


@rule(aten.logsumexp)
def _logsumexp(x: Any, dim: Dims, keepdim: bool = False) -> Unrounded:
    """Compute in float32, at a scale near 1 like log softmax."""
    return Unrounded(number(x).plain().logsumexp(dims_of(x, dim), keepdim), 0, "to fit")


@rule(aten.cumsum)
def _cumsum(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Unrounded:
    half = half_log2(x.shape[dim] if x.dim() else 1)
    summed = number(x).mantissa.cumsum(dim)
    return Unrounded(times_power(summed, -half), x.exponent + half, "by rule", _format(dtype))


def _count_of(x: Tensor, dim: Dims) -> int:
    dims = [dim] if isinstance(dim, int) else dim
    return math.prod(x.shape[d] for d in dims) if dims and x.dim() else x.numel()


def dims_of(x: Tensor, dim: Dims) -> list[int]:
    """Return the reduced dimensions, all of them by default."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return dims or list(range(x.dim()))


def _placing(result: Tensor) -> Placing:
    return "by rule" if result.dim() else "by size"


def _format(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else of_dtype(dtype)
