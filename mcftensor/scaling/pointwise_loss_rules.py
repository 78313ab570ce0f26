"""Rules of losses that compare number with number: in float32, and balanced in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled import is_scaled
from mcftensor.scaling.scaled_numbers import Unrounded, number, product_of, sum_of


@rule(aten.mse_loss)
def _mse_loss(x: Any, target: Any, reduction: int = 1) -> Unrounded:
    difference = sum_of(number(x), product_of(number(target), number(-1)))
    square = product_of(difference, difference)
    if reduction == 0:
        return square
    made = square.mantissa.mean() if reduction == 1 else square.mantissa.sum()
    return Unrounded(made, square.exponent, "by size")


@rule(aten.mse_loss_backward)
def _mse_loss_backward(gradient: Any, x: Any, target: Any, reduction: int) -> Unrounded:
    difference = sum_of(number(x), product_of(number(target), number(-1)))
    factor = 2.0 / x.numel() if reduction == 1 else 2.0
    made = product_of(product_of(difference, number(factor)), number(gradient))
    return Unrounded(made.mantissa, made.exponent, "by size")


def _loss_by(func: Any) -> Callable[..., Unrounded]:
    """Where a loss bends says a number of its own, so that it is taken of true numbers."""

    def loss(*args: Any) -> Unrounded:
        return Unrounded(func(*map(_plain, args)), 0, "by size")

    return loss


def _gradient_by(func: Any) -> Callable[..., Unrounded]:
    def backward(gradient: Any, *args: Any) -> Unrounded:
        """In proportion to the gradient."""
        g = number(gradient)
        return Unrounded(func(g.mantissa, *map(_plain, args)), g.exponent, "by size")

    return backward


def _plain(x: Any) -> Any:
    if is_scaled(x):
        return number(x).plain()
    return x.to(torch.float32) if isinstance(x, Tensor) else x


for _name in ("smooth_l1_loss", "huber_loss", "binary_cross_entropy"):
    _forward = getattr(aten, _name).default
    _backward = getattr(aten, f"{_name}_backward").default
    rule(_forward)(_loss_by(_forward))
    rule(_backward)(_gradient_by(_backward))
# Its backward pass is made of operations that have rules.
rule(aten.binary_cross_entropy_with_logits)(_loss_by(aten.binary_cross_entropy_with_logits))
