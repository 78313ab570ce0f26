"""Rules of elementwise losses: computed in float32, and balanced in backward."""

from __future__ import annotations

from typing import Any

from mcftensor.scaling.rule_shapes import by_gradient, in_float32
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, number, product_of, sum_of

in_float32(
    aten.smooth_l1_loss,
    aten.huber_loss,
    aten.binary_cross_entropy,
    # Its backward pass consists of operations with rules.
    aten.binary_cross_entropy_with_logits,
    placing="by size",
)
by_gradient(
    aten.smooth_l1_loss_backward,
    aten.huber_loss_backward,
    aten.binary_cross_entropy_backward,
    placing="by size",
)


@rule(aten.mse_loss)
def _mse_loss(x: Any, target: Any, reduction: int = 1) -> Unrounded:
    difference = _difference(x, target)
    square = product_of(difference, difference)
    if reduction == 0:
        return square
    made = square.mantissa.mean() if reduction == 1 else square.mantissa.sum()
    return Unrounded(made, square.exponent, "by size")


@rule(aten.mse_loss_backward)
def _mse_loss_backward(gradient: Any, x: Any, target: Any, reduction: int) -> Unrounded:
    factor = 2.0 / x.numel() if reduction == 1 else 2.0
    scaled = product_of(_difference(x, target), number(factor))
    made = product_of(scaled, number(gradient))
    return Unrounded(made.mantissa, made.exponent, "by size")


def _difference(x: Any, y: Any) -> Unrounded:
    return sum_of(number(x), product_of(number(y), number(-1)))
