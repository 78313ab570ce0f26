"""The forms of the operations of the table on single tensors: new results, in place, `out=`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch import storage_formats
from mcftensor.dispatch.default_handler import compute
from mcftensor.dispatch.evaluate import Lists, evaluate_rows, evaluate_rows_into
from mcftensor.dispatch.operands import (
    are_lifted,
    common_role,
    computes_plainly,
    leading,
    on_leading,
    value_of,
)
from mcftensor.dispatch.registry import SHORTCUTS, TABLE, Shortcut, implements, register_forms
from mcftensor.dispatch.store import store
from mcftensor.dispatch.system import WIDE
from mcftensor.formats import named
from mcftensor.kernels.without_float64 import PAIR, widest
from mcftensor.passes.operators import OPERATORS
from mcftensor.tensor.implicit_rounding import rounding
from mcftensor.tensor.step_context import current_step, is_unwatched
from mcftensor.tensor.tensor import MCFTensor

aten = torch.ops.aten


def _register(name: str) -> None:
    def new(func: Any, *args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        if computes_plainly(operands):  # the commonest case: a layer of a model
            return on_leading(func, args, kwargs)
        (result,) = evaluate_rows(name, [[x] for x in operands], tuple(kwargs), 1)
        return storage_formats.on_numbers(func, args, kwargs) if result is None else result

    def in_place(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _evaluate_to(name, args[0], func, args, kwargs)

    def with_out(func: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return _evaluate_to(name, out, func, args, kwargs | {"out": out})

    register_forms(name, new, in_place, with_out)


def _evaluate_to(
    name: str, target: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Store the result in `target`: all terms of an expansion, or a plain tensor rounded once."""
    named = {name: x for name, x in kwargs.items() if name != "out"}
    operands = (*args, *named.values())
    columns, keywords = [[x] for x in operands], tuple(named)
    if isinstance(target, MCFTensor) and target is args[0]:
        if name in ("add", "sub") and _is_sparse(args[1]) and not storage_formats.are_numbers(args):
            sign = 1 if name == "add" else -1
            return _add_sparse(target, args[1], sign * named.get("alpha", 1))
        if _evaluated_in_place(name, columns, keywords):
            return target
        return storage_formats.on_numbers(func, args, kwargs)
    if storage_formats.are_numbers((*operands, target)):
        return storage_formats.on_numbers(func, args, kwargs)
    is_plain = not isinstance(target, MCFTensor)
    if is_plain and (are_lifted(operands) or common_role(operands) == "parameter"):
        func(*leading(args), **leading(kwargs))
        return target
    format = target._format if isinstance(target, MCFTensor) else None
    (result,) = evaluate_rows(name, columns, keywords, 1, format)
    store(name, target, result, operands)
    return target


def _evaluated_in_place(
    name: str, columns: Lists, keywords: tuple[str, ...], *, is_eager: bool = False
) -> bool:
    """Write the result into the first operand, and return whether PyTorch's own operation is not
    needed.
    """
    is_done = evaluate_rows_into(name, columns, keywords, 1, is_eager=is_eager)
    if is_done is False:
        target = columns[0][0]
        (result,) = evaluate_rows(name, columns, keywords, 1, target._format)
        store(name, target, result, [])
    return is_done is not None


# -------------------------------------------------------------- without PyTorch's dispatcher


def _at_once(name: str, *, in_place: bool) -> Shortcut:
    """Return a method of tensors that bypasses PyTorch's dispatcher, to save time."""
    _, count, _, keyword, _ = OPERATORS[name]

    def carry_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_outside = current_step() is None and is_unwatched()
        if not is_outside or len(args) != count or _is_autocast():
            return NotImplemented
        keywords = tuple(kwargs)
        if keywords and keywords != (keyword,):
            return NotImplemented
        operands = (*args, *kwargs.values())
        is_of_terms = True
        for x in operands:
            kind = type(x)
            if kind is MCFTensor:
                is_of_terms = is_of_terms and x._format.arithmetic == "terms"
            elif kind not in _NUMBERS and not (
                kind in _PLAIN and x.layout is torch.strided and not x.is_neg()
            ):
                return NotImplemented
        columns = [[x] for x in operands]
        with torch._C.DisableTorchFunctionSubclass():
            if not in_place and (is_of_terms or computes_plainly(operands)):
                (result,) = evaluate_rows(name, columns, keywords, 1, is_eager=True)
                return on_leading(func, args, kwargs) if result is None else result
            target = args[0]
            is_ours = in_place and is_of_terms and type(target) is MCFTensor
            if not is_ours or not _evaluated_in_place(name, columns, keywords, is_eager=True):
                return NotImplemented
            torch._C._increment_version([target])
            return target

    return carry_out


_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)
_is_autocast = torch._C._is_any_autocast_enabled

for _name in OPERATORS:
    _register(_name)
    for _suffix in ("", "_"):
        _func = getattr(Tensor, _name + _suffix, None)
        if _func is not None:
            SHORTCUTS[_func] = _at_once(_name, in_place=_suffix == "_")


def register_in_place(operator: str, name: str) -> None:
    """Register an operator that returns nothing as operation `name` in place."""

    def in_place(func: Any, *args: Any) -> None:
        _evaluate_to(name, args[0], func, args, {})

    TABLE[operator] = in_place


@implements(aten.pow.Tensor_Scalar)  # x ** 2
def power(func: Any, x: Any, exponent: Any) -> Any:
    """Return powers that are one or two of the operations above; other powers by `compute`."""
    if exponent == 2:
        return torch.square(x)
    if exponent == 3:
        return torch.square(x) * x
    if exponent == 0.5:
        return torch.sqrt(x)
    if exponent == -1:
        return torch.reciprocal(x)
    return compute(func, x, exponent)


# ---------------------------------------------------- sparse gradients, as embeddings make them


def _is_sparse(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.sparse_coo


def _add_sparse(target: MCFTensor, source: Tensor, alpha: Any) -> MCFTensor:
    """Add alpha times a sparse tensor in place; other elements stay unchanged.

    Rows of the same place are summed first, exactly except for rounding in float64, or in two
    float32 terms without it.
    """
    if widest(target.device) == WIDE:
        source = source.to(WIDE).coalesce()
        places, values = tuple(source.indices()), source.values()
        rows = target[places] if places else target.clone()
        rows.add_(values, alpha=alpha)
    else:
        places, values = _summed_rows(source)
        rows = value_of(target[places] if places else target, values._format)
        rows.add_(values, alpha=alpha)
    target[places] = rows
    return target


def _summed_rows(source: Tensor) -> tuple[tuple[Tensor, ...], MCFTensor]:
    """Return the places of a sparse tensor, and the sums of its rows there in float32 terms."""
    indices, values = source._indices(), source._values()
    if source.is_coalesced():
        return tuple(indices), value_of(values, named(PAIR))
    indices, place = torch.unique(indices, dim=1, return_inverse=True)
    sums = values.new_zeros([indices.shape[1], *values.shape[1:]], dtype=torch.float32)
    made: Any = value_of(sums, named(PAIR)).index_add(0, place, values)
    return tuple(indices), made


@implements(aten.sparse_mask.default)  # SparseAdam
def sparse_mask(func: Any, x: Any, mask: Tensor) -> Tensor:
    """Return the elements at the places of a sparse tensor, sparse and in float64, or in float32
    without it. A format with more bits is rounded, with a warning.
    """
    if not isinstance(x, MCFTensor):
        return compute(func, x, mask)
    wide = widest(x.device)
    values = x._collapsed(wide)
    rounding(func, [x], values)
    return func(values, mask.to(wide))
