"""Rules of activations: data is multiplied by what the true number says, and the scale stays."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.ruling import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, number

# ------------------------------------------------------------- of gates: x · g(x), with g in [0, 1]


@rule(aten.relu)
def _relu(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.relu(), x.exponent)


@rule(aten.threshold_backward)
def _relu_backward(gradient: Any, x: Any, threshold: float) -> Unrounded:
    g = number(gradient)
    above = number(x).mantissa > 0 if threshold == 0 else number(x).plain() > threshold
    return Unrounded(torch.where(above, g.mantissa, 0), g.exponent)


@rule(aten.leaky_relu)
def _leaky_relu(x: Any, slope: float = 0.01) -> Unrounded:
    return Unrounded(aten.leaky_relu(number(x).mantissa, slope), x.exponent)


@rule(aten.leaky_relu_backward)
def _leaky_relu_backward(gradient: Any, x: Any, slope: float, is_result: bool) -> Unrounded:
    g = number(gradient)
    made = aten.leaky_relu_backward(g.mantissa, number(x).mantissa, slope, is_result)
    return Unrounded(made, g.exponent)


@rule(aten.gelu)
def _gelu(x: Any, approximate: str = "none") -> Unrounded:
    a = number(x)
    true = a.plain()
    if approximate == "tanh":
        inner = (2 / math.pi) ** 0.5 * (true + 0.044715 * true**3)
        gate = 0.5 * (1 + inner.tanh())
    else:
        gate = torch.special.ndtr(true)
    return Unrounded(_gated(a.mantissa, gate), a.exponent)


@rule(aten.gelu_backward)
def _gelu_backward(gradient: Any, x: Any, approximate: str = "none") -> Unrounded:
    g = number(gradient)
    made = aten.gelu_backward(g.mantissa, number(x).plain(), approximate=approximate)
    return Unrounded(made, g.exponent)


@rule(aten.silu)
def _silu(x: Any) -> Unrounded:
    a = number(x)
    return Unrounded(_gated(a.mantissa, a.plain().sigmoid()), a.exponent)


@rule(aten.silu_backward)
def _silu_backward(gradient: Any, x: Any) -> Unrounded:
    g = number(gradient)
    return Unrounded(aten.silu_backward(g.mantissa, number(x).plain()), g.exponent)


def _gated(mantissa: Tensor, gate: Tensor) -> Tensor:
    """Data times gate, of which a closed one wins against an infinity."""
    return torch.where(gate == 0, 0, mantissa * gate)


@rule(aten.native_dropout)
def _dropout(x: Any, p: float, train: bool | None = True) -> tuple[Unrounded, Tensor]:
    kept, mask = aten.native_dropout(number(x).mantissa, p, train)
    return Unrounded(kept, x.exponent), mask


@rule(aten.native_dropout_backward)
def _dropout_backward(gradient: Any, mask: Tensor, scale: float) -> Unrounded:
    return Unrounded(number(gradient).mantissa * mask * scale, gradient.exponent)


# ---------------------------------------------------------- of numbers: computed in float32, near 1


def _of_the_number(func: Any, placing: Any) -> Any:
    def compute(x: Any) -> Unrounded:
        return Unrounded(func(number(x).plain()), 0, placing)

    return compute


for _operator in (aten.tanh, aten.sigmoid, aten.sin, aten.cos, aten.erf):
    rule(_operator)(_of_the_number(_operator, "by rule"))
for _operator in (aten.exp, aten.log, aten.log1p, aten.expm1, aten.softplus):
    rule(_operator)(_of_the_number(_operator, "by size"))


@rule(aten.tanh_backward)
def _tanh_backward(gradient: Any, result: Any) -> Unrounded:
    g = number(gradient)
    return Unrounded(aten.tanh_backward(g.mantissa, number(result).plain()), g.exponent)


@rule(aten.sigmoid_backward)
def _sigmoid_backward(gradient: Any, result: Any) -> Unrounded:
    g = number(gradient)
    return Unrounded(aten.sigmoid_backward(g.mantissa, number(result).plain()), g.exponent)
