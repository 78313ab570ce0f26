"""Rules of matrix products, convolutions and pooling.

Sums of K products are divided by √K, rounded down to a power of two. Data is multiplied in float32,
and the product is rounded to data once. If the data of the factors is below A and B, the product's
is below A · B · √(2K): float16 overflows only where A · B · √(2K) is above 65,504.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import half_log2, times_power
from mcftensor.scaling.rule_shapes import by_gradient, on_data
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, lead, number, product_of, sum_of


@rule(aten.mm, aten.bmm, aten.mv, aten.dot, takes_operator=True)
def _product(func: Any, x: Any, y: Any) -> Unrounded:
    """A product that contracts the last dimension of x."""
    a, b = lead(x), lead(y)
    half = half_log2(x.shape[-1])
    data = func(a.mantissa, b.mantissa)
    return Unrounded(times_power(data, -half), a.exponent + b.exponent + half)


@rule(aten.addmm, aten.baddbmm)
def _with_bias(bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Unrounded:
    """A linear layer, or attention in single steps."""
    made = _product(aten.mm if x.dim() == 2 else aten.bmm, x, y)
    if alpha != 1:
        made = product_of(made, number(alpha))
    added = lead(bias) if beta == 1 else product_of(lead(bias), number(beta))
    return sum_of(made, added) if beta else made


@rule(aten.convolution)
def _convolution(x: Any, weight: Any, bias: Any, *how: Any) -> Unrounded:
    """A product that contracts input channels and kernel."""
    a, b = lead(x), lead(weight)
    transposed = how[3]
    half = half_log2(_contracted(weight, transposed, how[5]))
    made = Unrounded(
        times_power(aten.convolution(a.mantissa, b.mantissa, None, *how), -half),
        a.exponent + b.exponent + half,
    )
    if bias is None:
        return made
    added = lead(bias)
    shape = (-1, *(1 for _ in range(weight.dim() - 2)))
    return sum_of(made, Unrounded(added.mantissa.view(shape), added.exponent))


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
        Unrounded(times_power(part, -half), exponent + half) if wanted else None
        for part, half, exponent, wanted in zip(made, halves, exponents, mask, strict=True)
    )


on_data(aten.max_pool2d_with_indices, aten.adaptive_max_pool2d)
by_gradient(aten.max_pool2d_with_indices_backward, aten.adaptive_max_pool2d_backward)


@rule(aten._adaptive_avg_pool2d, aten.avg_pool2d, takes_operator=True)
def _average(func: Any, x: Any, *how: Any, **also: Any) -> Unrounded:
    pooled = func(number(x).mantissa, *how, **also)
    half = half_log2(max(1, x.numel() // max(1, pooled.numel())))
    return Unrounded(times_power(pooled, half), x.exponent - half)


@rule(aten._adaptive_avg_pool2d_backward, aten.avg_pool2d_backward, takes_operator=True)
def _spread(func: Any, gradient: Any, x: Any, *how: Any, **also: Any) -> Unrounded:
    """Spread each gradient over n positions, divided by n."""
    g = number(gradient)
    made = func(g.mantissa, torch.empty(x.shape, device=x.device), *how, **also)
    whole = max(1, x.numel() // max(1, gradient.numel())).bit_length() - 1
    return Unrounded(times_power(made, whole), g.exponent - whole)
