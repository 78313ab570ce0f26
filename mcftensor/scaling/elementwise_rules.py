"""Rules of elementwise arithmetic, activations, losses of pairs of numbers, and fused steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels.columns import on_device
from mcftensor.passes.operators import OPERATORS, Operator
from mcftensor.passes.optimizer_steps import RULES as STEPS
from mcftensor.passes.optimizer_steps import Rule
from mcftensor.scaling.exponents import known, largest, times_power
from mcftensor.scaling.rule_table import aten, homogeneous, rule
from mcftensor.scaling.scaled import is_scaled
from mcftensor.scaling.scaled_numbers import (
    Placing,
    Unrounded,
    aligned,
    number,
    product_of,
    sum_of,
    where_of,
    write_to,
)

# ------------------------------------------------------------------------------------- arithmetic


def _fma(a: Any, b: Any, x: Any, value: Any = 1) -> Unrounded:
    """x + value · a · b. Sums of squares, as second moments are, have twice the range, and are
    placed high."""
    total = sum_of(x, product_of(product_of(a, b), value))
    return replace(total, placing="high" if a is b else "by rule")


def _quotient(x: Any, y: Any) -> Unrounded:
    """Divide data and scales. Quotients of tensors lie far from 1, and are placed by size."""
    a, b = number(x), number(y)
    placing: Placing = "by size" if isinstance(y, Tensor) and y.dim() else "by rule"
    return Unrounded(a.mantissa / b.mantissa, a.exponent - b.exponent, placing)


def _lerp(x: Any, end: Any, weight: Any) -> Unrounded:
    """(1 − w) · x + w · end, by the rule of sums, as in first moments."""
    w = float(weight) if isinstance(weight, Tensor) and not weight.dim() else weight
    if isinstance(w, Tensor):
        return sum_of(x, product_of(sum_of(end, product_of(x, -1)), w))
    return sum_of(product_of(x, 1 - w), product_of(end, w))


def _sqrt(x: Any) -> Unrounded:
    """√data at half the exponent; for odd exponents, of twice the data."""
    a = number(x)
    return Unrounded(times_power(a.mantissa, a.exponent & 1).sqrt(), a.exponent >> 1)


# By the names of formulas in `arithmetic/formulas.py`, which `passes/operators.py` uses.
_FORMULAS: dict[str, Callable[..., Unrounded]] = {
    "add": sum_of,
    "sub": lambda x, y: sum_of(x, product_of(y, -1)),
    "fma": _fma,
    "fnma": lambda a, b, x: _fma(a, -b, x),
    "addcmul": lambda x, a, b, value: _fma(a, b, x, value),
    "addcdiv": lambda x, a, b, value: sum_of(x, product_of(_quotient(a, b), value)),
    "mul": product_of,
    "div": _quotient,
    "square": lambda x: product_of(x, x),
    "sqrt": _sqrt,
    "lerp": _lerp,
}


def _by_formula(row: Operator, *args: Any, **kwargs: Any) -> Unrounded:
    name, operands = row.formula(*args, **kwargs)
    return _FORMULAS[name](*operands)


for _row in OPERATORS.values():
    _packet = getattr(aten, _row.name)
    rule(
        *(getattr(_packet, x) for x in _packet.overloads() if "out" not in x and "mode" not in x),
        keeps_tails=True,
    )(functools.partial(_by_formula, _row))

homogeneous(aten.neg, aten.abs, keeps_tails=True)
homogeneous(aten.sign, aten.sgn, degree=0)
homogeneous(aten.reciprocal, degree=-1, placing="by size")
# As Adam with amsgrad needs them.
homogeneous(
    *(aten.maximum, aten.minimum, aten.clamp_min.Tensor, aten.clamp_max.Tensor),
    jointly=True,
    keeps_tails=True,
)


@rule(aten.rsqrt)
def _rsqrt(x: Any) -> Unrounded:
    root = _sqrt(x)
    return Unrounded(root.mantissa.reciprocal(), -root.exponent, "by size")


@rule(aten.pow.Tensor_Scalar)
def _pow(x: Any, exponent: float) -> Unrounded:
    """Integer powers from 1 to 4 multiply the exponent; others are computed in float32."""
    a = number(x)
    if exponent in (1, 2, 3, 4):
        return Unrounded(a.mantissa.pow(exponent), a.exponent * int(exponent))
    return Unrounded(a.plain().pow(exponent), 0, "by size")


@rule(aten.clamp.default, aten.clamp_min.default)
def _clamp(x: Any, min: float | None = None, max: float | None = None) -> Unrounded:
    """Clamp the data at the limits in its units, such as the factor of `clip_grad_norm_`."""
    a = number(x)

    def limit(y: float | None) -> Tensor | None:
        if y is None:
            return None
        own = Unrounded(torch.tensor(y, device="cpu"), -a.exponent).plain()
        return on_device(own, a.mantissa.device)

    return Unrounded(a.mantissa.clamp(limit(min), limit(max)), a.exponent, "by size")


rule(aten.clamp_max.default)(lambda x, max: _clamp(x, None, max))
rule(aten.hardtanh)(lambda x, min=-1.0, max=1.0: _clamp(x, min, max))

# ------------------------------------------------------------------------------------- functions

homogeneous(aten.relu, aten.leaky_relu, aten.native_dropout)
homogeneous(
    *(aten.tanh, aten.sigmoid, aten.hardsigmoid, aten.sin, aten.cos, aten.erf, aten.atan),
    degree=None,
)
homogeneous(
    *(aten.exp, aten.log, aten.log1p, aten.expm1, aten.softplus, aten.erfc),
    *(aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy),
    # Its backward pass consists of operations with rules.
    aten.binary_cross_entropy_with_logits,
    degree=None,
    placing="by size",
)


@rule(aten.threshold_backward, aten.leaky_relu_backward, takes_operator=True)
def _relu_backward(operator: Any, gradient: Any, x: Any, *how: Any) -> Unrounded:
    """Of x the sign counts, which its mantissa has; for another threshold its value."""
    g, a = number(gradient), number(x)
    is_by_sign = how == (0,) or operator is not aten.threshold_backward.default
    made = operator(g.mantissa, a.mantissa if is_by_sign else a.plain(), *how)
    return Unrounded(made, g.exponent)


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


def _by_gate(gate: Callable[..., Tensor], x: Any, **how: Any) -> Unrounded:
    """x · gate(x), with a gate in [0, 1]: the scale stays."""
    a = number(x)
    return Unrounded(_gated(a.mantissa, gate(a.plain(), **how)), a.exponent)


_GATES: dict[Any, Callable[..., Tensor]] = {
    aten.gelu: _gate_of_gelu,
    aten.silu: torch.sigmoid,
    aten.hardswish: lambda x: (x + 3).clamp(0, 6) / 6,
    aten.mish: lambda x: torch.tanh(aten.softplus(x)),
}
for _packet, _gate in _GATES.items():
    rule(_packet)(functools.partial(_by_gate, _gate))


@rule(aten.gelu_backward)
def _gelu_backward(gradient: Any, x: Any, approximate: str = "none") -> Unrounded:
    g, a = number(gradient), number(x).plain()
    if approximate == "tanh":
        made = aten.gelu_backward(g.mantissa, a, approximate=approximate)
    else:
        density = torch.exp(a.square() / -2) / math.sqrt(2 * math.pi)
        made = g.mantissa * (_ndtr(a) + _gated(a, density))
    return Unrounded(made, g.exponent)


@rule(aten.glu)
def _glu(x: Any, dim: int = -1) -> Unrounded:
    a = number(x)
    own, gate = a.mantissa.chunk(2, dim)
    return Unrounded(_gated(own, Unrounded(gate, a.exponent).plain().sigmoid()), a.exponent)


@rule(aten.glu_backward)
def _glu_backward(gradient: Any, x: Any, dim: int) -> Unrounded:
    """The gradient of the gate is proportional to the first half too."""
    g, a = number(gradient), number(x)
    own, gate = a.mantissa.chunk(2, dim)
    opened = Unrounded(gate, a.exponent).plain().sigmoid()
    slope = g.mantissa * own * (opened * (1 - opened))
    s, parts = aligned(
        [Unrounded(g.mantissa * opened, g.exponent), Unrounded(slope, g.exponent + a.exponent)]
    )
    return Unrounded(torch.cat([y.at(s) for y in parts], dim), s)


@rule(aten.elu)
def _elu(x: Any, alpha: float = 1, scale: float = 1, inner: float = 1) -> Unrounded:
    """Numbers above zero keep their scale; the constant limit below has the scale 1."""
    a = number(x)
    below = Unrounded(torch.expm1(a.plain() * inner) * (alpha * scale), 0)
    return where_of(a.mantissa > 0, product_of(a, scale), below)


@rule(aten._prelu_kernel)
def _prelu(x: Any, slope: Any) -> Unrounded:
    return where_of(number(x).mantissa > 0, x, product_of(x, slope))


@rule(aten._prelu_kernel_backward)
def _prelu_backward(gradient: Any, x: Any, slope: Any) -> tuple[Unrounded, Unrounded]:
    above = number(x).mantissa > 0
    of_x = where_of(above, gradient, product_of(gradient, slope))
    return of_x, where_of(above, 0, product_of(gradient, x))


@rule(aten.log_sigmoid_forward)
def _log_sigmoid(x: Any) -> tuple[Unrounded, Tensor]:
    made, kept = aten.log_sigmoid_forward(number(x).plain())
    return Unrounded(made, 0, "by size"), kept


@rule(aten.mse_loss)
def _mse_loss(x: Any, target: Any, reduction: int = 1) -> Unrounded:
    s, (a, b) = aligned([x, target])
    made = aten.mse_loss(a.at(s), b.at(s), reduction)
    return Unrounded(made, s * 2, "by size" if reduction else "by rule")


@rule(aten.mse_loss_backward)
def _mse_loss_backward(gradient: Any, x: Any, target: Any, reduction: int) -> Unrounded:
    g, (s, (a, b)) = number(gradient), aligned([x, target])
    made = aten.mse_loss_backward(g.mantissa, a.at(s), b.at(s), reduction)
    return Unrounded(made, g.exponent + s, "by size")


# -------------------------------------------------------------------------- fused optimizer steps


def _fused(step: Rule, func: Any, *args: Any, **kwargs: Any) -> None:
    """Update one tensor after the other.

    The step is computed in float64, which holds the squares of gradients of any scale in use. Each
    result is rounded to float32 and then to its data; squares are placed high.
    """
    names = ("params", "grads", *step.states)  # step counts follow
    for i in range(len(args[0])):
        own = [x[i : i + 1] if isinstance(x, list | tuple) else x for x in args]
        wide = [[y.to(torch.float64, copy=True) for y in x] for x in own[: len(names)]]
        func(*wide, *own[len(names) :], **kwargs)
        for name, targets, results in zip(names, own, wide, strict=False):
            for target, made in zip(targets, results, strict=True):
                if name != "grads":
                    _write(target, made, "high" if name in step.squares else "by rule")


def _write(target: Tensor, made: Tensor, placing: Placing) -> None:
    if is_scaled(target):
        measured = number(made)
        exponent = largest(known(target.exponent), measured.exponent)
        write_to(target, Unrounded(measured.at(exponent), exponent, placing))
    else:
        target.copy_(made)


for _name, _step in STEPS.items():
    rule(getattr(aten, _name), takes_operator=True)(functools.partial(_fused, _step))
