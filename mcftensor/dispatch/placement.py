"""Operations that put elements into places of a tensor: the same operation on each term.

Numbers and plain tensors enter at full precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import (
    common_format,
    common_role,
    computes_plainly,
    expansions,
    leading,
    stored_in,
)
from mcftensor.dispatch.registry import implements
from mcftensor.formats import Format
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten

# What these call the elements that are put into `self`.
_SOURCES = ("src", "source", "values", "value")


def _elements(source: Any, format: Format, device: torch.device) -> Sequence[Any]:
    """What goes into each term; of a number Python floats, which compilers leave alone too."""
    if isinstance(source, torch.Tensor):
        return stored_in(source, format, device)
    with no_dispatch():
        return [term.item() for term in stored_in(float(source), format, torch.device("cpu"))]


@implements(
    aten.index_put,  # x.index_put, vmap of x[i] = value
    aten.index_put_,  # x[i] = value, x[mask] = value
    aten.put,  # x.put
    aten.put_,  # x.put_
    aten.scatter.src,  # x.scatter(0, i, tensor)
    aten.scatter.value,  # x.scatter(0, i, 1.0)
    aten.scatter_.src,  # x.scatter_(0, i, tensor)
    aten.scatter_.value,  # x.scatter_(0, i, 1.0)
    aten.masked_scatter,  # x.masked_scatter
    aten.masked_scatter_,  # x.masked_scatter_
    aten.index_copy,  # x.index_copy
    aten.index_copy_,  # x.index_copy_
    aten.index_fill,  # x.index_fill
    aten.index_fill_,  # x.index_fill_
    aten.select_scatter,  # torch.select_scatter, functionalized x[0] = value
    aten.slice_scatter,  # torch.slice_scatter, functionalized x[1:] = value
    aten.diagonal_scatter,  # torch.diagonal_scatter
    aten.as_strided_scatter,  # torch.as_strided_scatter
    aten.constant_pad_nd,  # F.pad
)
def place(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operation on each term."""
    named = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
    x = named.pop("self")
    source_name = next((name for name in _SOURCES if name in named), None)
    source = named.pop(source_name) if source_name else 0
    in_place = func._schema.name.endswith("_")
    if not in_place and computes_plainly((x, source)):
        return func(*leading(args), **leading(kwargs))
    if expansions(named) or named.get("accumulate") or (in_place and not isinstance(x, MCFTensor)):
        return compute(func, *args, **kwargs)
    format = x.format if in_place else common_format(func.overloadpacket.__name__, (x, source))
    name = source_name or "value"
    results = [
        func(term, **named, **{name: new})
        for term, new in zip(
            stored_in(x, format, x.device) if not in_place else x.components,
            _elements(source, format, x.device),
            strict=True,
        )
    ]
    return x if in_place else MCFTensor.of(results, format, common_role((x, source)), own=True)
