"""Rules of sums over dimensions: n independent numbers sum to √n times one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import half_log2, times_power
from mcftensor.scaling.ruling import aten, rule
from mcftensor.scaling.scaled_format import of_dtype
from mcftensor.scaling.scaled_numbers import Placing, Unrounded, number

Dims = int | Sequence[int] | None


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(
    x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Unrounded:
    """s + floor(½ log2 n); what has no dimensions left goes by its size, which costs nothing."""
    n = _count_of(x, dim)
    half = half_log2(n)
    summed = number(x).mantissa.sum(_dims(x, dim), keepdim)
    return Unrounded(
        times_power(summed, -half), x.exponent + half, _placing(summed), _format(dtype)
    )


@rule(aten.mean.default, aten.mean.dim)
def _mean(
    x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Unrounded:
    """A sum, divided by n."""
    half = half_log2(_count_of(x, dim))
    mean = number(x).mantissa.mean(_dims(x, dim), keepdim)
    return Unrounded(times_power(mean, half), x.exponent - half, _placing(mean), _format(dtype))


@rule(aten.amax)
def _amax(x: Any, dim: Dims = (), keepdim: bool = False) -> Unrounded:
    return Unrounded(number(x).mantissa.amax(_dims(x, dim), keepdim), x.exponent)


@rule(aten.amin)
def _amin(x: Any, dim: Dims = (), keepdim: bool = False) -> Unrounded:
    return Unrounded(number(x).mantissa.amin(_dims(x, dim), keepdim), x.exponent)


@rule(aten.max.default)
def _max(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.max(), x.exponent)


@rule(aten.min.default)
def _min(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.min(), x.exponent)


@rule(aten.linalg_vector_norm)
def _vector_norm(
    x: Any,
    order: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Unrounded:
    """Norms are in proportion to their numbers; they are float32, as is what clips by them."""
    norm = torch.linalg.vector_norm(number(x).mantissa, order, dim, keepdim)
    format = of_dtype(torch.float32) if norm.dim() == 0 else None
    return Unrounded(norm, x.exponent, _placing(norm), _format(dtype) or format)


@rule(aten.var.correction)
def _var(x: Any, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Unrounded:
    variance = number(x).mantissa.var(_dims(x, dim), correction=correction, keepdim=keepdim)
    return Unrounded(variance, x.exponent * 2, _placing(variance))


@rule(aten.cumsum)
def _cumsum(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Unrounded:
    half = half_log2(x.shape[dim] if x.dim() else 1)
    summed = number(x).mantissa.cumsum(dim)
    return Unrounded(times_power(summed, -half), x.exponent + half, "by rule", _format(dtype))


def _count_of(x: Tensor, dim: Dims) -> int:
    dims = [dim] if isinstance(dim, int) else dim
    return math.prod(x.shape[d] for d in dims) if dims else x.numel()


def _dims(x: Tensor, dim: Dims) -> list[int]:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return dims or list(range(x.dim()))


def _placing(result: Tensor) -> Placing:
    return "by rule" if result.dim() else "by size"


def _format(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else of_dtype(dtype)
