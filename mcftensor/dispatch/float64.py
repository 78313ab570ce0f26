"""Operations without a kernel of their own: evaluated in float64, and split into terms.

float64 holds every value of these formats to more bits than they promise, so that one evaluation
and one rounding give the format's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mcftensor.dispatch.operands import expansions, plainly, value_of
from mcftensor.dispatch.writing import assign, refusal, written_to
from mcftensor.formats import Format
from mcftensor.tensor import MCFTensor

WIDE = torch.float64
PRECISION = 48
"""Bits of the longest format that float64 serves; its five others cover the error of evaluating."""


def in_float64(func: Any, format: Format, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on float64 copies; its floating results become values.

    Tensors that it writes to, expansions or plain, get their results by one rounding.

    Raises:
        NotImplementedError: a result that is complex, or of another shape than where it goes.
    """
    found = expansions((args, kwargs))
    copies: dict[int, Tensor] = {}
    asked: list[torch.dtype] = []

    def widen(x: Any) -> Any:
        if isinstance(x, torch.dtype) and x.is_floating_point:
            asked.append(x)
            return WIDE
        if not isinstance(x, Tensor) or not (isinstance(x, MCFTensor) or x.is_floating_point()):
            return x
        if x.layout != torch.strided:
            raise refusal(func, found, f"it meets a tensor of {x.layout}")
        if id(x) not in copies:
            copies[id(x)] = (
                x._collapsed(WIDE) if isinstance(x, MCFTensor) else x.to(WIDE, copy=True)
            )
        return copies[id(x)]

    written = [x for _, x in written_to(func, args, kwargs)]
    result = func(*tree_map(widen, args), **tree_map(widen, kwargs))
    written = [x for x in written if id(x) in copies]  # integers are written to as they are
    assign(func, written, [copies[id(x)] for x in written])
    originals = {id(copies[id(x)]): x for x in written}

    def narrow(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in originals:
            return originals[id(x)]
        if x.is_complex():
            raise refusal(func, found, "its result is complex")
        if not x.is_floating_point():
            return x
        if asked and asked[-1] != format.dtype:
            return plainly(x, asked[-1])
        return value_of(x, format)

    return tree_map(narrow, result)


def is_view(func: Any) -> bool:
    """Whether results share memory with arguments."""
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
