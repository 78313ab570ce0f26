"""Arithmetic with a kernel of its own: out of place, in place, with `out=`, and in lists."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcftensor import expansion
from mcftensor.deferred import LONGEST, Deferred, length, shifted
from mcftensor.dispatch import sparse
from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import (
    Number,
    common_format,
    common_role,
    computes_plainly,
    expansions,
    leading,
    require_castable,
    store,
    terms,
)
from mcftensor.dispatch.table import TABLE, register_forms
from mcftensor.elementwise import Expression, evaluate, evaluate_
from mcftensor.formats import Format
from mcftensor.noise import key_for
from mcftensor.tensor import DeferredTensor, MCFTensor, Role

aten = torch.ops.aten

# An expression without formats, and its operands.
Plan = tuple[tuple[Any, ...], Sequence[Any]]


def _is_one(x: Any) -> bool:
    return isinstance(x, Number) and x == 1


def _add(x: Any, y: Any, alpha: Any = 1) -> Plan:
    if _is_one(alpha):
        return ("add", 0, 1), (x, y)
    return ("fma", 0, 1, 2), (y, alpha, x)


def _sub(x: Any, y: Any, alpha: Any = 1) -> Plan:
    if _is_one(alpha):
        return ("add", 0, ("neg", 1)), (x, y)
    return ("fma", 0, ("neg", 1), 2), (y, alpha, x)


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Plan:
    return _sub(y, x, alpha)


def _mul(x: Any, y: Any) -> Plan:
    return ("mul", 0, 1), (x, y)


def _div(x: Any, y: Any) -> Plan:
    return ("div", 0, 1), (x, y)


def _reciprocal(x: Any) -> Plan:
    return ("div", 0, 1), (1.0, x)


def _sqrt(x: Any) -> Plan:
    return ("sqrt", 0), (x,)


def _square(x: Any) -> Plan:
    return ("mul", 0, 0), (x,)


def _addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Plan:
    if _is_one(value):
        return ("fma", 0, 1, 2), (a, b, x)
    return ("addcmul", 0, 1, 2, 3), (x, a, b, value)


def _addcdiv(x: Any, a: Any, b: Any, value: Any = 1) -> Plan:
    return ("addcdiv", 0, 1, 2, 3), (x, a, b, value)


def _lerp(x: Any, end: Any, weight: Any) -> Plan:
    return ("lerp", 0, 1, 2), (x, end, weight)


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


@dataclass
class Task:
    """An expression in formats, and the terms of its operands."""

    expression: Expression
    operands: list[Sequence[Tensor]]
    format: Format
    role: Role
    reads: Sequence[Any]

    @classmethod
    def of(cls, name: str, format: Format, args: Sequence[Any], kwargs: dict[str, Any]) -> Task:
        """What an operation asks for; deferred operands become parts of its expression."""
        plan, found = PLANS[name](*args, **kwargs)
        places: list[Expression] = []  # of the operands, or of their expressions
        operands: list[Sequence[Tensor]] = []
        for x in found:
            inner = x._deferred if isinstance(x, MCFTensor) else None
            if inner is None:
                places.append(len(operands))
                operands.append(terms(x))
            else:
                inner.require_unchanged()
                places.append(shifted(inner.expression, len(operands)))
                operands += inner.operands
        role = common_role((*args, *kwargs.values()))
        expression = _expression(plan, format.name, tuple(places))
        return cls(expression, operands, format, role, found)

    def may_wait(self) -> bool:
        """Whether the result may be deferred: a value of whole values and numbers."""
        return (
            self.role == "value"
            and self.format.rounding == "nearest"
            and not torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and length(self.expression) < LONGEST
            and all(isinstance(x, (int, float)) or _is_whole(x) for x in self.reads)
            and len({x.shape for x in self.reads if isinstance(x, Tensor)}) == 1
            and all(x.dim() > 0 for x in self.reads if isinstance(x, Tensor))
        )

    def key(self) -> list[Tensor]:
        """A key, where the format rounds stochastically."""
        key = key_for(self.format, next(x.device for x in self.reads if isinstance(x, Tensor)))
        return [] if key is None else [key]


def _is_whole(x: Any) -> bool:
    """Whether an operand is a value in memory of its own, outside of compilers.

    Tensors of inference mode do not tell when they are written to.
    """
    if not isinstance(x, MCFTensor) or x.role != "value":
        return False
    if x._deferred is not None:
        return True
    return type(x._term0) is Tensor and x.is_contiguous() and not x._term0.is_inference()


@functools.cache
def _expression(plan: Any, format: str, places: tuple[Expression, ...]) -> Expression:
    """A plan whose operations round to a format, of the operands in these places."""
    if isinstance(plan, int):
        return places[plan]
    operation, *parts = plan
    return (operation, format, *(_expression(part, format, places) for part in parts))


@functools.cache
def _text(expression: Expression) -> str:
    return str(expression)


def evaluated(tasks: Sequence[Task]) -> list[MCFTensor]:
    """The results of tasks, in one pass for all that cannot wait."""
    results: list[Any] = [None] * len(tasks)
    now = []
    for i, task in enumerate(tasks):
        if task.may_wait():
            like = next(x for x in task.reads if isinstance(x, MCFTensor))
            deferred = Deferred(task.expression, task.operands)
            results[i] = DeferredTensor.of(deferred, like, task.format)
        else:
            now.append(i)
    if now:
        found = iter(evaluate(*_joined([tasks[i] for i in now])))
        for i in now:
            own = list(itertools.islice(found, tasks[i].format.terms))
            results[i] = MCFTensor(own, tasks[i].format, tasks[i].role)
    return results


def evaluated_into(targets: Sequence[MCFTensor], tasks: Sequence[Task]) -> None:
    """Write the results of tasks into targets, in one pass for all that cannot wait."""
    now = []
    for target, task in zip(targets, tasks, strict=True):
        if isinstance(target, DeferredTensor) and task.may_wait():
            target.defer(Deferred(task.expression, task.operands))
        else:
            now.append((target, task))
    if not now:
        return
    expressions, operands, lengths, keys = _joined([task for _, task in now])
    written = [term for target, _ in now for term in target.components]
    if len(now) > 1 or all(type(x) is Tensor for x in written):
        evaluate_(expressions, written, operands, lengths, keys)
    else:  # a compiler's: one by one, operators that write take it long to see through
        for term, new in zip(written, evaluate(expressions, operands, lengths, keys), strict=True):
            term.copy_(new)


def _joined(tasks: Sequence[Task]) -> tuple[str, list[Tensor], list[int], list[Tensor]]:
    """Arguments of `evaluate` for all tasks."""
    return (
        ";".join([_text(task.expression) for task in tasks]),
        [term for task in tasks for operand in task.operands for term in operand],
        [len(operand) for task in tasks for operand in task.operands],
        [key for task in tasks for key in task.key()],
    )


def arithmetic(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An expansion of the common format and role, or a plain tensor where parameters compute."""
    operands = (*args, *kwargs.values())
    if computes_plainly(operands):
        return func(*leading(args), **leading(kwargs))
    return evaluated([Task.of(name, common_format(name, operands), args, kwargs)])[0]


