"""Collectives of `torch.distributed`: collectives that move elements move every term.

A sum over ranks gathers the tensors of all ranks. Every rank adds them in the order of ranks, so
that all get the same bits. Collectives that are not here raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.dispatch.operands import expansions, leaves, mapped, refusal, stored_in
from mcftensor.dispatch.registry import FAMILIES, implements
from mcftensor.formats import Format, movable
from mcftensor.tensor import MCFTensor

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}

REDUCTION: ContextVar[int] = ContextVar("REDUCTION")
"""The number of the reduction of the `all_reduce` under way; `patches/distributed.py` sets it."""


def refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise NotImplementedError for a collective without a handler for all terms.

    Send and recv are not available either: they return one request, and terms need several.
    """
    reason = (
        "torch.distributed carries expansions by broadcast, scatter, gather, all_gather and "
        "all_to_all, and adds them up by all_reduce; call its other operations on each of "
        "x.components"
    )
    raise refusal(func, expansions((args, kwargs)), reason)


for _namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
    FAMILIES[_namespace] = refuse  # none of them may use leading terms only


if dist.is_available():
    _c10d = torch.ops.c10d
    _functional = torch.ops._c10d_functional

    @implements(
        _c10d.broadcast_,  # dist.broadcast, ZeroRedundancyOptimizer, DTensor
        _c10d.scatter_,  # dist.scatter, distribute_tensor
        _c10d.allgather_,  # dist.all_gather
        _c10d._allgather_base_,  # dist.all_gather_into_tensor
        _c10d.gather_,  # dist.gather
        _c10d.alltoall_,  # dist.all_to_all
        _c10d.alltoall_base_,  # dist.all_to_all_single
    )
    def move(func: Any, *args: Any, **kwargs: Any) -> Any:
        """Move term by term. The caller waits for the last term only."""
        parts = [_term(args, i) for i in range(len(_one_format(func, args).components))]
        if func.overloadpacket in (_c10d.broadcast_, _c10d.scatter_):
            parts += _counts(*args)
        for i, part in enumerate(parts):
            result = func(*part, **kwargs)
            work = result[-1] if isinstance(result, tuple) else result
            if i < len(parts) - 1:
                work.wait()
        return (args[0], work) if isinstance(result, tuple) else work

    @implements(
        _functional.all_gather_into_tensor,  # DTensor.full_tensor
        _functional.all_to_all_single,  # of functional_collectives
        _functional.broadcast,  # of functional_collectives
        torch.ops._dtensor.shard_dim_alltoall,  # DTensor.redistribute
    )
    def move_functional(func: Any, x: MCFTensor, *args: Any, **kwargs: Any) -> MCFTensor:
        """Move term by term; on a CPU one after the other.

        Processes crash if gloo carries several small tensors of these operators at once.
        """
        if x._format.shared and func.namespace == "_dtensor":
            raise refusal(
                func, [x], "32 elements of a row share a scale; shard the first dimension"
            )

        def move_one(term: Tensor) -> Tensor:
            result = func(carried(term), *args, **kwargs)
            result = _functional.wait_tensor(result) if x.device.type == "cpu" else result
            return result.view(term.dtype)

        components, count = list(map(move_one, x.components)), x._count
        if count is not None and func is _functional.all_gather_into_tensor.default:
            count = _functional.wait_tensor(move_one(count.view(1)))[0]  # of the first rank
        return _moved(x, components, count)

    @implements(
        _functional.wait_tensor,  # DTensor.full_tensor, DTensor.redistribute
        "_c10d_functional::_wrap_tensor_autograd",  # gradients of the same
    )
    def wait(func: Any, x: MCFTensor) -> MCFTensor:
        """Wait now; torch waits when the result is used."""
        return _moved(x, [_functional.wait_tensor(term) for term in x.components], x._count)

    @implements(_c10d.allreduce_)  # dist.all_reduce
    def all_reduce_(
        func: Any, tensors: list[MCFTensor], group: Any, op: Any, *unused: Any, **keywords: Any
    ) -> Any:
        """Reduce over ranks in place, as `torch.distributed.all_reduce`."""
        (x,) = tensors
        count = dist.ProcessGroup.unbox(group).size()
        parts = [_nearest(x, [torch.empty_like(term) for term in x._read()]) for _ in range(count)]
        _, work = move(_c10d.allgather_.default, [parts], [_nearest(x)], group)
        work.wait()
        kind = op.op() if op._has_method("op") else REDUCTION.get()
        x.copy_(_reduced(func, parts, dist.ReduceOp.RedOpType(kind).name.lower()))
        return tensors, work

    @implements(_functional.all_reduce)  # DTensor.sum, clip_grad_norm_
    def all_reduce(func: Any, x: MCFTensor, op: str, group: Any) -> Tensor:
        """Return sums and norms of DTensors."""
        size = (group if isinstance(group, dist.ProcessGroup) else _resolve(group)).size()
        rows = _nearest(x).reshape(1, -1)
        gathered = move_functional(_functional.all_gather_into_tensor.default, rows, size, group)
        parts = wait(None, gathered).view(size, *x.shape).unbind()
        return MCFTensor.of(_reduced(func, parts, op).components, x.format, x.role)

    _resolve = dist.distributed_c10d._resolve_process_group


