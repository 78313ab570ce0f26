"""`torch._foreach_*`: arithmetic on lists in one pass, other operations tensor by tensor.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.deferred import compute_readers
from mcftensor.dispatch import batches
from mcftensor.dispatch.arithmetic import evaluated, evaluated_into, fits
from mcftensor.dispatch.operands import computes_plainly
from mcftensor.dispatch.plans import PLANS, Task
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten

# The fourth argument of these is a keyword of the single operation.
_VALUED = ("addcmul", "addcdiv")

# These take a number as their second operand only under another name.
_WITH_NUMBER = {"maximum": "clamp_min", "minimum": "clamp_max"}


def foreach(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_foreach_name` as `name` on each element of its lists.

    A list of tensors or of numbers supplies one element a step; all else goes to every step.
    """
    full_name = func.overloadpacket.__name__.removeprefix("_foreach_")
    name = full_name.removesuffix("_")
    in_place = full_name != name
    if name in _WITH_NUMBER and func._overloadname.startswith("Scalar"):
        name = _WITH_NUMBER[name]
        full_name = name + "_" * in_place
    if name in _VALUED and func._overloadname == "Tensor":
        args = (*args[:3], args[3].tolist())
    are_lists = [isinstance(a, Sequence) for a in args]
    lengths = [len(a) for a, is_list in zip(args, are_lists, strict=True) if is_list]
    if len(set(lengths)) > 1:
        raise ValueError(f"{func}: lists of lengths {lengths}; all must be alike")
    columns = [a if b else [a] * lengths[0] for a, b in zip(args, are_lists, strict=True)]
    named = {key: [x] * lengths[0] for key, x in kwargs.items()}
    if name in _VALUED and len(columns) == 4:
        named["value"] = columns.pop()
    if not in_place:
        return _new(name, _steps(columns, named))
    if name in PLANS:
        # What reads a target is computed before any is written to.
        whole = [x for x in args[0] if isinstance(x, MCFTensor) and x._deferred is None]
        compute_readers([term for x in whole for term in x._read()])
    if name not in PLANS or not batches.write(name, [*columns, *named.values()], tuple(named)):
        _into(name, full_name, _steps(columns, named))
    if torch._C._len_torch_dispatch_stack() == 0:  # lists do not do it by themselves
        torch.autograd.graph.increment_version(args[0])
    return None


Step = tuple[list[Any], dict[str, Any]]


def _steps(columns: Sequence[Sequence[Any]], named: dict[str, list[Any]]) -> list[Step]:
    """The operands of each step, and its keywords."""
    rows = zip(*columns, *named.values(), strict=True)
    count = len(columns)
    return [(list(row[:count]), dict(zip(named, row[count:], strict=True))) for row in rows]


def _single(name: str, full_name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    single = getattr(aten, full_name, None)
    if single is not None:
        return single(*args, **kwargs)
    # _foreach_maximum_ exists, maximum_ does not
    return args[0].copy_(getattr(aten, name)(*args, **kwargs))


def _new(name: str, steps: list[Step]) -> list[Any]:
    if name not in PLANS:
        return [_single(name, name, *step) for step in steps]
    results: list[Any] = [None] * len(steps)
    tasks: dict[int, Task] = {}
    for i, (args, kwargs) in enumerate(steps):
        operands = (*args, *kwargs.values())
        if any(isinstance(x, MCFTensor) for x in args) and not computes_plainly(operands):
            tasks[i] = Task.of(name, args, kwargs)
        else:
            results[i] = _single(name, name, args, kwargs)
    for i, result in zip(tasks, evaluated(list(tasks.values())), strict=True):
        results[i] = result
    return results


def _into(name: str, full_name: str, steps: list[Step]) -> None:
    targets: list[MCFTensor] = []
    tasks: list[Task] = []
    together = name in PLANS and not _interfere([args for args, _ in steps])
    for args, kwargs in steps:
        target = args[0]
        if together and isinstance(target, MCFTensor):
            task = Task.of(name, args, kwargs, target.format)
            if fits(task, target):
                targets.append(target)
                tasks.append(task)
                continue
        _single(name, full_name, args, kwargs)
    evaluated_into(targets, tasks)


def _interfere(steps: Sequence[Sequence[Any]]) -> bool:
    """Whether one step writes to memory that another one uses, so that their order matters."""
    writer: dict[int, int] = {}
    for i, (target, *_) in enumerate(steps):
        for memory in _memory(target):
            if writer.setdefault(memory, i) != i:
                return True
    return any(
        writer.get(memory, i) != i
        for i, (_, *operands) in enumerate(steps)
        for x in operands
        if isinstance(x, Tensor)
        for memory in _memory(x)
    )


def _memory(x: Tensor) -> Iterable[int]:
    """Where a tensor lies; what is deferred is nowhere but in its object."""
    if not isinstance(x, MCFTensor):
        return (x.untyped_storage()._cdata,)
    if x._deferred is not None:
        return (id(x),)
    return [term.untyped_storage()._cdata for term in x._read()]
