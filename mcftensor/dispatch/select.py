"""Comparisons, and the operations that choose between operands by them: exact on all terms.

Normalized expansions compare as their terms do, leading terms first. A number or plain tensor
enters rounded to the format, as it does beside a tensor of any other dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.ordering import choose, clamp, equal, less, maximum, minimum
from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import (
    common_format,
    common_role,
    computes_plainly,
    leading,
    store,
    stored_in,
)
from mcftensor.dispatch.registry import implements, register_forms
from mcftensor.dispatch.stored import of_terms
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten
Terms = Sequence[Tensor]


def _enter(name: str, operands: Sequence[Any]) -> list[Any]:
    """Operands as terms of their common format; None, a limit that is not given, stays None."""
    format = common_format(name, operands)
    device = next(x.device for x in operands if isinstance(x, MCFTensor))
    return [None if x is None else stored_in(x, format, device) for x in operands]


_COMPARISONS: dict[str, Callable[[Terms, Terms], Tensor]] = {
    "eq": equal,
    "ne": lambda x, y: ~equal(x, y),
    "lt": less,
    "gt": lambda x, y: less(y, x),
    "le": lambda x, y: less(x, y) | equal(x, y),
    "ge": lambda x, y: less(y, x) | equal(x, y),
}


def _register_comparison(name: str) -> None:
    @implements(getattr(aten, name).Tensor, getattr(aten, name).Scalar)  # x < y, x == 0
    @of_terms
    def compare(func: Any, x: Any, y: Any) -> Tensor:
        if computes_plainly((x, y)):
            return func(*leading((x, y)))
        return _COMPARISONS[name](*_enter(name, (x, y)))


for _name in _COMPARISONS:
    _register_comparison(_name)


@implements(aten.equal.default)  # torch.equal
@of_terms
def all_equal(func: Any, x: Any, y: Any) -> bool:
    """torch.equal."""
    if x.shape != y.shape:
        return False
    if computes_plainly((x, y)):
        return func(*leading((x, y)))
    return bool(equal(*_enter("equal", (x, y))).all())


def _abs(x: Terms) -> list[Tensor]:
    return choose(torch.signbit(x[0]), [-t for t in x], x)


def _neg(x: Terms) -> list[Tensor]:
    return [-t for t in x]


# aten's name: the choice between operands, each a list of terms of one format.
_CHOICES: dict[str, Callable[..., list[Tensor]]] = {
    "maximum": maximum,  # torch.maximum, amsgrad
    "minimum": minimum,  # torch.minimum, all_reduce
    "clamp": clamp,  # x.clamp
    "clamp_min": clamp,  # x.clamp_min, torch._foreach_maximum_
    "clamp_max": lambda x, high: clamp(x, None, high),  # x.clamp_max, torch._foreach_minimum_
    "abs": _abs,  # x.abs, Adamax
    "neg": _neg,  # -x, maximize
}


def _chosen(name: str, operands: Sequence[Any]) -> MCFTensor:
    chosen = _CHOICES[name](*_enter(name, operands))
    role = common_role(operands)
    return MCFTensor.of(chosen, common_format(name, operands), role, own=True)


def _register_choice(name: str) -> None:
    @of_terms
    def choice(func: Any, *args: Any) -> Any:
        return func(*leading(args)) if computes_plainly(args) else _chosen(name, args)

    @of_terms
    def choice_into(func: Any, *args: Any, out: Tensor | None = None) -> Any:
        target = args[0] if out is None else out
        store(target, _chosen(name, args))
        return target

    register_forms(name, choice, choice_into, choice_into)


for _name in _CHOICES:
    _register_choice(_name)


@implements(aten.where.self)  # torch.where, x.where
@of_terms
def where(func: Any, condition: Tensor, x: Any, y: Any) -> Any:
    """torch.where between expansions, and between an expansion and a plain tensor."""
    if isinstance(condition, MCFTensor):
        return compute(func, condition, x, y)
    if computes_plainly((x, y)):
        return func(condition, *leading((x, y)))
    return MCFTensor.of(
        choose(condition, *_enter("where", (x, y))),
        common_format("where", (x, y)),
        common_role((x, y)),
    )
