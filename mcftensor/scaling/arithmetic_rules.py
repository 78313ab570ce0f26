"""Rules of arithmetic on elements: + − · /, and what optimizers make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import times_power
from mcftensor.scaling.rule_shapes import on_data
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Placing, Unrounded, number, product_of, sum_of

on_data(aten.neg, aten.abs, keeps_tails=True)


@rule(aten.add, keeps_tails=True)
def _add(x: Any, y: Any, alpha: float = 1) -> Unrounded:
    """Residual connections, weight decay, sums of gradients."""
    return sum_of(number(x), _multiple(number(y), alpha))


@rule(aten.sub, keeps_tails=True)
def _sub(x: Any, y: Any, alpha: float = 1) -> Unrounded:
    return sum_of(number(x), _multiple(number(y), -alpha))


@rule(aten.rsub, keeps_tails=True)
def _rsub(x: Any, y: Any, alpha: float = 1) -> Unrounded:
    return sum_of(number(y), _multiple(number(x), -alpha))


def _multiple(x: Unrounded, alpha: float) -> Unrounded:
    return x if alpha == 1 else product_of(x, number(alpha))


@rule(aten.mul, keeps_tails=True)
def _mul(x: Any, y: Any) -> Unrounded:
    return product_of(number(x), number(y))


@rule(aten.div.Tensor, aten.div.Scalar, keeps_tails=True)
def _div(x: Any, y: Any) -> Unrounded:
    """The scales divide; between tensors quotients lie far from 1, and go by their size."""
    a, b = number(x), number(y)
    placing: Placing = "by size" if isinstance(y, Tensor) and y.dim() else "by rule"
    return Unrounded(a.mantissa / b.mantissa, a.exponent - b.exponent, placing)


@rule(aten.sign, aten.sgn)
def _sign(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.sign(), 0)


@rule(aten.sqrt, keeps_tails=True)
def _sqrt(x: Any) -> Unrounded:
    """√data at half the exponent; where that is odd, of twice the data."""
    a = number(x)
    return Unrounded(times_power(a.mantissa, a.exponent & 1).sqrt(), a.exponent >> 1)


@rule(aten.rsqrt)
def _rsqrt(x: Any) -> Unrounded:
    root = _sqrt(x)
    return Unrounded(root.mantissa.reciprocal(), -root.exponent, "by size")


@rule(aten.reciprocal)
def _reciprocal(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.reciprocal(), -x.exponent, "by size")


@rule(aten.pow.Tensor_Scalar)
def _pow(x: Any, exponent: float) -> Unrounded:
    """Whole powers multiply the exponent; others go through float32."""
    if exponent == int(exponent) and 0 < exponent <= 4:
        return Unrounded(number(x).mantissa.pow(exponent), x.exponent * int(exponent))
    return Unrounded(number(x).plain().pow(exponent), 0, "by size")


@rule(aten.lerp, keeps_tails=True)
def _lerp(x: Any, end: Any, weight: Any) -> Unrounded:
    """First moments: (1 − w) · x + w · end, by the rule of a sum."""
    w = float(weight) if isinstance(weight, Tensor) and not weight.dim() else weight
    if isinstance(w, Tensor):
        difference = sum_of(number(end), _multiple(number(x), -1))
        return sum_of(number(x), product_of(difference, number(w)))
    return sum_of(_multiple(number(x), 1 - w), _multiple(number(end), w))


@rule(aten.addcmul, keeps_tails=True)
def _addcmul(x: Any, a: Any, b: Any, value: float = 1) -> Unrounded:
    """Second moments: x + value · a · b; sums of squares, with twice the range, are placed high."""
    total = sum_of(number(x), _multiple(product_of(number(a), number(b)), value))
    return Unrounded(total.mantissa, total.exponent, "high" if a is b else "by rule")


@rule(aten.addcdiv, keeps_tails=True)
def _addcdiv(x: Any, a: Any, b: Any, value: float = 1) -> Unrounded:
    """The updates of Adam: x + value · a / b."""
    n, d = number(a), number(b)
    quotient = Unrounded(n.mantissa / d.mantissa, n.exponent - d.exponent)
    return sum_of(number(x), _multiple(quotient, value))


def _larger_or_smaller(choose: Any, *operators: Any) -> None:
    @rule(*operators, keeps_tails=True)
    def choice(x: Any, y: Any) -> Unrounded:
        """Both at the larger exponent, as Adam with amsgrad needs it."""
        a, b = number(x), number(y)
        s = sum_of(a, b).exponent
        return Unrounded(choose(a.at(s), b.at(s)), s)


_larger_or_smaller(torch.maximum, aten.maximum, aten.clamp_min.Tensor)
_larger_or_smaller(torch.minimum, aten.minimum, aten.clamp_max.Tensor)


@rule(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
def _clamp(x: Any, min: float | None = None, max: float | None = None) -> Unrounded:
    """By way of float32: the factor of `clip_grad_norm_` is at most 1."""
    clamped = number(x).plain().clamp(min, max)
    measured = number(clamped)
    return Unrounded(measured.mantissa, measured.exponent, "by size")
