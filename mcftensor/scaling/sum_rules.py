"""Rules of products, convolutions, pooling and reductions.

Unit scaling takes numbers for independent: the sum of n numbers has √n times their size. So sums of
K products are divided by √K, rounded down to a power of two, which the exponent gains. Data is
multiplied in float32, and the product is rounded to data once. If the data of the factors is below
A and B, the product's is below A · B · √(2K): float16 overflows only where A · B · √(2K) is above
65,504.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import half_log2
from mcftensor.scaling.rule_table import aten, homogeneous, rule
from mcftensor.scaling.scaled_numbers import (
    Unrounded,
    lead,
    number,
    product_of,
    sum_of,
)

# ------------------------------------------------------------------------------------- products


@rule(aten.mm, aten.bmm, aten.mv, aten.dot, takes_operator=True)
def _product(func: Any, x: Any, y: Any) -> Unrounded:
    """A product that contracts the last dimension of x."""
    a, b = lead(x), lead(y)
    made = func(a.mantissa, b.mantissa)
    return Unrounded(made, a.exponent + b.exponent).raised(half_log2(x.shape[-1]))


@rule(aten.addmm, aten.baddbmm)
def _with_bias(bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Unrounded:
    """A linear layer, or attention in single steps."""
    made = _product(aten.mm if x.dim() == 2 else aten.bmm, x, y)
    made = product_of(made, alpha)
    return sum_of(made, product_of(lead(bias), beta)) if beta else made


@rule(aten.convolution)
def _convolution(x: Any, weight: Any, bias: Any, *how: Any) -> Unrounded:
    """A product that contracts input channels and kernel."""
    a, b = lead(x), lead(weight)
    half = half_log2(_contracted(weight, how[3], how[5]))
    data = aten.convolution(a.mantissa, b.mantissa, None, *how)
    made = Unrounded(data, a.exponent + b.exponent).raised(half)
    if bias is None:
        return made
    return sum_of(made, lead(bias).viewed((-1, *(1 for _ in range(weight.dim() - 2)))))


def _contracted(weight: Tensor, transposed: bool, groups: int) -> int:
    channels = weight.shape[0] // groups if transposed else weight.shape[1]
    return channels * math.prod(weight.shape[2:])


@rule(aten.convolution_backward)
def _convolution_backward(
    gradient: Any, x: Any, weight: Any, bias_sizes: Any, *how: Any
) -> tuple[Unrounded | None, ...]:
    """The gradients are products too.

    The gradient of the input contracts output channels and kernel. The gradients of weight and bias
    contract all positions.
    """
    g, a, b = number(gradient), lead(x), lead(weight)
    made = aten.convolution_backward(g.mantissa, a.mantissa, b.mantissa, bias_sizes, *how)
    *_, transposed, _, groups, mask = how
    of_places = half_log2(gradient.shape[0] * math.prod(gradient.shape[2:]))
    halves = half_log2(_contracted(weight, not transposed, groups)), of_places, of_places
    exponents = (g.exponent + b.exponent, g.exponent + a.exponent, g.exponent)
    return tuple(
        Unrounded(part, exponent).raised(half) if wanted else None
        for part, exponent, half, wanted in zip(made, exponents, halves, mask, strict=True)
    )


# ----------------------------------------------------------------------------- sums and means

Dims = int | Sequence[int] | None


@rule(
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten._adaptive_avg_pool2d, aten.avg_pool2d),
    takes_operator=True,
)
def _sum(func: Any, x: Any, *how: Any, dtype: Any = None, **also: Any) -> Unrounded:
    """Give floor(½ log2 n) of a sum of n numbers to the exponent, and take it from that of a mean.

    Scalars are placed by size, which costs nothing.
    """
    a = number(x)
    made = func(a.mantissa, *how, **also)
    half = half_log2(x.numel() // max(1, made.numel()))
    is_sum = func.overloadpacket is aten.sum
    return _of_reduction(Unrounded(made, a.exponent).raised(half if is_sum else -half), dtype)


@rule(aten.cumsum)
def _cumsum(x: Any, dim: int, *, dtype: Any = None) -> Unrounded:
    a, half = number(x), half_log2(x.shape[dim] if x.dim() else 1)
    return replace(Unrounded(a.mantissa.cumsum(dim), a.exponent).raised(half), dtype=dtype)


def _of_reduction(x: Unrounded, dtype: torch.dtype | None = None) -> Unrounded:
    """Return the result of a reduction, by default in the format of its operand."""
    return replace(x, placing="by rule" if x.mantissa.dim() else "by size", dtype=dtype)


@rule(aten._adaptive_avg_pool2d_backward, aten.avg_pool2d_backward, takes_operator=True)
def _spread(func: Any, gradient: Any, x: Any, *how: Any, **also: Any) -> Unrounded:
    """Spread each gradient over n positions, divided by n."""
    g = number(gradient)
    made = func(g.mantissa, torch.empty(x.shape, device=x.device), *how, **also)
    whole = max(1, x.numel() // max(1, gradient.numel())).bit_length() - 1
    return Unrounded(made, g.exponent).raised(-whole)


# Means of neighbours and sums of a few numbers keep the scale.
homogeneous(
    *(aten.unfold_backward.default, aten.col2im.default, aten.upsample_linear1d.default),
    *(aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default),
    aten.upsample_trilinear3d.default,
)

# ----------------------------------------------------------------------------- spread and norms


@rule(
    *(aten.var.correction, aten.std.correction),
    *(aten.var_mean.correction, aten.std_mean.correction),
    takes_operator=True,
)
def _spread_of(
    func: Any, x: Any, dim: Dims = None, *, keepdim: bool = False, **how: Any
) -> Unrounded | tuple[Unrounded, Unrounded]:
    a, name = number(x), func.overloadpacket.__name__
    made, degree = aten.var.correction(a.mantissa, dim, keepdim=keepdim, **how), 2
    if name.startswith("std"):
        made, degree = made.sqrt(), 1
    spread = _of_reduction(Unrounded(made, a.exponent * degree))
    if not name.endswith("mean"):
        return spread
    return spread, _sum(aten.mean.dim, x, dim or list(range(x.dim())), keepdim)


@rule(aten.norm.ScalarOpt_dim, aten.norm.Scalar)
def _norm(x: Any, order: float | None = 2, dim: Dims = None, keepdim: bool = False) -> Unrounded:
    return _vector_norm(x, 2 if order is None else order, dim, keepdim)


@rule(aten.linalg_vector_norm)
def _vector_norm(
    x: Any, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Unrounded:
    """Norms are proportional to their numbers. They are float32, as are factors for clipping."""
    a = number(x)
    norm = torch.linalg.vector_norm(a.mantissa, order, dim, keepdim)
    exponent = 0 if order == 0 else a.exponent  # a count has no scale
    default = None if norm.dim() else torch.float32
    return _of_reduction(Unrounded(norm, exponent), dtype or default)


# At a scale near 1, like log softmax.
homogeneous(aten.logsumexp, degree=None, placing="to fit")
