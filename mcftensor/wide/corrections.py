"""Corrections of float64 results by what float64 lacks of the arguments.

Elements of elementwise functions with an argument that float64 rounds are evaluated again, on all
terms, by the algorithm for formats beyond 48 bits. A function without such an algorithm is
corrected by the rest r of its argument, f(x + r) = f(x) + r f'(x).

The differences 1 and -1 of 1e20 + 1 and 1e20 - 1 from 1e20 are float64 numbers, and the elements
are not. So functions of differences, such as variances and losses, are evaluated again as a whole.
Where float64 rounds no element, variances and norms lose bits if a mean is large beside the
deviations from it. They are evaluated on the differences from the largest element of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mcftensor.dispatch.operands import expansions, is_float, leaves, mapped, named_arguments
from mcftensor.dispatch.rounded_arguments import WidenedArguments, are_rests, places_of_rests
from mcftensor.dispatch.system import WIDE, evaluated
from mcftensor.formats import Format
from mcftensor.kernels.without_float64 import widest
from mcftensor.passes.format_conversion import rest_of
from mcftensor.tensor import MCFTensor
from mcftensor.wide.beyond_float64 import DIFFERENCES, SPREADS, by_algorithm
from mcftensor.wide.elementary import nearest_value

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

_UNTAGGED = {aten.floor_divide, aten.hardswish}
"""Elementwise functions that PyTorch does not tag as pointwise, other than gradients."""


Correction = Literal["elements", "differences", "spread"]


@functools.lru_cache(maxsize=4096)
def correction_of(func: Any) -> Correction | None:
    """Return how results of an operation are corrected.

    None for results that a rounded argument does not change.
    """
    if func is None:
        return None
    packet = func.overloadpacket
    if func.namespace == "aten" and packet.__name__ in SPREADS:
        return "spread"
    if func.namespace == "aten" and packet.__name__ in DIFFERENCES:
        return "differences"
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags
    return None if is_drawn or packet in _INSENSITIVE or not _is_pointwise(func) else "elements"


def _is_pointwise(func: Any) -> bool:
    """Return whether an operation is elementwise: PyTorch does not tag all gradients."""
    if torch.Tag.pointwise in func.tags or func.overloadpacket in _UNTAGGED:
        return True
    name = func.overloadpacket.__name__
    if func.namespace != "aten" or not name.endswith("_backward"):
        return False
    forward: Any = getattr(aten, name.removesuffix("_backward"), None)
    return hasattr(forward, "default") and _is_pointwise(forward.default)


def from_all_terms(numbers: WidenedArguments, result: Any) -> Any:
    """Return the results of a function on all terms of its arguments, which have rests.

    Given are the results for arguments rounded to float64, which may be changed in place. The
    results of functions of differences may be expansions.
    """
    func, args, kwargs = numbers.call
    correction = correction_of(func)
    if correction == "elements":
        return _of_elements(numbers, result)
    if are_rests(numbers.rests.values()):
        return by_algorithm(func, longer_format((args, kwargs)), *args, **kwargs)
    if correction == "spread" and all(x.numel() for x in numbers.of.values()):
        return _below_largest(func, numbers)
    return result


def longer_format(operands: Any) -> Format:
    """Return a format that holds the differences of operands: float64 terms, where available."""
    found = expansions(operands)
    return Format(widest(found[0].device), max(2, *(len(x._format.components) for x in found)))


def in_longer_format(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with its floating operands as values of a longer format."""
    format = longer_format((args, kwargs))

    def enter(x: Any) -> Any:
        return nearest_value(x, format) if is_float(x) else x

    return func(*mapped(enter, args), **mapped(enter, kwargs))


def _below_largest(func: Any, numbers: WidenedArguments) -> Any:
    """Evaluate a variance or norm of float64 numbers on differences from the largest of each row.

    Means among the arguments and results are relative to the largest elements, too. A batch norm
    that does not train is evaluated on the differences from the running means.
    """
    given = mapped(
        lambda x: numbers.enter(x) if is_float(x) else x, named_arguments(func, *numbers.call[1:])
    )
    name = "self" if "self" in given else "input"
    x = rows = given[name]
    if not given.get("training", given.get("train", given.get("update", True))):
        mean = given["running_mean"]
        around = x - mean.reshape([-1, *[1] * (x.dim() - 2)])
        return _called(func, given | {name: around, "running_mean": torch.zeros_like(mean)})
    if "normalized_shape" in given:
        dims: Sequence[int] = range(-len(given["normalized_shape"]), 0)
    elif "group" in given:
        rows, dims = x.reshape(given["N"], given["group"], -1), [-1]
    elif name == "input":
        dims = [d for d in range(x.dim()) if d != 1]
    else:
        dims = given.get("dim") or range(x.dim())
    largest = rows.amax(tuple(dims), keepdim=True)
    largest = torch.where(torch.isfinite(largest), largest, 0.0)
    below = rows - largest
    means = {
        own: below.mean(tuple(dims)).reshape(given[own].shape)
        for own in ("mean", "save_mean")
        if own in given
    }
    result = _called(func, given | means | {name: below.reshape(x.shape)})
    if isinstance(result, Tensor) or "backward" in func._schema.name:
        return result
    moment, mean, *others = result
    return moment, largest.reshape(mean.shape) + mean, *others


def _called(func: Any, given: dict[str, Any]) -> Any:
    """Return an operation on copies of its arguments by their names."""
    own = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
    return evaluated(func, [], own)


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
