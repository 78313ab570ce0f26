"""Rules of activations: data is multiplied by what the true number says, and the scale stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import largest, times_any_power
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled import is_scaled
from mcftensor.scaling.scaled_numbers import Unrounded, leveled, number, product_of

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


@rule(aten.hardswish)
def _hardswish(x: Any) -> Unrounded:
    a = number(x)
    return Unrounded(_gated(a.mantissa, (a.plain() + 3).clamp(0, 6) / 6), a.exponent)


@rule(aten.mish)
def _mish(x: Any) -> Unrounded:
    a = number(x)
    return Unrounded(_gated(a.mantissa, torch.tanh(aten.softplus(a.plain()))), a.exponent)


@rule(aten.glu)
def _glu(x: Any, dim: int = -1) -> Unrounded:
    a = number(x)
    own, gate = a.mantissa.chunk(2, dim)
    plain_gate = times_any_power(gate, a.exponent).to(torch.float32)
    return Unrounded(_gated(own, plain_gate.sigmoid()), a.exponent)


@rule(aten.glu_backward)
def _glu_backward(gradient: Any, x: Any, dim: int) -> Unrounded:
    """Of the half that is gated in proportion to the gradient, of the gate to its product with that
    half."""
    g, a = number(gradient), number(x)
    own, gate = a.mantissa.chunk(2, dim)
    open_by = times_any_power(gate, a.exponent).to(torch.float32).sigmoid()
    of_own = Unrounded(g.mantissa * open_by, g.exponent)
    slope = open_by * (1 - open_by)
    of_gate = Unrounded(g.mantissa * own * slope, g.exponent + a.exponent)
    s, (of_own, of_gate) = leveled([of_own, of_gate])
    return Unrounded(torch.cat([of_own.at(s), of_gate.at(s)], dim), s)


@rule(aten._prelu_kernel)
def _prelu(x: Any, slope: Any) -> Unrounded:
    a = number(x)
    s, (own, below) = leveled([a, product_of(a, number(slope))])
    return Unrounded(torch.where(a.mantissa > 0, own.at(s), below.at(s)), s)


@rule(aten._prelu_kernel_backward)
def _prelu_backward(gradient: Any, x: Any, slope: Any) -> tuple[Unrounded, Unrounded]:
    g, a = number(gradient), number(x)
    below = product_of(g, number(slope))
    s = largest(g.exponent, below.exponent)
    of_slope = torch.where(a.mantissa > 0, 0, g.mantissa * a.mantissa)
    return (
        Unrounded(torch.where(a.mantissa > 0, g.at(s), below.at(s)), s),
        Unrounded(of_slope, g.exponent + a.exponent),
    )


@rule(aten.hardtanh)
def _hardtanh(x: Any, least: float = -1.0, most: float = 1.0) -> Unrounded:
    """Data cut off where the numbers are."""
    a = number(x)
    ends = [
        times_any_power(torch.tensor(end), -a.exponent).to(torch.float32) for end in (least, most)
    ]
    return Unrounded(a.mantissa.clamp(*(end.to(a.mantissa.device) for end in ends)), a.exponent)


@rule(aten.elu)
def _elu(x: Any, alpha: float = 1, scale: float = 1, inner: float = 1) -> Unrounded:
    """Numbers above zero, and what tends to a constant below: at the scale of the numbers or 1."""
    a = number(x)
    below = Unrounded(torch.expm1(a.plain() * inner) * (alpha * scale), 0)
    s = largest(a.exponent, 0)
    return Unrounded(torch.where(a.mantissa > 0, a.at(s) * scale, below.at(s)), s)


# ------------------------------------------------- gradients: in proportion, by what is true of x


def _gradient_by(func: Any) -> Callable[..., Unrounded]:
    def backward(gradient: Any, *args: Any) -> Unrounded:
        g = number(gradient)
        plain = [number(x).plain() if is_scaled(x) else x for x in args]
        return Unrounded(func(g.mantissa, *plain), g.exponent)

    return backward


for _name in (
    "elu", "hardsigmoid", "hardswish", "hardtanh", "log_sigmoid", "mish", "sigmoid", "silu",
    "softplus", "tanh",
):  # fmt: skip
    _backward = getattr(aten, f"{_name}_backward").default
    rule(_backward)(_gradient_by(_backward))


# ---------------------------------------------------------- of numbers: computed in float32, near 1


def _of_the_number(func: Any, placing: Any) -> Any:
    def compute(x: Any, *how: float) -> Unrounded:
        return Unrounded(func(number(x).plain(), *how), 0, placing)

    return compute


for _operator in (
    aten.tanh,
    aten.sigmoid,
    aten.hardsigmoid,
    aten.sin,
    aten.cos,
    aten.erf,
    aten.atan,
):
    rule(_operator)(_of_the_number(_operator, "by rule"))
for _operator in (aten.exp, aten.log, aten.log1p, aten.expm1, aten.softplus):
    rule(_operator)(_of_the_number(_operator, "by size"))


@rule(aten.log_sigmoid_forward)
def _log_sigmoid(x: Any) -> tuple[Unrounded, Tensor]:
    made, kept = aten.log_sigmoid_forward(number(x).plain())
    return Unrounded(made, 0, "by size"), kept
