"""Tensors whose elements share scales: factories, copies, and what joins or places elements.

What only moves elements is a question to their format (`formats/moving.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcftensor.arithmetic.write_counts import moved
from mcftensor.dispatch.operands import mapped, overwrite, plain, plainly
from mcftensor.dispatch.storage_formats import on_numbers, store_numbers
from mcftensor.formats import PLAIN
from mcftensor.formats.moving import options_for
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.passes.format_conversion import recode
from mcftensor.tensor.tensor import MCFTensor


def share_scales(operands: Sequence[Any]) -> bool:
    """Whether there is a tensor whose elements share scales."""
    return any(isinstance(x, MCFTensor) and bool(x._format.shared) for x in operands)


def lends(x: MCFTensor) -> bool:
    """Whether it is a parameter of which a model may see other parts than rows."""
    return x._format.lends is not None and x.acts_as == "parameter"


def join_blocks(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """`cat` along the first dimension of tensors of one format; any other of numbers."""
    formats = {x._format.nearest if isinstance(x, MCFTensor) else None for x in tensors}
    if func is not torch.ops.aten.cat.default or dim not in (0, -tensors[0].dim()):
        return on_numbers(func, (tensors, dim), {})
    if len(formats) > 1:
        return on_numbers(func, (tensors, dim), {})
    parts: list[Any] = list(tensors)
    columns = zip(*(x._read() for x in parts), strict=True)
    return parts[0]._like([func(list(c)) for c in columns], own=True)


def made_in_blocks(
    func: Any, x: MCFTensor, shape: torch.Size, args: Any, kwargs: dict[str, Any]
) -> MCFTensor:
    """What a factory makes of each component, the result being of some shape; of a parameter one
    may ask for what has no rows."""
    is_like = func.overloadpacket.__name__.endswith("_like")
    if lends(x) and len(shape) < 2:
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
    """Of the same format a bare copy of whole tensors; otherwise one rounding."""
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
    """Numbers to nearest, which is no write that counts."""
    format = target._format.nearest
    numbers = _in_shape(target, source)
    _replace_rows(target, recode([numbers], PLAIN[numbers.dtype].name, format.name, None))


def place_in_blocks(func: Any, args: Any, kwargs: Any) -> Any:
    """What puts elements into places: in place to nearest, which is no write that counts."""
    if func is torch.ops.aten.constant_pad_nd.default and _pads_rows(*args, **kwargs):
        return _padded(*args)
    target = args[0]
    if not (func._schema.is_mutable and isinstance(target, MCFTensor) and share_scales([target])):
        return on_numbers(func, args, kwargs)
    copy = _wide(target)  # what is yet to be multiplied is, by an ordinary write
    func(copy, *mapped(_wide, args[1:]), **mapped(_wide, kwargs))
    set_blocks_(target, copy)
    return target


def _pads_rows(x: Any, pad: Sequence[int], value: float = 0.0) -> bool:
    is_along_first = len(pad) == 2 * x.dim() and not any(pad[:-2])
    return isinstance(x, MCFTensor) and is_along_first and value == 0


def _padded(x: MCFTensor, pad: Sequence[int], value: float = 0.0) -> MCFTensor:
    """More rows of zeros, which DTensors need where shards are uneven."""
    padded = [F.pad(t, [*[0] * (2 * t.dim() - 2), *pad[-2:]]) for t in x._read()]
    return x._like(padded, own=True)


def _wide(x: Any) -> Any:
    wide = torch.float64 if has_float64() else torch.float32
    return plainly(x, wide) if isinstance(x, Tensor) and x.is_floating_point() else x


def _in_shape(target: MCFTensor, source: Any) -> Tensor:
    """A tensor or number as plain numbers, which may be broadcast."""
    if isinstance(source, MCFTensor):
        numbers = source._collapsed(torch.float64 if has_float64(source.device) else torch.float32)
    else:
        numbers = plain(source)
    dtype = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    return torch.empty_like(target._held()[0], dtype=dtype).copy_(numbers)


def _replace_rows(target: MCFTensor, components: Sequence[Tensor]) -> None:
    """Other components, whatever the old ones were yet to be multiplied by."""
    factor = target._factor
    assert factor is not None
    if target.is_part:
        factor.settle()
    overwrite(target._held(), components)
    factor.value = 1.0
