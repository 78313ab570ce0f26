"""Rules of layer, RMS, group and batch norms: data is normalized, and the gain gives the scale.

The gradient of the input is scaled by its size, which balances the scales of backward passes. The
gradients of gain and bias are sums, and follow the rule of sums.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import (
    Exponent,
    half_log2,
    power_of_two,
    times_any_power,
)
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, close, number, product_of, sum_of


def _inverse_deviation(variance: Tensor, eps: float, exponent: Any) -> Tensor:
    """Return 1 / √(variance + eps), where eps is an unscaled number."""
    total = variance + eps * power_of_two(-exponent) * power_of_two(-exponent)
    if not eps:
        return total.rsqrt()
    # eps, divided by the square of the scale, may be beyond the range of float32.
    root = eps**-0.5 if eps > 0 else math.nan
    alone = variance.new_ones(()) * power_of_two(exponent) * root
    return torch.where(total.isinf() & variance.isfinite(), alone, total.rsqrt())


def _saved(mean: Tensor, inverse: Tensor, exponent: Exponent) -> tuple[Tensor, Tensor]:
    """Convert statistics to unscaled numbers, since other code, such as vmap, reads them."""
    return times_any_power(mean, exponent), times_any_power(inverse, -exponent)


def _of_data(mean: Tensor, inverse: Tensor, exponent: Exponent) -> tuple[Tensor, Tensor]:
    """Convert saved statistics back to units of the data."""
    return Unrounded(mean, -exponent).plain(), Unrounded(inverse, exponent).plain()


def _with_gain(normal: Tensor, weight: Any, bias: Any, shape: tuple[int, ...]) -> Unrounded:
    made = close(Unrounded(normal, 0))  # far below 1 if eps is large
    if weight is not None:
        made = product_of(made, number(weight).viewed(shape))
    return made if bias is None else sum_of(made, number(bias).viewed(shape))


def _per_channel(x: Any) -> tuple[int, ...]:
    """Return the shape that broadcasts one number per channel over x."""
    return (1, -1, *[1] * (x.dim() - 2))


def _gain_of(weight: Any) -> tuple[Tensor | None, Exponent]:
    if weight is None:
        return None, 0
    gain = number(weight)
    return gain.mantissa, gain.exponent


Gradients = tuple[Unrounded | None, ...]
"""The gradients of input, gain and bias; None for those not needed."""


def _gradients(
    made: Any, g: Unrounded, a: Unrounded, of_gain: Exponent, mask: list[bool]
) -> Gradients:
    """Return gradients in units of data as numbers; those of gain and bias are sums."""
    dx, *sums = made
    of_x = Unrounded(dx, g.exponent - a.exponent + of_gain, "by size") if mask[0] else None
    return of_x, *(
        _summed(y, g.exponent, a.mantissa.numel()) if wanted else None
        for y, wanted in zip(sums, mask[1:], strict=True)
    )


def _summed(y: Tensor, exponent: Exponent, numbers: int) -> Unrounded:
    return close(Unrounded(y, exponent).raised(half_log2(numbers // max(1, y.numel()))))


@rule(aten.native_layer_norm)
def _layer_norm(
    x: Any, shape: Any, weight: Any, bias: Any, eps: float
) -> tuple[Unrounded, Tensor, Tensor]:
    a = number(x)
    dims = tuple(range(-len(shape), 0))
    variance, mean = torch.var_mean(a.mantissa, dims, correction=0, keepdim=True)
    inverse = _inverse_deviation(variance, eps, a.exponent)
    made = _with_gain((a.mantissa - mean) * inverse, weight, bias, tuple(shape))
    return made, *_saved(mean, inverse, a.exponent)


@rule(aten.native_layer_norm_backward)
def _layer_norm_backward(gradient: Any, x: Any, shape: Any, *how: Any) -> Gradients:
    mean, inverse, weight, bias, mask = how
    g, a, (gain, of_gain) = number(gradient), number(x), _gain_of(weight)
    statistics = _of_data(mean, inverse, a.exponent)
    parts = gain, _gain_of(bias)[0], mask
    made = aten.native_layer_norm_backward(g.mantissa, a.mantissa, shape, *statistics, *parts)
    return _gradients(made, g, a, of_gain, mask)


@rule(aten._fused_rms_norm)
def _rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> tuple[Unrounded, Tensor]:
    a = number(x)
    dims = tuple(range(-len(shape), 0))
    square = a.mantissa.square().mean(dims, keepdim=True)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = _inverse_deviation(square, eps, a.exponent)
    made = _with_gain(a.mantissa * inverse, weight, None, tuple(shape))
    return made, _saved(inverse, inverse, a.exponent)[1]


@rule(aten._fused_rms_norm_backward)
def _rms_norm_backward(
    gradient: Any, x: Any, shape: Any, inverse: Tensor, weight: Any, mask: list[bool]
) -> Gradients:
    g, a, (gain, of_gain) = number(gradient), number(x), _gain_of(weight)
    _, inverse = _of_data(inverse, inverse, a.exponent)
    normal = a.mantissa * inverse
    own = g.mantissa if gain is None else g.mantissa * gain
    dims = tuple(range(-len(shape), 0))
    dx = inverse * (own - normal * (own * normal).mean(dims, keepdim=True))
    dw = (g.mantissa * normal).sum(tuple(range(x.dim() - len(shape))))
    return _gradients((dx, dw), g, a, of_gain, mask)


@rule(aten.native_group_norm)
def _group_norm(x: Any, weight: Any, bias: Any, *how: Any) -> tuple[Unrounded, Tensor, Tensor]:
    n, *_, groups, eps = how
    a = number(x)
    parts = a.mantissa.reshape(n, groups, -1 if x.numel() else 0)
    if parts.numel():
        variance, mean = torch.var_mean(parts, 2, correction=0)
    else:  # PyTorch warns of a variance of nothing
        variance = mean = parts.new_zeros(n, groups)
    inverse = _inverse_deviation(variance, eps, a.exponent)
    normal = ((parts - mean[..., None]) * inverse[..., None]).view(x.shape)
    return _with_gain(normal, weight, bias, _per_channel(x)), *_saved(mean, inverse, a.exponent)


@rule(aten.native_group_norm_backward)
def _group_norm_backward(gradient: Any, x: Any, *how: Any) -> Gradients:
    mean, inverse, weight, *sizes, mask = how
    g, a, (gain, of_gain) = number(gradient), number(x), _gain_of(weight)
    data = g.mantissa.contiguous(), a.mantissa.contiguous()
    statistics = _of_data(mean, inverse, a.exponent)
    made = aten.native_group_norm_backward(*data, *statistics, gain, *sizes, mask)
    return _gradients(made, g, a, of_gain, mask)


# ------------------------------------------------------------------------------------ batch norms


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def _batch_norm(x: Any, weight: Any, bias: Any, *how: Any) -> tuple[Unrounded, Tensor, Tensor]:
    """Normalize by the statistics of the batch, in units of its data, or by the running ones."""
    running_mean, running_variance, training, momentum, eps = how
    a = number(x)
    dims = [0, *range(2, x.dim())]
    shape = _per_channel(x)
    if training:
        variance, mean = torch.var_mean(a.mantissa, dims, correction=0)
        if running_mean is not None:
            n = x.numel() // x.shape[1]
            unbiased = Unrounded(variance * (n / max(1, n - 1)), a.exponent * 2)
            running_mean.lerp_(Unrounded(mean, a.exponent).plain(), momentum)
            running_variance.lerp_(unbiased.plain(), momentum)
        inverse = _inverse_deviation(variance, eps, a.exponent)
    else:
        mean, inverse = _running(running_mean, running_variance, eps, a.exponent)
    normal = (a.mantissa - mean.view(shape)) * inverse.view(shape)
    result = _with_gain(normal, weight, bias, shape)
    if not training:  # as PyTorch, whose gradient reads the running ones, too
        return result, mean.new_zeros(0), mean.new_zeros(0)
    return result, *_saved(mean, inverse, a.exponent)


def _running(running_mean: Any, running_variance: Any, eps: float, exponent: Any) -> Any:
    """Return running means and inverse deviations in units of data."""
    mean = Unrounded(number(running_mean).plain(), -exponent).plain()
    variance = Unrounded(number(running_variance).plain(), -exponent * 2).plain()
    return mean, _inverse_deviation(variance, eps, exponent)


@rule(aten._native_batch_norm_legit.no_stats)
def _batch_norm_of_batch(x: Any, weight: Any, bias: Any, training: bool, *how: Any) -> Any:
    return _batch_norm(x, weight, bias, None, None, True, *how)


@rule(aten.native_batch_norm_backward)
def _batch_norm_backward(gradient: Any, x: Any, weight: Any, *how: Any) -> Gradients:
    running_mean, running_variance, mean, inverse, training, eps, mask = how
    g, a, (gain, of_gain) = number(gradient), number(x), _gain_of(weight)
    if training:
        mean, inverse = _of_data(mean, inverse, a.exponent)
    else:
        mean, inverse = _running(running_mean, running_variance, eps, a.exponent)
    dims = [0, *range(2, x.dim())]
    shape = _per_channel(x)
    normal = (a.mantissa - mean.view(shape)) * inverse.view(shape)
    dw = (g.mantissa * normal).sum(dims)
    db = g.mantissa.sum(dims)
    dx = g.mantissa
    if training:
        n = math.prod(x.shape[d] for d in dims)
        dx = dx - (db.view(shape) + normal * dw.view(shape)) / n
    dx = dx * inverse.view(shape)
    dx = dx if gain is None else dx * gain.view(shape)
    return _gradients((dx, dw, db), g, a, of_gain, mask)
