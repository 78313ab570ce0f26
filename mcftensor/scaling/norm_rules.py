"""Rules of layer, RMS and batch norms: data is normalized, and the scale is that of the gain.

The gradient of what is normalized goes by its size: this is where scales of backward passes are
balanced. Those of gain and bias are sums, and follow the rule of sums.
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
    times_power,
)
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, close, number, product_of, sum_of


def _inverse_deviation(variance: Tensor, eps: float, exponent: Any) -> Tensor:
    """1 / √(variance + eps), of which eps is one of the true numbers."""
    total = variance + eps * power_of_two(-exponent) * power_of_two(-exponent)
    if not eps:
        return total.rsqrt()
    # In units of data eps may be beyond float32.
    alone = variance.new_ones(()) * power_of_two(exponent) * eps**-0.5
    return torch.where(total.isinf() & variance.isfinite(), alone, total.rsqrt())


def _saved(mean: Tensor, inverse: Tensor, exponent: Exponent) -> tuple[Tensor, Tensor]:
    """Statistics of data as true numbers, which others may ask for beside ours: vmap does."""
    return times_any_power(mean, exponent), times_any_power(inverse, -exponent)


def _of_data(mean: Tensor, inverse: Tensor, exponent: Exponent) -> tuple[Tensor, Tensor]:
    """In units of data again."""
    own = times_any_power(mean, -exponent), times_any_power(inverse, exponent)
    return own[0].to(torch.float32), own[1].to(torch.float32)


def _with_gain(normal: Tensor, weight: Any, bias: Any, shape: tuple[int, ...]) -> Unrounded:
    made = close(Unrounded(normal, 0))  # beside a large eps it may be far below 1
    if weight is not None:
        gain = number(weight)
        made = product_of(made, Unrounded(gain.mantissa.view(shape), gain.exponent))
    if bias is not None:
        added = number(bias)
        made = sum_of(made, Unrounded(added.mantissa.view(shape), added.exponent))
    return made


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
def _layer_norm_backward(
    gradient: Any,
    x: Any,
    shape: Any,
    mean: Tensor,
    inverse: Tensor,
    weight: Any,
    bias: Any,
    mask: list[bool],
) -> tuple[Unrounded | None, ...]:
    g, a = number(gradient), number(x)
    gain = None if weight is None else number(weight)
    made = aten.native_layer_norm_backward(
        g.mantissa,
        a.mantissa,
        shape,
        *_of_data(mean, inverse, a.exponent),
        None if gain is None else gain.mantissa,
        None if bias is None else number(bias).mantissa,
        mask,
    )
    s = g.exponent - a.exponent + (0 if gain is None else gain.exponent)
    return _gradients(made, s, g.exponent, x.numel(), mask)


def _gradients(
    made: Any, s: Exponent, of_gradient: Exponent, size: int, mask: list[bool]
) -> tuple[Unrounded | None, ...]:
    """Of the input at the exponent s, and of gain and bias, each a sum over all places."""
    dx, *sums = made
    return (
        Unrounded(dx, s, "by size") if mask[0] else None,
        *(
            _summed(part, of_gradient, size) if wanted else None
            for part, wanted in zip(sums, mask[1:], strict=True)
        ),
    )


def _summed(part: Tensor, exponent: Exponent, size: int) -> Unrounded:
    half = half_log2(size // max(1, part.numel()))
    return close(Unrounded(times_power(part, -half), exponent + half))


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
) -> tuple[Unrounded | None, ...]:
    g, a = number(gradient), number(x)
    _, inverse = _of_data(inverse, inverse, a.exponent)
    normal = a.mantissa * inverse
    own, s = g.mantissa, g.exponent - a.exponent
    if weight is not None:
        gain = number(weight)
        own, s = own * gain.mantissa, s + gain.exponent
    dims = tuple(range(-len(shape), 0))
    dx = inverse * (own - normal * (own * normal).mean(dims, keepdim=True))
    dw = (g.mantissa * normal).sum(tuple(range(x.dim() - len(shape))))
    return _gradients((dx, dw), s, g.exponent, x.numel(), mask)


@rule(aten.native_group_norm)
def _group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, places: int, groups: int, eps: float
) -> tuple[Unrounded, Tensor, Tensor]:
    a = number(x)
    parts = a.mantissa.reshape(n, groups, -1)
    variance, mean = torch.var_mean(parts, 2, correction=0)
    inverse = _inverse_deviation(variance, eps, a.exponent)
    normal = ((parts - mean[..., None]) * inverse[..., None]).view(x.shape)
    shape = (1, -1, *(1 for _ in range(x.dim() - 2)))
    return _with_gain(normal, weight, bias, shape), *_saved(mean, inverse, a.exponent)


@rule(aten.native_group_norm_backward)
def _group_norm_backward(
    gradient: Any,
    x: Any,
    mean: Tensor,
    inverse: Tensor,
    weight: Any,
    n: int,
    channels: int,
    places: int,
    groups: int,
    mask: list[bool],
) -> tuple[Unrounded | None, ...]:
    g, a = number(gradient), number(x)
    gain = None if weight is None else number(weight)
    data = None if gain is None else gain.mantissa
    how = (*_of_data(mean, inverse, a.exponent), data, n, channels, places, groups, mask)
    made = aten.native_group_norm_backward(g.mantissa.contiguous(), a.mantissa.contiguous(), *how)
    s = g.exponent - a.exponent + (0 if gain is None else gain.exponent)
    return _gradients(made, s, g.exponent, x.numel(), mask)


# ------------------------------------------------------------------------------------ batch norms


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Unrounded, Tensor, Tensor]:
    """By the statistics of the batch, in units of its data, or by the running ones."""
    a = number(x)
    dims = [0, *range(2, x.dim())]
    shape = (1, -1, *(1 for _ in range(x.dim() - 2)))
    if training:
        variance, mean = torch.var_mean(a.mantissa, dims, correction=0)
        if running_mean is not None:
            n = x.numel() // x.shape[1]
            of_batch = Unrounded(mean, a.exponent)
            around = Unrounded(variance * (n / max(1, n - 1)), a.exponent * 2)
            running_mean.lerp_(of_batch.plain(), momentum)
            running_variance.lerp_(around.plain(), momentum)
    else:
        mean = Unrounded(number(running_mean).plain(), -a.exponent).plain()
        variance = Unrounded(number(running_variance).plain(), -a.exponent * 2).plain()
    inverse = _inverse_deviation(variance, eps, a.exponent)
    normal = (a.mantissa - mean.view(shape)) * inverse.view(shape)
    return _with_gain(normal, weight, bias, shape), *_saved(mean, inverse, a.exponent)


@rule(aten._native_batch_norm_legit.no_stats)
def _batch_norm_of_batch(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Unrounded, Tensor, Tensor]:
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps)


@rule(aten.native_batch_norm_backward)
def _batch_norm_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_variance: Any,
    mean: Tensor,
    inverse: Tensor,
    training: bool,
    eps: float,
    mask: list[bool],
) -> tuple[Unrounded | None, ...]:
    g, a = number(gradient), number(x)
    mean, inverse = _of_data(mean, inverse, a.exponent)
    shape = (1, -1, *(1 for _ in range(x.dim() - 2)))
    dims = [0, *range(2, x.dim())]
    normal = (a.mantissa - mean.view(shape)) * inverse.view(shape)
    dw = (g.mantissa * normal).sum(dims)
    db = g.mantissa.sum(dims)
    dx, s = g.mantissa, g.exponent - a.exponent
    if training:
        n = math.prod(x.shape[d] for d in dims)
        dx = dx - (db.view(shape) + normal * dw.view(shape)) / n
    dx = dx * inverse.view(shape)
    if weight is not None:
        gain = number(weight)
        dx, s = dx * gain.mantissa.view(shape), s + gain.exponent
    return _gradients((dx, dw, db), s, g.exponent, x.numel(), mask)
