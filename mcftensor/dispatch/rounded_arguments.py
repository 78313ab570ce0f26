"""Elementwise functions in float64, and once more where an argument has bits beyond float64.

Terms may lie far apart: 1e20 + 1 is a number of two float32 terms and no float64. Every element is
evaluated in float64. Elements with an argument that float64 rounds are evaluated again, on all
terms, by the algorithm for formats beyond 48 bits. A function without such an algorithm is
corrected by the rest r of its argument, f(x + r) = f(x) + r f'(x).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic import special_functions
from mcftensor.dispatch import beyond_float64
from mcftensor.dispatch.operands import expansions, leaves, mapped
from mcftensor.dispatch.write_results import without_results, written_to
from mcftensor.formats import Format, named
from mcftensor.kernels.custom_ops import opaque
from mcftensor.passes.format_conversion import collapse_with_rest, rest_of
from mcftensor.tensor import GradientTensor, MCFTensor

aten = torch.ops.aten

WIDE = torch.float64

# Functions that PyTorch evaluates in float64 with larger errors than 48 bits allow.
_SHARPER: dict[Any, Callable[..., Tensor]] = {
    aten.binary_cross_entropy_with_logits: special_functions.binary_cross_entropy_with_logits,
    aten.digamma: special_functions.digamma,
    aten.gelu: special_functions.gelu,
    aten.gelu_backward: special_functions.gelu_backward,
    aten.igammac: special_functions.igammac,
    aten.igammac_: special_functions.igammac,
    aten._log_softmax: special_functions.log_softmax,
    aten.logaddexp2: special_functions.logaddexp2,
    aten.logit: special_functions.logit,
    aten.logsumexp: special_functions.logsumexp,
    aten.polygamma: special_functions.polygamma,
    aten.polygamma_: lambda x, n: special_functions.polygamma(n, x),
    aten.sinc: special_functions.sinc,
    aten.soft_margin_loss: special_functions.soft_margin_loss,
    aten.special_log_ndtr: special_functions.log_ndtr,
    aten.special_zeta: special_functions.zeta,
}


def evaluated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on float64 tensors, with errors that 48 bits allow."""
    sharper = _SHARPER.get(func.overloadpacket)
    if sharper is None:
        return func(*args, **kwargs)
    targets = written_to(func, tuple(args), kwargs)
    options = {name: x for name, x in kwargs.items() if not any(x is y for y in targets)}
    result = sharper(*args, **options)
    return targets[0].resize_(result.shape).copy_(result) if targets else result


class WidenedArguments:
    """The arguments of an operation in float64, and what float64 lacks of them.

    Both are tensors by the ids of arguments. Only elementwise functions have rests, and while a
    compiler or a transform records them, the recorded operator finds the rests.
    """

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], is_recorded: bool
    ) -> None:
        self.call = without_results(func, args, kwargs)
        long = [x for x in expansions(self.call[1:]) if _is_long(x)]
        self._is_corrected = _is_function(self.call[0]) and bool(long)
        self._has_rests = self._is_corrected and not is_recorded
        self.of: dict[int, Tensor] = {}
        self.rests: dict[int, Tensor] = {}

    def enter(self, x: Tensor) -> Tensor:
        """Return an argument in float64, a copy of it."""
        if id(x) not in self.of:
            if not isinstance(x, MCFTensor):
                self.of[id(x)] = x.to(WIDE, copy=True)
            elif self._has_rests and _is_long(x):
                pair = collapse_with_rest(list(x._read()), x._format.name)
                self.of[id(x)], self.rests[id(x)] = pair
            else:
                self.of[id(x)] = x._collapsed(WIDE)
        return self.of[id(x)]

    def subtract_largest(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor | None]:
        """Return the arguments of a function of differences with its first one less its largest
        elements, and these if they are to be added to the result.
        """
        func, own = self.call[0], self.call[1]
        if func not in _OF_DIFFERENCES or not own or not _is_long(own[0]):
            return args, None
        dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
        x = own[0]
        below, largest = below_largest(list(x._read()), x._format.name, list(dims))
        return (below, *args[1:]), largest if func is aten.logsumexp.default else None

    def corrected(self, result: Any) -> Any:
        """Return the result of an elementwise function on all terms of its arguments.

        Given is the function of arguments rounded to float64, which may be changed in place.
        """
        func, args, kwargs = self.call
        is_float = isinstance(result, Tensor) and result.is_floating_point()
        if not self._is_corrected or not is_float or result.is_meta:
            return result
        if self._has_rests:
            return _corrected(self, result)
        tensors: list[Tensor] = []

        def described(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x if x is None or isinstance(x, (bool, str, int)) else float(x)
            place = len(tensors)
            if isinstance(x, MCFTensor) and not isinstance(x, GradientTensor):
                tensors.extend(x._read())
                return f"@{place} {x._format.name}"
            tensors.append(x._component0 if isinstance(x, MCFTensor) else x)
            return f"@{place}"

        call = json.dumps([str(func), *mapped(described, (list(args), kwargs))])
        return function_of_terms(result, tensors, call)


_OF_DIFFERENCES = {
    aten._softmax.default,
    aten._log_softmax.default,
    aten.logsumexp.default,
}
"""Functions that depend on the differences of elements, except for a summand."""


@opaque(
    lambda stored, source, dims: [
        torch.empty_like(stored[0], dtype=WIDE),
        torch.empty_like(stored[0], dtype=WIDE).sum(dims, keepdim=True),
    ],
    lays_out=True,
)
def below_largest(stored: Sequence[Tensor], source: str, dims: list[int]) -> list[Tensor]:
    """Return the differences of elements from the largest ones along dimensions, and these.

    The largest elements count as 0 if they are not finite, and if float64 rounds no number.
    """
    number, rest = collapse_with_rest(stored, source)
    if not stored[0].numel() or not len(_places(rest, rest.shape)):
        return [number, torch.zeros_like(number.sum(dims, keepdim=True))]
    largest = number.amax(dims, keepdim=True)
    if rest.dtype != WIDE:
        rest = rest_of(number, stored)
    most = rest.masked_fill(number != largest, -torch.inf).amax(dims, keepdim=True)
    difference = (number - largest) + (rest - most)
    is_finite = torch.isfinite(largest)
    difference = torch.where(is_finite & torch.isfinite(number), difference, number)
    return [difference, torch.where(is_finite, largest, 0.0)]


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


@functools.lru_cache(maxsize=4096)
def _is_function(func: Any) -> bool:
    return (
        func is not None
        and func.overloadpacket not in _INSENSITIVE
        and (torch.Tag.pointwise in func.tags or func is aten.hardswish.default)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _is_long(x: MCFTensor) -> bool:
    """Return whether float64 may round the elements of an expansion."""
    return x._format.exceeds_float64 and not isinstance(x, GradientTensor)


@opaque(lambda result, tensors, call: torch.empty_like(result), lays_out=True)
def function_of_terms(result: Tensor, tensors: Sequence[Tensor], call: str) -> Tensor:
    """Return the corrected result of a call, which is the operator and its arguments as JSON.

    A tensor in the call is a text "@place format", with the place of its first component in
    `tensors`.
    """

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
        if isinstance(x, MCFTensor) or (isinstance(x, Tensor) and x.is_floating_point()):
            numbers.enter(x)
    return _corrected(numbers, result.clone())


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
    bits = rest.view(torch.int16) if rest.dtype == torch.bfloat16 else rest  # counted faster
    if not torch.count_nonzero(bits):
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
