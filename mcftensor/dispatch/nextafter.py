"""torch.nextafter: the neighbour of a number among those that the format holds.

The precision of a format is not fixed: the neighbour of 1 in `bf16x2` is 1 + 2^-133, with the
smallest number of the base as its tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.ordering import equal, less
from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import common_format, expansions, stored_in
from mcftensor.dispatch.registry import implements
from mcftensor.dispatch.stored import of_terms
from mcftensor.kernels.opaque import opaque
from mcftensor.passes import expansion
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten
Terms = Sequence[Tensor]


@opaque(lambda x, towards: torch.empty_like(x))
def _neighbour(x: Tensor, towards: Tensor) -> Tensor:
    """torch.nextafter, which compilers evaluate in float32 for a base of 16 bits."""
    return torch.nextafter(x, towards)


@implements(aten.nextafter.default)  # torch.nextafter
@of_terms
def nextafter(func: Any, x: Any, y: Any) -> Any:
    """The next number after x towards y."""
    found = expansions((x, y))
    if all(e.role == "parameter" for e in found):
        return compute(func, x, y)
    format = common_format("nextafter", found)
    x, y = (stored_in(operand, format, found[0].device) for operand in (x, y))
    x, y = zip(*(torch.broadcast_tensors(a, b) for a, b in zip(x, y, strict=True)), strict=True)
    up = less(x, y)
    towards = torch.where(up, torch.inf, -torch.inf).to(format.dtype)
    near = _stepped(x, towards)
    for _ in range(len(x) - 1):  # where the leading terms have changed, gaps may be halved
        nearer = _stepped(near, -towards)
        beyond = torch.where(up, less(x, nearer), less(nearer, x))
        near = [torch.where(beyond, a, b) for a, b in zip(nearer, near, strict=True)]
    plain = [_neighbour(x[0], y[0]), *(torch.zeros_like(t) for t in x[1:])]
    stays = equal(x, y) | torch.isnan(x[0]) | torch.isnan(y[0])
    chosen = []
    for whole, old, new in zip(plain, y, near, strict=True):
        new = torch.where(torch.isfinite(x[0]), new, whole)
        chosen.append(torch.where(stays, torch.where(torch.isnan(x[0]), whole, old), new))
    return MCFTensor.of(chosen, format)


def _stepped(x: Terms, towards: Tensor) -> list[Tensor]:
    """The last term moved on to its neighbour, and the whole normalized."""
    return list(expansion.renormalize([*x[:-1], _neighbour(x[-1], towards)], len(x)))
