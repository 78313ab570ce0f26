"""Rules of activations: the data is multiplied by a factor of the true number; the scale stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels.columns import on_device
from mcftensor.scaling.exponents import largest, times_any_power
from mcftensor.scaling.rule_shapes import by_gradient, in_float32, on_data
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, leveled, number, product_of

on_data(aten.relu, aten.leaky_relu, aten.native_dropout)
in_float32(
    *(aten.tanh, aten.sigmoid, aten.hardsigmoid, aten.sin, aten.cos, aten.erf, aten.atan),
    placing="by rule",
)
in_float32(
    *(aten.exp, aten.log, aten.log1p, aten.expm1, aten.softplus, aten.erfc),
    placing="by size",
)
by_gradient(
    aten.native_dropout_backward,
    aten.elu_backward,
    aten.hardsigmoid_backward,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.log_sigmoid_backward,
    aten.mish_backward,
    aten.sigmoid_backward,
    aten.silu_backward,
    aten.softplus_backward,
    aten.tanh_backward,
)


@rule(aten.threshold_backward)
def _relu_backward(gradient: Any, x: Any, threshold: float) -> Unrounded:
    g = number(gradient)
    above = number(x).mantissa > 0 if threshold == 0 else number(x).plain() > threshold
    return Unrounded(torch.where(above, g.mantissa, 0), g.exponent)


@rule(aten.leaky_relu_backward)
def _leaky_relu_backward(gradient: Any, x: Any, *how: Any) -> Unrounded:
    g = number(gradient)
    return Unrounded(aten.leaky_relu_backward(g.mantissa, number(x).mantissa, *how), g.exponent)


# ------------------------------------------------------------------ x · g(x), with g in [0, 1]


def _gated(mantissa: Tensor, gate: Tensor) -> Tensor:
    """mantissa * gate; a gate of 0 gives 0 for an infinity too."""
    return torch.where(gate == 0, 0, mantissa * gate)


def _ndtr(x: Tensor) -> Tensor:
    """The normal distribution with its lower tail, where PyTorch's 1 + erf cancels."""
    return torch.special.erfc(x * -(0.5**0.5)) / 2


def _gate_of_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())
    return _ndtr(x)


def _by_gate(operator: Any, gate: Callable[..., Tensor]) -> None:
    @rule(operator)
    def activation(x: Any, **how: Any) -> Unrounded:
        a = number(x)
        return Unrounded(_gated(a.mantissa, gate(a.plain(), **how)), a.exponent)


_by_gate(aten.gelu, _gate_of_gelu)


@rule(aten.gelu_backward)
def _gelu_backward(gradient: Any, x: Any, approximate: str = "none") -> Unrounded:
    g, a = number(gradient), number(x).plain()
    if approximate == "tanh":
        made = aten.gelu_backward(g.mantissa, a, approximate=approximate)
    else:
        density = torch.exp(a.square() / -2) / math.sqrt(2 * math.pi)
        made = g.mantissa * (_ndtr(a) + _gated(a, density))
    return Unrounded(made, g.exponent)


_by_gate(aten.silu, torch.sigmoid)
_by_gate(aten.hardswish, lambda x: (x + 3).clamp(0, 6) / 6)
_by_gate(aten.mish, lambda x: torch.tanh(aten.softplus(x)))


def _halves(x: Any, dim: int) -> tuple[Unrounded, Unrounded]:
    a = number(x)
    own, gate = a.mantissa.chunk(2, dim)
    return Unrounded(own, a.exponent), Unrounded(gate, a.exponent)


@rule(aten.glu)
def _glu(x: Any, dim: int = -1) -> Unrounded:
    own, gate = _halves(x, dim)
    return Unrounded(_gated(own.mantissa, gate.plain().sigmoid()), own.exponent)


@rule(aten.glu_backward)
def _glu_backward(gradient: Any, x: Any, dim: int) -> Unrounded:
    """Return the gradients of both halves.

    The gradient of the first half is proportional to the output's. The gradient of the gate is
    proportional to its product with the first half.
    """
    g, (own, gate) = number(gradient), _halves(x, dim)
    open_by = gate.plain().sigmoid()
    of_own = Unrounded(g.mantissa * open_by, g.exponent)
    slope = open_by * (1 - open_by)
    of_gate = Unrounded(g.mantissa * own.mantissa * slope, g.exponent + own.exponent)
    s, (of_own, of_gate) = leveled([of_own, of_gate])
    return Unrounded(torch.cat([of_own.at(s), of_gate.at(s)], dim), s)


# --------------------------------------------------------------- activations with another scale


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
    of_x = torch.where(a.mantissa > 0, g.at(s), below.at(s))
    return Unrounded(of_x, s), Unrounded(of_slope, g.exponent + a.exponent)


@rule(aten.log_sigmoid_forward)
def _log_sigmoid(x: Any) -> tuple[Unrounded, Tensor]:
    made, kept = aten.log_sigmoid_forward(number(x).plain())
    return Unrounded(made, 0, "by size"), kept


@rule(aten.hardtanh)
def _hardtanh(x: Any, least: float = -1.0, most: float = 1.0) -> Unrounded:
    """Clamp the data at the limits, divided by the scale."""
    a = number(x)
    ends = [
        times_any_power(torch.tensor(end, device="cpu"), -a.exponent).to(torch.float32)
        for end in (least, most)
    ]
    return Unrounded(
        a.mantissa.clamp(*(on_device(end, a.mantissa.device) for end in ends)), a.exponent
    )


@rule(aten.elu)
def _elu(x: Any, alpha: float = 1, scale: float = 1, inner: float = 1) -> Unrounded:
    """Numbers above zero, and a constant limit below, at the larger of the scales x and 1."""
    a = number(x)
    below = Unrounded(torch.expm1(a.plain() * inner) * (alpha * scale), 0)
    s = largest(a.exponent, 0)
    return Unrounded(torch.where(a.mantissa > 0, a.at(s) * scale, below.at(s)), s)