def _term(tree: Any, i: int) -> Any:
    """Return the arguments with every expansion replaced by one of its terms."""
    return mapped(lambda x: carried(x.components[i]) if isinstance(x, MCFTensor) else x, tree)


def _counts(written: list[MCFTensor], *others: Any) -> list[Any]:
    """Return the arguments with write counts in place of expansions, or nothing without counts."""
    if written[0]._writes is None:
        return []
    others = mapped(lambda x: x._count if isinstance(x, MCFTensor) else x, others)
    return [([x._writes for x in written], *others)]


def carried(term: Tensor) -> Tensor:
    """Return the same bits in a dtype that backends support: neither int16 nor 8-bit floats."""
    return term.view(torch.bfloat16) if term.dtype == torch.int16 else movable(term)


def _moved(x: MCFTensor, components: Sequence[Tensor], count: Tensor | None) -> MCFTensor:
    """Return a tensor of components received from other ranks, with a write count."""
    writes = None if count is None else count.clone()
    return MCFTensor.of(components, x._format, x._role, writes=writes)


def _nearest(x: MCFTensor, components: Sequence[Tensor] | None = None) -> MCFTensor:
    """Return the same terms, or others, as a value rounded to nearest: random numbers differ among
    ranks.
    """
    return MCFTensor.of(x.components if components is None else components, x.format.nearest)


def require_one_format(func: Any, args: Any) -> None:
    """Raise ValueError for expansions among tensors that have not the same terms."""
    if expansions(args):
        _one_format(func, args)


def _one_format(func: Any, args: Any) -> Format:
    tensors = [x for x in leaves(args) if isinstance(x, Tensor)]
    formats = {x.format for x in tensors if isinstance(x, MCFTensor)}
    kinds = {x.format.name if isinstance(x, MCFTensor) else f"plain {x.dtype}" for x in tensors}
    if len(kinds) > 1:
        raise ValueError(
            f"{func}: tensors of {' and '.join(sorted(kinds))}, which have not the same terms; "
            "give expansions of one format, by mcf.as_expansion(x, format)"
        )
    return formats.pop()


def _reduced(func: Any, parts: Sequence[Tensor], op: str) -> MCFTensor:
    if op not in _REDUCTIONS:
        raise refusal(
            func,
            expansions(list(parts[:1])),
            f"the reduction {op} is none of {', '.join(_REDUCTIONS)}",
        )
    total: Tensor = functools.reduce(_REDUCTIONS[op], parts)
    total = total / len(parts) if op == "avg" else total
    if isinstance(total, MCFTensor):
        return _nearest(total)
    format = expansions(list(parts))[0].format.nearest  # a storage format
    return MCFTensor.of(stored_in(total, format, total.device), format)
