"""The stage that stores: results are rounded once, and written into all targets or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mcftensor.dispatch.operands import expansions, leaves, plainly, refusal, stored_in
from mcftensor.kernels import LOCK
from mcftensor.kernels.columns import is_bare
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.implicit_rounding import rounding


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
        count = _count_of(target, result)
        counted = None if count is None else count + 1
        target.copy_(result)
        if count is not None and counted is not None:
            count.copy_(counted)


def _count_of(target: Tensor, result: Tensor) -> Tensor | None:
    """Return the count of writes of a target that a copy of a result would replace by its own."""
    if not (isinstance(target, MCFTensor) and isinstance(result, MCFTensor)):
        return None
    return target._writes if result._format is target._format else None


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


def store(func: Any, target: Tensor, result: Tensor, operands: Sequence[Any]) -> None:
    """Write a result of its shape into an expansion, or rounded once into a plain tensor."""
    require_castable(result.dtype, target)
    if isinstance(target, MCFTensor):
        fill(target, stored_in(result, target._format, target.device))
        count_write([target])
    else:
        rounding(func, expansions(operands), target)
        target.copy_(plainly(result, target.dtype))


def fill(target: MCFTensor, components: Iterable[Tensor], non_blocking: bool = False) -> None:
    """Write components into an expansion by one call, which no signal can interrupt."""
    overwrite(target.components, components, non_blocking)


def overwrite(
    targets: Iterable[Tensor], components: Iterable[Tensor], non_blocking: bool = False
) -> None:
    """Write components into given target components, as `fill`."""
    own, new = list(targets), list(components)
    if is_bare(own, new):
        with LOCK:
            torch._foreach_copy_(own, new, non_blocking)
    else:  # single operators, which compilers can trace
        copy = torch.ops.aten.copy_.default._op
        uninterrupted([partial(copy, x, y, non_blocking) for x, y in zip(own, new, strict=True)])


def uninterrupted(calls: Sequence[partial[Any]]) -> list[Any]:
    """Return the results of calls of C functions, made by one bytecode.

    Python handles signals between bytecodes, and so never between these calls.
    """
    with LOCK:
        return list(map(partial.__call__, calls))


def count_write(targets: Sequence[Tensor]) -> None:
    """Add one to the write counts of tensors."""
    counts = [x._writes for x in targets if isinstance(x, MCFTensor) and x._writes is not None]
    if len(counts) > 1 and is_bare(counts):
        torch._foreach_add_(counts, 1)
    else:
        for x in counts:
            x.add_(1)


def require_castable(dtype: torch.dtype, target: Tensor) -> None:
    """Raise RuntimeError, as PyTorch does, if a write needs an invalid cast such as float to
    integer.
    """
    if not torch.can_cast(dtype, target.dtype):
        raise RuntimeError(
            f"result type {dtype} can't be cast to the desired output type {target.dtype}"
        )
