"""Functions in float64, and once more where an argument has bits beyond float64.

Terms may lie far apart: 1e20 + 1 is a number of two float32 terms and no float64. Every function is
evaluated in float64. Elements of elementwise functions with an argument that float64 rounds are
evaluated again, on all terms, by the algorithm for formats beyond 48 bits. A function without such
an algorithm is corrected by the rest r of its argument, f(x + r) = f(x) + r f'(x). Functions of
differences are evaluated again as a whole, by the rules in `differences.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mcftensor.dispatch import beyond_float64, differences
from mcftensor.dispatch.in_float64 import WIDE, evaluated
from mcftensor.dispatch.operands import expansions, leaves, mapped, named_arguments
from mcftensor.dispatch.write_results import without_results
from mcftensor.formats import Format, named
from mcftensor.kernels.columns import is_bare
from mcftensor.kernels.custom_ops import opaque
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.passes.format_conversion import collapse_with_rest, rest_of
from mcftensor.tensor import GradientTensor, MCFTensor

aten = torch.ops.aten


class WidenedArguments:
    """The arguments of an operation in float64, and what float64 lacks of them.

    Both are tensors by the ids of arguments. Only elementwise functions and functions of
    differences have rests, and while a compiler or a transform records them, the recorded operator
    finds the rests.
    """

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], is_recorded: bool
    ) -> None:
        func, args, kwargs = without_results(func, args, kwargs)
        self.call = func, args, {name: x for name, x in kwargs.items() if name != "dtype"}
        long = [x for x in expansions((args, kwargs)) if is_long(x)]
        is_function = func in differences.RULES or _is_function(func)
        self._is_corrected = is_function and bool(long) and not long[0].is_meta
        self._has_rests = self._is_corrected and not is_recorded
        self.of: dict[int, Tensor] = {}
        self.rests: dict[int, Tensor] = {}

    def enter(self, x: Tensor) -> Tensor:
        """Return an argument in float64, a copy of it."""
        if id(x) not in self.of:
            if not isinstance(x, MCFTensor):
                self.of[id(x)] = x.to(WIDE, copy=True)
            elif self._has_rests and is_long(x):
                pair = collapse_with_rest(list(x._read()), x._format.name)
                self.of[id(x)], self.rests[id(x)] = pair
            else:
                self.of[id(x)] = x._collapsed(WIDE)
        return self.of[id(x)]

    def corrected(self, result: Any) -> Any:
        """Return the results of a function on all terms of its arguments.

        Given are the results for arguments rounded to float64, which may be changed in place. The
        results of functions of differences may be expansions.
        """
        if not self._is_corrected:
            return result
        func, args, kwargs = self.call
        is_elementwise = func not in differences.RULES
        if is_elementwise and not result.is_floating_point():
            return result
        if self._has_rests:
            return _corrected(self, result) if is_elementwise else self._of_differences(result)
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
        if is_elementwise:
            return function_of_terms(result, tensors, call)
        pairs = iter(differences_of_terms([x for x in results if _is_float(x)], tensors, call))
        longer = Format(WIDE, 2)
        results = [
            MCFTensor.of([next(pairs), next(pairs)], longer) if _is_float(x) else x for x in results
        ]
        return tree_unflatten(results, structure)

    def _of_differences(self, result: Any) -> Any:
        """Return the results of a function of differences on all terms, if there are rests."""
        func, args, kwargs = self.call
        is_spread = func in differences.OF_SPREADS and all(x.numel() for x in self.of.values())
        if not is_spread and not _are_rests(self.rests.values()):
            return result
        return differences.RULES[func](func, named_arguments(func, args, kwargs))


def is_recorded(tree: Any) -> bool:
    """Return whether a compiler or a transform sees the operation on some expansions."""
    return not is_bare([x._component0 for x in expansions(tree)])


_INSENSITIVE = {
    aten.sign,
    aten.sgn,
    aten.rsqrt,
    aten.tanh,
    aten.atan,
    aten.asinh,
    aten.erf,
}
"""Functions with |x f'(x)| <= |f(x)|: an argument rounded to float64 changes them by 2^-53 of their
size at most."""

_UNTAGGED = {
    aten.elu_backward,
    aten.floor_divide,
    aten.hardshrink_backward,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.mish_backward,
    aten.softplus_backward,
    aten.softshrink_backward,
}
"""Elementwise functions that PyTorch does not tag as pointwise."""


@functools.lru_cache(maxsize=4096)
def _is_function(func: Any) -> bool:
    return (
        func is not None
        and func.overloadpacket not in _INSENSITIVE
        and (torch.Tag.pointwise in func.tags or func.overloadpacket in _UNTAGGED)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def is_long(x: MCFTensor) -> bool:
    """Return whether float64 may round the elements of an expansion."""
    is_kept = not x._format.exceeds_float64 or isinstance(x, GradientTensor)
    return not is_kept and has_float64(x.device)


def has_rests(tree: Any) -> bool:
    """Return whether float64 rounds elements of expansions; True where an operation is recorded."""
    long = [x for x in expansions(tree) if is_long(x)]
    if not long or is_recorded(long):
        return bool(long)
    return _are_rests(collapse_with_rest(list(x._read()), x._format.name)[1] for x in long)


@opaque(lambda stored, source: [torch.empty_like(x[..., :1]) for x in stored], lays_out=True)
def first_if_rounded(stored: Sequence[Tensor], source: str) -> list[Tensor]:
    """Return the first elements along the last dimension, or zeros if float64 rounds no element."""
    first = [torch.empty_like(x[..., :1]).copy_(x[..., :1]) for x in stored]
    is_rounded = _are_rests([collapse_with_rest(stored, source)[1]])
    return [torch.where(torch.isfinite(first[0]) & is_rounded, x, 0.0) for x in first]


def _are_rests(rests: Iterable[Tensor]) -> bool:
    return any(_has_bits(x) and len(_places(x, x.shape)) for x in rests)


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

    return _corrected(_read_call(call, tensors), result.clone())


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
    given = [x for x in tree_leaves(numbers.corrected([*results])) if _is_float(x)]
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
        if _is_float(x):
            numbers.enter(x)
    return numbers


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _corrected(numbers: WidenedArguments, result: Tensor) -> Tensor:
    """Correct a float64 result where an argument has a rest, in place.

    The rest of an argument changes most values by a few bits, which two terms of Taylor's series
    give. The other values come from the algorithm for longer formats.
    """
    func, args, kwargs = numbers.call
    args = list(args)
    shape, given = result.shape, expansions((args, kwargs))
    found = [_places(x, shape) for x in numbers.rests.values()]
    if not any(map(len, found)):
        return result
    places = found[0] if len(found) == 1 else torch.cat(found).unique()

    def taken(x: Tensor) -> Tensor:
        return x.to(result.device).broadcast_to(shape).reshape(-1)[places]

    terms = {id(x): [taken(y) for y in x._read()] for x in given}
    own = {
        id(x): taken(numbers.of.get(id(x), x))
        for x in leaves((args, kwargs))
        if isinstance(x, Tensor)
    }
    rests = {i: rest_of(own[i], terms[i]) for i in numbers.rests}

    def at(changed: dict[int, Tensor]) -> Tensor:
        chosen = own | changed
        options = mapped(lambda x: chosen.get(id(x), x), (args, kwargs))
        return evaluated(func, *options)

    value = taken(result)
    change, is_smooth = _by_taylor(at, value, own, rests)
    corrected = torch.where(is_smooth, value + change, value)
    is_hard = ~is_smooth | (change.abs() > _LARGEST_CHANGE * value.abs())
    hard = is_hard.nonzero()[:, 0]
    if len(hard):

        def of_hard(x: Any) -> Any:
            if isinstance(x, MCFTensor):
                return MCFTensor.of([y[hard] for y in terms[id(x)]], x._format)
            return taken(x)[hard] if isinstance(x, Tensor) else x

        options = mapped(of_hard, (args, kwargs))
        longer = Format(WIDE, max(2, *(len(x._format.components) for x in given)))
        try:
            exact = beyond_float64.by_algorithm(func, longer, *options[0], **options[1])
            corrected[hard] = exact._collapsed(WIDE)
        except NotImplementedError:
            beside = {
                i: torch.nextafter(own[i], own[i] + torch.sign(rest) * own[i].abs())
                for i, rest in rests.items()
            }
            corrected = torch.where(is_smooth, corrected, at(beside))
    if result.is_contiguous():
        result.view(-1)[places] = corrected
        return result
    return result.copy_(result.reshape(-1).index_put((places,), corrected).view(shape))


def _places(rest: Tensor, shape: torch.Size) -> Tensor:
    """Return the places of rests other than zero and NaN, in a flat tensor of a shape."""
    if not _has_bits(rest):
        return torch.empty(0, dtype=torch.int64, device=rest.device)
    flat = rest.broadcast_to(shape).reshape(-1)
    places = flat.nonzero()[:, 0]
    return places[torch.isfinite(flat[places])]


_STEP = -43
"""The exponent of the steps of difference quotients, relative to the argument.

