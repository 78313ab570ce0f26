"""Structure operations on tensors whose elements share scales: factories, copies, joins, placement.

The format itself carries out pure moves of elements (`formats/moving.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.arithmetic.write_counts import moved
from mcftensor.dispatch.operands import mapped, plain, plainly
from mcftensor.dispatch.storage_formats import on_numbers, store_numbers
from mcftensor.dispatch.store import overwrite
from mcftensor.formats import PLAIN
from mcftensor.formats.moving import options_for
from mcftensor.kernels.without_float64 import widest
from mcftensor.passes.format_conversion import machine_number, recode
from mcftensor.tensor.tensor import MCFTensor


def share_scales(operands: Sequence[Any]) -> bool:
    """Return whether an operand is a tensor whose elements share scales."""
    return any(isinstance(x, MCFTensor) and bool(x._format.shared) for x in operands)


def computes_decoded(x: MCFTensor) -> bool:
    """Return whether x is a parameter that a model may view in parts other than rows."""
    return x._format.computes_as is not None and x.acts_as == "parameter"


def join_blocks(func: Any, tensors: Sequence[Tensor], *args: Any) -> Any:
    """Return `cat` along the first dimension in the format; other joins in decoded numbers."""
    formats = {x._format.nearest if isinstance(x, MCFTensor) else None for x in tensors}
    is_of_rows = func is torch.ops.aten.cat.default and args in ((), (0,), (-tensors[0].dim(),))
    if not is_of_rows or len(formats) > 1:
        return on_numbers(func, (tensors, *args), {})
    parts: list[Any] = list(tensors)
    columns = zip(*(x._read() for x in parts), strict=True)
    return parts[0]._like([func(list(c)) for c in columns], own=True)


def made_in_blocks(
    func: Any, x: MCFTensor, shape: torch.Size, args: Any, kwargs: dict[str, Any]
) -> MCFTensor:
    """Return the result of a factory of some shape, made component by component.

    A result like a parameter but with fewer than two dimensions is in the format of states.
    """
    is_like = func.overloadpacket.__name__.endswith("_like")
    if computes_decoded(x) and len(shape) < 2:
        vector = x._format.of_states
        every = [{**kwargs, "dtype": component.dtype} for component in vector.components]
        plain = [func(x._held()[0], shape, *args, **own) for own in every]
        return MCFTensor.of(plain, vector, x.role, own=True)
    made = []
    for component, t in zip(x._format.components, x._held(), strict=True):
        own, options = component.shape(shape), options_for(t, x.shape, kwargs)
        if is_like:
            made.append(func(t, *args, **options))
        elif own == shape:
            made.append(func(t, shape, *args, **options))
        else:
            made.append(t.new_zeros(own, **options))
    if not is_like and x._role == "parameter":
        return x._like(made, own=True)
    holds = func is torch.ops.aten.empty_like.default and not x._is_param
    return x._made_beside(made, x.role if holds else "value")


def copy_blocks_(target: MCFTensor, source: Tensor) -> None:
    """Copy in place: the components between whole tensors of one format, or with one rounding."""
    if (
        isinstance(source, MCFTensor)
        and source._format.nearest is target._format.nearest
        and source.shape == target.shape
    ):
        _replace_rows(target, source._read())
        if source._writes is not None and target._writes is not None:
            assert source._count is not None
            target._writes.copy_(moved(source._count, -target._first))
        return
    store_numbers([target], [_in_shape(target, source)])


def set_blocks_(target: MCFTensor, source: Any) -> None:
    """Write numbers in place, rounded to nearest, without counting a write."""
    format = target._format.nearest
    numbers = _in_shape(target, source)
    _replace_rows(target, recode([numbers], PLAIN[numbers.dtype].name, format.name, None))


def place_in_blocks(func: Any, args: Any, kwargs: Any) -> Any:
    """Place elements. In-place forms round to nearest and count no write."""
    if func is torch.ops.aten.constant_pad_nd.default and _pads_rows(*args, **kwargs):
        return _padded(*args)
    target = args[0]
    if not (func._schema.is_mutable and isinstance(target, MCFTensor) and target._format.shared):
        return on_numbers(func, args, kwargs)
    copy = _wide(target)  # applies the deferred factor by an ordinary write
    func(copy, *mapped(_wide, args[1:]), **mapped(_wide, kwargs))
    set_blocks_(target, copy)
    return target


def _pads_rows(x: Any, pad: Sequence[int], value: float = 0.0) -> bool:
    is_along_first = len(pad) == 2 * x.dim() and not any(pad[:-2])
    return isinstance(x, MCFTensor) and is_along_first and value == 0


def _padded(x: MCFTensor, pad: Sequence[int], value: float = 0.0) -> MCFTensor:
    """Return x with more rows of zeros, which DTensors need for uneven shards."""
    padded = [F.pad(t, [*[0] * (2 * t.dim() - 2), *pad[-2:]]) for t in x._read()]
    return x._like(padded, own=True)


def _wide(x: Any) -> Any:
    """Return floats in float64; without it in float32, rounded to odd, to be rounded once more."""
    if isinstance(x, float):
        return machine_number(x).item()
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if widest(x.device) == torch.float64:
        return plainly(x, torch.float64)
    return Sum(x._format.decode(x._read()) if isinstance(x, MCFTensor) else [x]).to_odd()


def _in_shape(target: MCFTensor, source: Any) -> Tensor:
    """Return a tensor or number as plain numbers, broadcast to the shape of the target."""
    numbers = plain(source if type(source) is Tensor else _wide(source))
    dtype = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    template = target._format.template(target._held()[0])
    return torch.empty_like(template, dtype=dtype).copy_(numbers)


def _replace_rows(target: MCFTensor, components: Sequence[Tensor]) -> None:
    """Replace the components, and drop the deferred factor of the old ones."""
    factor = target._factor
    assert factor is not None
    if target.is_part:
        factor.apply()
    overwrite(target._held(), components)
    factor.value = 1.0