def arithmetic_into(
    name: str, target: Tensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """The same, stored in `target`: all terms of an expansion, or a plain tensor, rounded once."""
    operands = (*args, *kwargs.values())
    if not isinstance(target, MCFTensor):
        if all(x.role == "parameter" for x in expansions(operands)):
            func(*leading(args), **leading(kwargs))
        else:
            format = common_format(name, (target, *operands))
            require_castable(format.base, target)
            (result,) = evaluated([Task.of(name, format, args, kwargs)])
            target.copy_(expansion.collapse(result.components, target.dtype))
        return target
    if name in ("add", "sub") and sparse.is_sparse(args[1]):
        sign = 1 if name == "add" else -1
        return sparse.add_(target, args[1], sign * kwargs.get("alpha", 1))
    common_format(name, (target, *operands))  # raises for unlike bases
    task = Task.of(name, target.format, args, kwargs)
    if fits(task, target):
        evaluated_into([target], [task])
    else:
        store(target, evaluated([task])[0].components)
    return target


def fits(task: Task, target: MCFTensor) -> bool:
    """Whether a result can be written element by element, while the operands are read."""
    read = [x for operand in task.operands for x in operand if x.dim() > 0]
    if any(x.shape != target.shape for x in read) or not any(x is target for x in task.reads):
        return False
    written = target.components if target._deferred is None else ()
    if not all(type(x) is Tensor for x in written):
        return True
    places = {x.untyped_storage()._cdata: (x.data_ptr(), x.stride()) for x in written}
    return all(
        places.get(x.untyped_storage()._cdata) in (None, (x.data_ptr(), x.stride())) for x in read
    )


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