Rests are at most 2^-53 of it, so that the rounding errors of differences do not matter.
"""

_LARGEST_CHANGE = 2.0**-20
"""The largest relative change by a rest for which two terms of Taylor's series suffice."""


def _by_taylor(
    at: Callable[[dict[int, Tensor]], Tensor],
    value: Tensor,
    numbers: dict[int, Tensor],
    rests: dict[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return r f'(x) + r² f''(x) / 2, summed over the arguments, and where steps are small enough.

    Steps are too large where slopes differ by more than 2^-16, as near singularities, and where
    rests are not small against the period of a periodic function.
    """
    change = torch.zeros_like(value)
    is_smooth = torch.ones_like(value, dtype=torch.bool)
    for i, rest in rests.items():
        x = numbers[i]
        step = torch.ldexp(torch.sign(rest), torch.frexp(x).exponent + _STEP)
        near, far = at({i: x + step}), at({i: x + 2 * step})
        first = near - value
        bend = (far - near) - first
        is_small = bend.abs() <= 2.0**-16 * first.abs() + 2.0**-50 * value.abs()
        is_constant = (near == value) & (far == value) | value.isnan() & near.isnan() & far.isnan()
        is_smooth &= (is_small & torch.isfinite(bend)) | is_constant
        part = torch.where((rest == 0) | is_constant, 0.0, rest / step)
        change += torch.where(part == 0, 0.0, part * (first + 0.5 * (part - 1) * bend))
    return change, is_smooth
