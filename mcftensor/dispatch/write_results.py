"""Results written into given tensors: into all of them, or none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mcftensor.dispatch.operands import expansions, leaves, plainly, require_castable
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.implicit_rounding import rounding

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


def assign(
    func: Any,
    targets: Sequence[Tensor],
    results: Sequence[Tensor],
    operands: Sequence[MCFTensor] = (),
) -> None:
    """Write each result, computed from operands, into its target with one rounding.

    As everywhere in PyTorch, a plain target without elements takes the shape of its result.

    Raises:
        RuntimeError: a target of a dtype that cannot store the result, such as integers.
        NotImplementedError: a target of another shape.
    """
    for target, result in zip(targets, results, strict=True):
        require_castable(result.dtype, target)
        takes_any_shape = target.numel() == 0 and not isinstance(target, MCFTensor)
        if target.shape != result.shape and not takes_any_shape:
            reason = (
                f"its result is of shape {tuple(result.shape)}, and where it goes of "
                f"{tuple(target.shape)}"
            )
            raise refusal(func, expansions([*targets, *results]), reason)
        if not isinstance(target, MCFTensor) and result.is_floating_point():
            rounding(func, operands or expansions(result), target)  # not of guard terms
    for target, result in zip(targets, results, strict=True):
        if target.shape != result.shape:
            target.resize_(result.shape)
        if not isinstance(target, MCFTensor) and result.is_floating_point():
            result = plainly(result, target.dtype)
        target.copy_(result)


def assign_tree(func: Any, out: Any, result: Any, operands: Sequence[MCFTensor] = ()) -> Any:
    """Write results into the tensors of `out`, and return these in the structure of the results."""
    targets, (results, structure) = tree_leaves(out), tree_flatten(result)
    assign(func, targets, results, operands)
    return tree_unflatten(targets, structure)


def require_no_grad(name: str, tree: Any) -> None:
    """Raise RuntimeError if `out=` would end an autograd graph, as PyTorch does."""
    if torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in leaves(tree)
    ):
        raise RuntimeError(
            f"{name}: out= does not support differentiation, and one of the arguments requires "
            "grad; call it within torch.no_grad()"
        )


def refusal(func: Any, found: Sequence[MCFTensor], reason: str) -> NotImplementedError:
    """Return the error of an operation that cannot carry the precision."""
    shapes = ", ".join(f"{x.format.name} {tuple(x.shape)}" for x in found)
    return NotImplementedError(
        f"{func}: not available on expansions ({shapes}): {reason}, and terms are never dropped "
        "in silence. Compute on mcf.as_plain(x, torch.float64) and come back with "
        "mcf.as_expansion(result, x.format), or copy_() the result into x"
    )
