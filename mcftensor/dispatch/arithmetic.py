"""Arithmetic with a kernel of its own: out of place, in place, with `out=`, and in lists."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor import expansion
from mcftensor.deferred import Deferred, compute_readers
from mcftensor.dispatch import sparse
from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import (
    common_format,
    computes_plainly,
    expansions,
    leading,
    require_castable,
    store,
)
from mcftensor.dispatch.plans import PLANS, Task
from mcftensor.dispatch.table import TABLE, register_forms
from mcftensor.elementwise import evaluate, evaluate_, write
from mcftensor.operators import places_of
from mcftensor.tensor import DeferredTensor, MCFTensor

aten = torch.ops.aten


def evaluated(tasks: Sequence[Task]) -> list[MCFTensor]:
    """The results of tasks, in one pass for all alike that cannot wait."""
    results: list[Any] = [None] * len(tasks)
    now = []
    for i, task in enumerate(tasks):
        if task.may_wait():
            like = next(x for x in task.reads if isinstance(x, MCFTensor))
            deferred = Deferred(task.prepared.expression, task.operands)
            results[i] = DeferredTensor.of(deferred, like, task.format)
        else:
            now.append(i)
    keys = {i: tasks[i].key() for i in now}  # in this order, whatever is alike
    for rows in _alike(tasks, now):
        own = [key for i in rows for key in keys[i]]
        found = evaluate(*_joined([tasks[i] for i in rows]), own)
        for place, i in enumerate(rows):
            prepared = tasks[i].prepared
            results[i] = MCFTensor(found[place :: len(rows)], prepared.format, prepared.role)
    return results


def evaluated_into(targets: Sequence[MCFTensor], tasks: Sequence[Task]) -> None:
    """Write the results of tasks into targets, in one pass for all alike that cannot wait.

    What is deferred and reads a target has been computed before.
    """
    now = []
    for i, (target, task) in enumerate(zip(targets, tasks, strict=True)):
        if isinstance(target, DeferredTensor) and task.may_wait():
            target.defer(Deferred(task.prepared.expression, task.operands))
        else:
            now.append(i)
    keys = {i: tasks[i].key() for i in now}
    for rows in _alike(tasks, now) if len(now) > 1 else [now]:
        if len(rows) > 1:
            expression, terms, lengths = _joined([tasks[i] for i in rows])
            written = itertools.chain(*zip(*[targets[i]._read() for i in rows], strict=True))
            own = [key for i in rows for key in keys[i]]
            evaluate_(expression, list(written), terms, lengths, own)
        else:
            for i in rows:
                _write(targets[i], tasks[i], keys[i])


def _write(target: MCFTensor, task: Task, keys: list[Tensor]) -> None:
    written = target._read()
    if all(type(x) is Tensor for x in written):
        write(task.prepared.expression, task.operands, keys, written)
    else:  # a compiler's: one by one, operators that write take it long to see through
        for term, new in zip(written, evaluate(*_joined([task]), keys), strict=True):
            term.copy_(new)


def _alike(tasks: Sequence[Task], rows: Iterable[int]) -> Iterable[list[int]]:
    """Which tasks ask for the same expression of operands of as many terms."""
    rows = list(rows)
    keys = [
        (tasks[i].prepared.expression, tuple([len(x) for x in tasks[i].operands])) for i in rows
    ]
    return [[rows[place] for place in places] for places in places_of(keys).values()]


def _joined(tasks: Sequence[Task]) -> tuple[str, list[Any], list[int]]:
    """Arguments of `evaluate`, the keys aside, for tasks that are alike."""
    rows = [[term for operand in task.operands for term in operand] for task in tasks]
    return (
        tasks[0].prepared.expression,
        list(itertools.chain(*zip(*rows, strict=True))),
        [len(operand) for operand in tasks[0].operands],
    )


def arithmetic(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An expansion of the common format and role, or a plain tensor where parameters compute."""
    if computes_plainly((*args, *kwargs.values())):
        return func(*leading(args), **leading(kwargs))
    return evaluated([Task.of(name, args, kwargs)])[0]


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
            (result,) = evaluated([Task.of(name, args, kwargs)])
            target.copy_(expansion.collapse(result.components, target.dtype))
        return target
    if name in ("add", "sub") and sparse.is_sparse(args[1]):
        sign = 1 if name == "add" else -1
        return sparse.add_(target, args[1], sign * kwargs.get("alpha", 1))
    if target._deferred is None:
        compute_readers(target._read())
    task = Task.of(name, args, kwargs, target.format)
    if fits(task, target):
        evaluated_into([target], [task])
    else:
        store(target, evaluated([task])[0].components)
    return target


def fits(task: Task, target: MCFTensor) -> bool:
    """Whether a result can be written element by element, while the operands are read."""
    if not any(x is target for x in task.reads):
        return False
    written = target._read() if target._deferred is None else ()
    if not all(type(x) is Tensor for x in written):
        return False
    places: dict[int, Any] = {}
    for operand in task.operands:
        for x in operand:
            if isinstance(x, float) or x.dim() == 0 or any(x is y for y in written):
                continue
            if x.shape != target.shape:
                return False
            if written and not places:
                places = {y.untyped_storage()._cdata: (y.data_ptr(), y.stride()) for y in written}
            place = places.get(x.untyped_storage()._cdata)
            if place not in (None, (x.data_ptr(), x.stride())):
                return False
    return True


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
