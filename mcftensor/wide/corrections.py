"""Corrections of float64 results by what float64 lacks of the arguments.

Elements of elementwise functions with an argument that float64 rounds are evaluated again, on all
terms, by the algorithm for formats beyond 48 bits. A function without such an algorithm is
corrected by the rest r of its argument, f(x + r) = f(x) + r f'(x). Functions of differences are
evaluated again as a whole, by the rules in `differences.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import expansions, leaves, mapped, named_arguments
from mcftensor.dispatch.rounded_arguments import WidenedArguments, are_rests, places_of_rests
from mcftensor.dispatch.system import WIDE, evaluated
from mcftensor.formats import Format
from mcftensor.passes.format_conversion import rest_of
from mcftensor.tensor import MCFTensor
from mcftensor.wide import differences
from mcftensor.wide.beyond_float64 import by_algorithm

aten = torch.ops.aten

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
def are_corrected(func: Any) -> bool:
    """Return whether results of an operation are corrected."""
    return func in differences.RULES or is_elementwise(func)


def is_elementwise(func: Any) -> bool:
    """Return whether an operation is an elementwise function that a rounded argument changes."""
    return (
        func is not None
        and func.overloadpacket not in _INSENSITIVE
        and (torch.Tag.pointwise in func.tags or func.overloadpacket in _UNTAGGED)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def from_all_terms(numbers: WidenedArguments, result: Any) -> Any:
    """Return the results of a function on all terms of its arguments, which have rests.

    Given are the results for arguments rounded to float64, which may be changed in place. The
    results of functions of differences may be expansions.
    """
    func, args, kwargs = numbers.call
    if func not in differences.RULES:
        return _of_elements(numbers, result)
    is_spread = func in differences.OF_SPREADS and all(x.numel() for x in numbers.of.values())
    if not is_spread and not are_rests(numbers.rests.values()):
        return result
    return differences.RULES[func](func, named_arguments(func, args, kwargs))


def _of_elements(numbers: WidenedArguments, result: Tensor) -> Tensor:
    """Correct a float64 result where an argument has a rest, in place.

    The rest of an argument changes most values by a few bits, which two terms of Taylor's series
    give. The other values come from the algorithm for longer formats.
    """
    func, args, kwargs = numbers.call
    args = list(args)
    shape, given = result.shape, expansions((args, kwargs))
    found = [places_of_rests(x, shape) for x in numbers.rests.values()]
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
            exact = by_algorithm(func, longer, *options[0], **options[1])
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
