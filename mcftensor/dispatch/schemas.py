"""What PyTorch's schemas say of an operator: what it writes to, and the form that returns it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import leaves

aten = torch.ops.aten


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    schema = func._schema.arguments
    given = [
        *zip(schema, args, strict=False),
        *((a, kwargs[a.name]) for a in schema if a.name in kwargs),
    ]
    written = [x for a, x in given if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in leaves(written) if isinstance(x, Tensor)]


@functools.lru_cache(maxsize=4096)
def functional(func: Any) -> Any:
    """Return the operator that returns what `func` writes into its first argument, or into `out`.

    Return None if there is no such operator, as for in-place random numbers.
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
    """Return the arguments of an operator except those for its results."""
    return [a for a in func._schema.arguments if not (a.kwarg_only and a.alias_info is not None)]


def without_results(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Return an operation that writes as the operation that returns its result."""
    if not func._schema.is_mutable:
        return func, args, kwargs
    names = {a.name for a in _inputs(func)}
    return functional(func), args, {name: x for name, x in kwargs.items() if name in names}
