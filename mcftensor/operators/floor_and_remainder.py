"""Whole numbers and remainders on all terms: exact, or rounded once if not representable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.integer_parts import decimals_of, modulo, whole
from mcftensor.dispatch.default_handler import of_values
from mcftensor.dispatch.operands import common_format, entered, expansions, selected, stored_in
from mcftensor.dispatch.registry import implements
from mcftensor.formats import named
from mcftensor.kernels.without_float64 import format_of_numbers
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


@implements(
    aten.floor.default,  # x.floor
    aten.ceil.default,  # x.ceil
    aten.trunc.default,  # x.trunc, x.fix
    aten.round.default,  # x.round
    aten.round.decimals,  # x.round(decimals=2)
    aten.frac.default,  # x.frac
)
@of_values
def to_whole(func: Any, x: MCFTensor, *, decimals: int = 0) -> Any:
    """Return elements rounded to whole numbers or decimals, or without their whole part."""
    format, terms = x.format, list(x._read())
    if decimals:
        found = decimals_of(terms, decimals, format.dtype, len(terms))
    else:
        found = whole(terms, func.overloadpacket.__name__)
    return selected(found, format, "value", [x])


def _terms(x: Any, device: torch.device) -> list[Tensor]:
    """Return an operand as floats whose sum it is."""
    if isinstance(x, MCFTensor):
        return list(x._read())
    if isinstance(x, Tensor) and not x.is_floating_point():
        return stored_in(x, named(format_of_numbers(device)), device)
    return entered(x, device)[1]


@implements(
    aten.fmod.Scalar,  # x.fmod(3)
    aten.fmod.Tensor,  # x.fmod(y)
    aten.remainder.Scalar,  # x % 3
    aten.remainder.Tensor,  # x % y
    aten.remainder.Scalar_Tensor,  # 3 % x
)
@of_values
def to_remainder(func: Any, x: Any, y: Any) -> Any:
    """Return remainders. Numbers and plain tensors are not rounded to the format first."""
    name = func.overloadpacket.__name__
    format = common_format(name, (x, y))
    device = expansions((x, y))[0].device
    a, b = (_terms(z, device) for z in (x, y))
    found = modulo(a, b, name, format.dtype, len(format.components))
    return selected(found, format, "value", (x, y))
