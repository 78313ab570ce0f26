"""Arithmetic with a kernel of its own: out of place, in place and with `out=`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor import expansion
from mcftensor.dispatch import sparse
from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import (
    Number,
    common_format,
    common_role,
    computes_plainly,
    expansions,
    leading,
    store,
    terms,
)
from mcftensor.dispatch.table import TABLE, register_forms
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten

# An operation of expansion.apply and its operands, each a list of terms.
Plan = tuple[str, Sequence[Sequence[Tensor]]]


def _negated(operand: Any) -> list[Tensor]:
    return [-term for term in terms(operand)]


def _is_one(x: Any) -> bool:
    return isinstance(x, Number) and x == 1


def _add(x: Any, y: Any, alpha: Any = 1) -> Plan:
    if _is_one(alpha):
        return "add", (terms(x), terms(y))
    return "fma", (terms(y), terms(alpha), terms(x))


def _sub(x: Any, y: Any, alpha: Any = 1) -> Plan:
    if _is_one(alpha):
        return "add", (terms(x), _negated(y))
    return "fma", (terms(y), _negated(alpha), terms(x))


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Plan:
    return _sub(y, x, alpha)


def _mul(x: Any, y: Any) -> Plan:
    return "mul", (terms(x), terms(y))


def _div(x: Any, y: Any) -> Plan:
    return "div", (terms(x), terms(y))


def _reciprocal(x: Any) -> Plan:
    return "div", (terms(1.0), terms(x))


def _sqrt(x: Any) -> Plan:
    return "sqrt", (terms(x),)


def _square(x: Any) -> Plan:
    return "mul", (terms(x), terms(x))


def _addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Plan:
    if _is_one(value):
        return "fma", (terms(a), terms(b), terms(x))
    return "addcmul", (terms(x), terms(a), terms(b), terms(value))


def _addcdiv(x: Any, a: Any, b: Any, value: Any = 1) -> Plan:
    return "addcdiv", (terms(x), terms(a), terms(b), terms(value))


def _lerp(x: Any, end: Any, weight: Any) -> Plan:
    return "lerp", (terms(x), terms(end), terms(weight))


# aten's name: how expansions carry it out. Operators that exist as name, name_ and name.out.
PLANS: dict[str, Callable[..., Plan]] = {
    "add": _add,  # every optimizer; residual connections of values
    "sub": _sub,
    "rsub": _rsub,  # 1 - x
    "mul": _mul,  # weight decay, decay of moments
    "div": _div,  # bias corrections
    "reciprocal": _reciprocal,
    "sqrt": _sqrt,  # Adam's denominator
    "square": _square,
    "addcmul": _addcmul,  # second moments
    "addcdiv": _addcdiv,  # Adam's update
    "lerp": _lerp,  # first moments
}


def arithmetic(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An expansion of the common format and role, or a plain tensor where parameters compute."""
    operands = (*args, *kwargs.values())
    if computes_plainly(operands):
        return func(*leading(args), **leading(kwargs))
    format = common_format(name, operands)
    operation, plan = PLANS[name](*args, **kwargs)
    result = expansion.apply(operation, *plan, format=format)
    return MCFTensor(result, format, common_role(operands))


def arithmetic_into(
    name: str, target: Tensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """The same, stored in `target`: all terms of an expansion, or a plain tensor, rounded once."""
    operands = (*args, *kwargs.values())
    if name in ("add", "sub") and isinstance(target, MCFTensor) and sparse.is_sparse(args[1]):
        sign = 1 if name == "add" else -1
        return sparse.add_(target, args[1], sign * kwargs.get("alpha", 1))
    if not isinstance(target, MCFTensor) and all(
        x.role == "parameter" for x in expansions(operands)
    ):
        func(*leading(args), **leading(kwargs))
        return target
    format = common_format(name, (target, *operands))
    if isinstance(target, MCFTensor):
        format = target.format
    operation, plan = PLANS[name](*args, **kwargs)
    store(target, expansion.apply(operation, *plan, format=format))
    return target


def _register(name: str) -> None:
    def out_of_place(func: Any, *args: Any, **kwargs: Any) -> Any:
        return arithmetic(name, func, args, kwargs)

    def in_place(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        return arithmetic_into(name, args[0], func, args, kwargs)

    def with_out(func: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return arithmetic_into(name, out, functools.partial(func, out=out), args, kwargs)

    register_forms(name, out_of_place, in_place, with_out)


for _name in PLANS:
    _register(_name)


def register_in_place(operator: str, name: str) -> None:
    """Let an operator that returns nothing carry out the operation `name` on its first argument."""

    def in_place(func: Any, *args: Any) -> None:
        arithmetic_into(name, args[0], func, args, {})

    TABLE[operator] = in_place


def _compiled_fma(func: Any, x: Any, y: Any, z: Any) -> MCFTensor:
    """Compilers write `z.add_(y, alpha=tensor)` so, and then copy the result into z.

    It is an update in place: all terms of z are kept, whatever it meets.
    """
    format = common_format("fma", (z, x, y))
    result = expansion.apply("fma", terms(x), terms(y), terms(z), format=format)
    return MCFTensor(result, format, common_role((z,)))


# Compilers define this operator after this module is imported, so its name stands for it.
TABLE["prims::fma"] = _compiled_fma


def _power(func: Any, x: Any, exponent: Any) -> Any:
    """The powers that are one or two of the operations above."""
    if exponent == 2:
        return torch.square(x)
    if exponent == 3:
        return torch.square(x) * x
    if exponent == 0.5:
        return torch.sqrt(x)
    if exponent == -1:
        return torch.reciprocal(x)
    return compute(func, x, exponent)


TABLE[aten.pow.Tensor_Scalar] = _power
