"""The forms of an operation that write into a tensor: `x.name_()` and `name(..., out=x)`.

They are the functional form and a copy of its results, so that all terms are written, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import expansions
from mcftensor.dispatch.registry import TABLE
from mcftensor.dispatch.writing import assign_tree, require_no_grad, written_to
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


@functools.lru_cache(maxsize=4096)
def functional(func: Any) -> Any:
    """The operator that returns what `func` writes into its first argument, or into `out`.

    None where there is no such operator, as for those that draw random numbers in place.
    """
    arguments, inputs = func._schema.arguments, _inputs(func)
    in_place = len(inputs) == len(arguments)
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if not written or (in_place and (written != arguments[:1] or draws)):
        return None
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None)
    for name in packet.overloads() if packet is not None else ():
        overload = getattr(packet, name)
        alike = [(a.name, a.type) for a in overload._schema.arguments]
        if alike == [(a.name, a.type) for a in inputs] and not overload._schema.is_mutable:
            return overload
    return None


def _inputs(func: Any) -> list[Any]:
    """The arguments of an operator but those for its results."""
    return [a for a in func._schema.arguments if not (a.kwarg_only and a.alias_info is not None)]


def by_functional_form(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out one of aten's operators that write by way of its functional form."""
    targets = [x for _, x in written_to(func, args, kwargs)]
    names = {a.name for a in _inputs(func)}
    options = {name: x for name, x in kwargs.items() if name in names}
    if not expansions((args, options)):
        return compute(func, *args, **kwargs)
    new = functional(func)
    if expansions(targets):
        args, options = _whole((args, options))
    elif new not in TABLE:  # where it would be evaluated in float64 and rounded to the format first
        return compute(func, *args, **kwargs)
    values = [x for x in expansions((args, options)) if x.acts_as == "value"]
    written = assign_tree(func, targets, new(*args, **options), values)
    return written if func._schema.returns else None


def evaluate_into(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """Run a function whose `out` holds expansions by way of its functional form."""
    require_no_grad(func.__name__, (args, kwargs, out))
    args, kwargs = _whole((args, kwargs))
    return assign_tree(func.__name__, out, func(*args, **kwargs))


def _whole(inputs: Any) -> Any:
    """Parameters as values: an expansion that is written to gets all their terms."""
    return tree_map(
        lambda x: (
            MCFTensor.of(x.components, x.format, writes=x._count) if isinstance(x, MCFTensor) else x
        ),
        inputs,
    )
