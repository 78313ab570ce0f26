"""Rules of elementwise arithmetic: the operators of `passes/operators.py`, and a few others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.passes.operators import OPERATORS, Operator
from mcftensor.scaling.exponents import times_power
from mcftensor.scaling.rule_shapes import on_data
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Placing, Unrounded, number, product_of, sum_of

on_data(aten.neg, aten.abs, keeps_tails=True)


def _times(x: Unrounded, factor: Any) -> Unrounded:
    is_one = not isinstance(factor, Tensor) and factor == 1
    return x if is_one else product_of(x, number(factor))


def _fma(a: Any, b: Any, x: Any, value: Any = 1) -> Unrounded:
    """x + value · a · b. Sums of squares, as second moments are, have twice the range, and are
    placed high."""
    total = sum_of(number(x), _times(_times(number(a), b), value))
    return Unrounded(total.mantissa, total.exponent, "high" if a is b else "by rule")


def _quotient(x: Any, y: Any, placing: Placing = "by rule") -> Unrounded:
    a, b = number(x), number(y)
    return Unrounded(a.mantissa / b.mantissa, a.exponent - b.exponent, placing)


def _div(x: Any, y: Any) -> Unrounded:
    """Divide data and scales. Quotients of tensors lie far from 1, and are placed by size."""
    return _quotient(x, y, "by size" if isinstance(y, Tensor) and y.dim() else "by rule")


def _lerp(x: Any, end: Any, weight: Any) -> Unrounded:
    """(1 − w) · x + w · end, by the rule of sums, as in first moments."""
    w = float(weight) if isinstance(weight, Tensor) and not weight.dim() else weight
    if isinstance(w, Tensor):
        difference = sum_of(number(end), _times(number(x), -1))
        return sum_of(number(x), product_of(difference, number(w)))
    return sum_of(_times(number(x), 1 - w), _times(number(end), w))


def _sqrt(x: Any) -> Unrounded:
    """√data at half the exponent; for odd exponents, of twice the data."""
    a = number(x)
    return Unrounded(times_power(a.mantissa, a.exponent & 1).sqrt(), a.exponent >> 1)


# By the names of formulas in `arithmetic/formulas.py`, which `passes/operators.py` uses.
_FORMULAS: dict[str, Callable[..., Unrounded]] = {
    "add": lambda x, y: sum_of(number(x), number(y)),
    "sub": lambda x, y: sum_of(number(x), _times(number(y), -1)),
    "fma": _fma,
    "fnma": lambda a, b, x: _fma(a, -b, x),
    "addcmul": lambda x, a, b, value: _fma(a, b, x, value),
    "addcdiv": lambda x, a, b, value: sum_of(number(x), _times(_quotient(a, b), value)),
    "mul": lambda x, y: product_of(number(x), number(y)),
    "div": _div,
    "square": lambda x: product_of(number(x), number(x)),
    "sqrt": _sqrt,
    "lerp": _lerp,
}


def _register(operator: Operator) -> None:
    packet = getattr(aten, operator.name)
    overloads = [
        getattr(packet, x) for x in packet.overloads() if "out" not in x and "mode" not in x
    ]

    @rule(*overloads, keeps_tails=True)
    def compute(*args: Any, **kwargs: Any) -> Unrounded:
        name, operands = operator.formula(*args, **kwargs)
        return _FORMULAS[name](*operands)


for _operator in OPERATORS.values():
    _register(_operator)


@rule(aten.sign, aten.sgn)
def _sign(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.sign(), 0)


@rule(aten.rsqrt)
def _rsqrt(x: Any) -> Unrounded:
    root = _sqrt(x)
    return Unrounded(root.mantissa.reciprocal(), -root.exponent, "by size")


@rule(aten.reciprocal)
def _reciprocal(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.reciprocal(), -x.exponent, "by size")


@rule(aten.pow.Tensor_Scalar)
def _pow(x: Any, exponent: float) -> Unrounded:
    """Integer powers from 1 to 4 multiply the exponent; others are computed in float32."""
    if exponent == int(exponent) and 0 < exponent <= 4:
        return Unrounded(number(x).mantissa.pow(exponent), x.exponent * int(exponent))
    return Unrounded(number(x).plain().pow(exponent), 0, "by size")


def _larger_or_smaller(choose: Any, *operators: Any) -> None:
    @rule(*operators, keeps_tails=True)
    def choice(x: Any, y: Any) -> Unrounded:
        """Both operands at the larger exponent, as Adam with amsgrad needs them."""
        a, b = number(x), number(y)
        s = sum_of(a, b).exponent
        return Unrounded(choose(a.at(s), b.at(s)), s)


_larger_or_smaller(torch.maximum, aten.maximum, aten.clamp_min.Tensor)
_larger_or_smaller(torch.minimum, aten.minimum, aten.clamp_max.Tensor)


@rule(aten.clamp.default, aten.clamp_min.default)
def _clamp(x: Any, min: float | None = None, max: float | None = None) -> Unrounded:
    """Clamp in float32, such as the factor of `clip_grad_norm_`, which is at most 1."""
    clamped = number(x).plain().clamp(min, max)
    measured = number(clamped)
    return Unrounded(measured.mantissa, measured.exponent, "by size")


@rule(aten.clamp_max.default)
def _clamp_max(x: Any, max: float) -> Unrounded:
    return _clamp(x, None, max)
