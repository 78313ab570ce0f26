"""Functions in float64, and once more where an argument has bits beyond float64.

Terms may lie far apart: 1e20 + 1 is a number of two float32 terms and no float64. Every function is
evaluated in float64. What float64 lacks of the arguments, the rests, is found here, and the wing
`wide` corrects the results by it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mcftensor.dispatch.operands import expansions, is_float, leaves, mapped
from mcftensor.dispatch.schemas import without_results
from mcftensor.dispatch.system import WIDE, may_round
from mcftensor.formats import Format, named
from mcftensor.kernels.columns import is_bare
from mcftensor.kernels.custom_ops import opaque
from mcftensor.passes.format_conversion import collapse_with_rest
from mcftensor.tensor import GradientTensor, MCFTensor
from mcftensor.wings import wing, wing_or_none

aten = torch.ops.aten


class WidenedArguments:
    """The arguments of an operation in float64, and what float64 lacks of them.

    Both are tensors by the ids of arguments. Only elementwise functions and functions of
    differences have rests, and while a compiler or a transform records them, the recorded operator
    finds the rests.
    """

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        is_recorded: bool,
        dtype: torch.dtype = WIDE,
    ) -> None:
        func, args, kwargs = without_results(func, args, kwargs)
        self.call = func, args, {name: x for name, x in kwargs.items() if name != "dtype"}
        long = [x for x in expansions((args, kwargs)) if may_round(x)]
        self._is_corrected = bool(long) and not long[0].is_meta and _are_corrected(func)
        self._has_rests = self._is_corrected and not is_recorded
        self._dtype = dtype
        self.of: dict[int, Tensor] = {}
        self.rests: dict[int, Tensor] = {}

    def enter(self, x: Tensor) -> Tensor:
        """Return an argument in float64, or another dtype, a copy of it."""
        if id(x) not in self.of:
            if not isinstance(x, MCFTensor):
                self.of[id(x)] = x.to(self._dtype, copy=True)
            elif self._has_rests and may_round(x):
                pair = collapse_with_rest(list(x._read()), x._format.name)
                self.of[id(x)], self.rests[id(x)] = pair
            else:
                self.of[id(x)] = x._collapsed(self._dtype)
        return self.of[id(x)]

    def corrected(self, result: Any) -> Any:
        """Return the results of a function on all terms of its arguments.

        Given are the results for arguments rounded to float64, which may be changed in place. The
        results of functions of differences may be expansions.
        """
        if not self._is_corrected:
            return result
        if isinstance(result, Tensor) and not is_float(result):
            return result
        if self._has_rests:
            wide = wing_or_none("wide")
            if wide is None and not are_rests(self.rests.values()):
                return result
            return wing("wide").from_all_terms(self, result)
        func, args, kwargs = self.call
        results, structure = tree_flatten(result)
        tensors: list[Tensor] = []

        def described(x: Any) -> Any:
            if not isinstance(x, Tensor):
                whole = isinstance(x, torch.SymInt)
                same = x is None or isinstance(x, (bool, str, int))
                return int(x) if whole else x if same else float(x)
            place = len(tensors)
            if isinstance(x, MCFTensor) and not isinstance(x, GradientTensor):
                tensors.extend(x._read())
                return f"@{place} {x._format.name}"
            tensors.append(x._component0 if isinstance(x, MCFTensor) else x)
            return f"@{place}"

        call = json.dumps([str(func), *mapped(described, (list(args), kwargs))])
        if wing("wide").correction_of(func) == "elements":
            return function_of_terms(result, tensors, call)
        pairs = iter(differences_of_terms([x for x in results if is_float(x)], tensors, call))
        longer = Format(WIDE, 2)
        results = [
            MCFTensor.of([next(pairs), next(pairs)], longer) if is_float(x) else x for x in results
        ]
        return tree_unflatten(results, structure)


def _are_corrected(func: Any) -> bool:
    """Return whether rests change the results of an operation; True where `wide` is missing."""
    wide = wing_or_none("wide")
    return wide is None or wide.correction_of(func) is not None


def is_recorded(tree: Any) -> bool:
    """Return whether a compiler or a transform sees the operation on some expansions."""
    return not is_bare([x._component0 for x in expansions(tree)])


def has_rests(tree: Any) -> bool:
    """Return whether float64 rounds elements of expansions; True where an operation is recorded."""
    long = [x for x in expansions(tree) if may_round(x)]
    if not long or is_recorded(long):
        return bool(long)
    return are_rests(collapse_with_rest(list(x._read()), x._format.name)[1] for x in long)


@opaque(lambda stored, source: [torch.empty_like(x[..., :1]) for x in stored], lays_out=True)
def first_if_rounded(stored: Sequence[Tensor], source: str) -> list[Tensor]:
    """Return the first elements along the last dimension, or zeros if float64 rounds no element."""
    first = [torch.empty_like(x[..., :1]).copy_(x[..., :1]) for x in stored]
    is_rounded = are_rests([collapse_with_rest(stored, source)[1]])
    return [torch.where(torch.isfinite(first[0]) & is_rounded, x, 0.0) for x in first]


def are_rests(rests: Iterable[Tensor]) -> bool:
    """Return whether some element has a finite rest other than zero."""
    return any(_has_bits(x) and len(places_of_rests(x, x.shape)) for x in rests)


def _has_bits(rest: Tensor) -> bool:
    """Return whether some rest has bits, by the largest and smallest patterns: the fastest way."""
    if not rest.numel():
        return False
    found = torch.aminmax(rest.view(torch.int16) if rest.dtype == torch.bfloat16 else rest)
    return any(x.item() for x in found)


@opaque(lambda result, tensors, call: torch.empty_like(result), lays_out=True)
def function_of_terms(result: Tensor, tensors: Sequence[Tensor], call: str) -> Tensor:
    """Return the corrected result of a call, which is the operator and its arguments as JSON.

    A tensor in the call is a text "@place format", with the place of its first component in
    `tensors`.
    """
    found: Tensor = _read_call(call, tensors).corrected(result.clone())
    return found


@opaque(
    lambda results, tensors, call: [torch.empty_like(x) for x in results for _ in range(2)],
    lays_out=True,
)
def differences_of_terms(
    results: Sequence[Tensor], tensors: Sequence[Tensor], call: str
) -> list[Tensor]:
    """Return the results of a call on all terms, each as a float64 number and its rest.

    The call is as in `function_of_terms`.
    """
    numbers = _read_call(call, tensors)
    pairs: list[Tensor] = []
    given = [x for x in tree_leaves(numbers.corrected([*results])) if is_float(x)]
    for x, like in zip(given, results, strict=True):
        terms = list(x._read()) if isinstance(x, MCFTensor) else [x]
        rest = sum(terms[1:], torch.zeros_like(like))
        pairs += [torch.empty_like(like).copy_(terms[0]), torch.empty_like(like).copy_(rest)]
    return pairs


def _read_call(call: str, tensors: Sequence[Tensor]) -> WidenedArguments:
    """Return the arguments of a call in float64."""

    def read(x: Any) -> Any:
        if not isinstance(x, str) or not x.startswith("@"):
            return x
        place, _, source = x[1:].partition(" ")
        if not source:
            return tensors[int(place)]
        count = len(named(source).components)
        return MCFTensor.of(tensors[int(place) :][:count], named(source))

    name, args, kwargs = mapped(read, json.loads(call))
    func = functools.reduce(getattr, name.split("."), torch.ops)
    numbers = WidenedArguments(func, args, kwargs, is_recorded=False)
    for x in leaves((args, kwargs)):
        if is_float(x):
            numbers.enter(x)
    return numbers


def places_of_rests(rest: Tensor, shape: torch.Size) -> Tensor:
    """Return the places of rests other than zero and NaN, in a flat tensor of a shape."""
    if not _has_bits(rest):
        return torch.empty(0, dtype=torch.int64, device=rest.device)
    flat = rest.broadcast_to(shape).reshape(-1)
    places = flat.nonzero()[:, 0]
    return places[torch.isfinite(flat[places])]
