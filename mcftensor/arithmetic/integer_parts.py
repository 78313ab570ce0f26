"""Integer parts and remainders of expansions, exact on all terms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.kernels.custom_ops import empty_terms, opaque
from mcftensor.kernels.without_float64 import widest

Terms = Sequence[Tensor]


def _is_odd(x: Tensor) -> Tensor:
    return torch.remainder(x, 2) == 1


def _rounded(term: Tensor, rest: Tensor, is_odd: Tensor) -> Tensor:
    """Round a term that is not an integer to the nearest integer.

    The following term decides ties. If it is zero, a tie makes the sum with the terms before even.
    """
    below = torch.floor(term)
    middle = below + 0.5
    is_up = (rest > 0) | ((rest == 0) & (is_odd ^ _is_odd(below)))
    return below + ((term > middle) | ((term == middle) & is_up)).to(term.dtype)


# The integer part of a term that is not an integer, given the term, the leading term, the
# following term, and whether the sum of the terms before is odd.
_PARTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "floor": lambda t, leading, rest, odd: torch.floor(t),
    "ceil": lambda t, leading, rest, odd: torch.ceil(t),
    "trunc": lambda t, leading, rest, odd: torch.where(leading < 0, torch.ceil(t), torch.floor(t)),
    "round": lambda t, leading, rest, odd: _rounded(t, rest, odd),
}


@opaque(lambda x, name: [torch.empty_like(t) for t in x], of_one=True)
def whole(x: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return the floor, ceil, trunc, round (ties to even) or frac of an expansion, exactly.

    The expansion must be normalized. frac is x - trunc(x). The first term that is not an integer
    decides, and the terms before it are kept. The terms after it sum to less than its distance to
    the nearest integer, and to less than its distance to a midpoint of two integers, unless it is
    one.
    """
    part = _PARTS["trunc" if name == "frac" else name]
    leading, zero = x[0], torch.zeros_like(x[0])
    is_done, is_odd = torch.zeros_like(leading, dtype=torch.bool), torch.zeros_like(leading) != 0
    parts: list[Tensor] = []
    for i, term in enumerate(x):
        rest = x[i + 1] if i + 1 < len(x) else zero
        found = torch.where(torch.floor(term) == term, term, part(term, leading, rest, is_odd))
        parts.append(torch.where(is_done, zero, found))
        is_odd = is_odd ^ _is_odd(parts[-1])
        is_done = is_done | (torch.floor(term) != term)
    values = [*x, *(-p for p in parts)] if name == "frac" else parts
    # The plain result, for results that are not finite, such as next to the largest float16.
    plain = leading - parts[0] if name == "frac" else functools.reduce(torch.add, parts)
    first, *tails = networks.replace_nonfinite(networks.distill(values, len(x)), plain)
    if name != "frac":
        first = torch.where(first == 0, torch.copysign(first, leading), first)
    return [first, *tails]


# --------------------------------------------------------------------------- as fractions


def _modulo(x: Fraction, y: Fraction, name: str) -> Fraction:
    """The remainder with the sign of y, or, for fmod, with the sign of x."""
    if name == "remainder":
        return x % y
    size = abs(x) % abs(y)
    return -size if x < 0 else size


def _at(terms: Terms, place: tuple[int, ...]) -> Fraction:
    return sum((Fraction(t[place].item()) for t in terms), Fraction(0))


_FLOATS = 8
"""The number of terms that hold every fraction whose bits lie within the range of float32."""


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which elements are computed."""
    return widest(x.device)


def _put(x: Fraction, floats: Sequence[Tensor], place: tuple[int, ...]) -> None:
    """Write a fraction as floats, each the nearest to the remainder."""
    for column in floats:
        nearest = _nearest(x)
        if column.dtype == torch.float32:
            nearest = float(np.float32(nearest))
        column[place] = nearest
        x = x - Fraction(nearest) if math.isfinite(nearest) else Fraction(0)


def _nearest(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _split(floats: Sequence[Tensor], base: torch.dtype, terms: int) -> list[Tensor]:
    """Convert normalized terms of a wide type to terms of `base`, rounded once."""
    if base == floats[0].dtype != torch.float64:
        return [
            x.clone()
            for x in networks.replace_nonfinite(networks.distill(floats, terms), floats[0])
        ]
    if base == torch.float64:
        floats = [*floats, *[torch.zeros_like(floats[0])] * (terms - len(floats))][:terms]
        return [
            x.clone()
            for x in networks.replace_nonfinite(networks.distill(floats, terms), floats[0])
        ]
    return [x.clone() for x in Sum(floats).split(base, terms)]


def _floats_of(base: torch.dtype, terms: int) -> int:
    return terms if base == torch.float64 else _FLOATS


@opaque(lambda x, decimals, base, terms: empty_terms(x, base, terms))
def decimals_of(x: Sequence[Tensor], decimals: int, base: torch.dtype, terms: int) -> list[Tensor]:
    """Round a normalized expansion to `decimals` decimal places, ties to even.

    Each element is rounded as a fraction, and the fraction is rounded once to `terms` terms of
    `base`. Elements are computed one by one.
    """
    x = [t.to(_wide(t)) for t in x]
    floats = [x[0].clone(), *(torch.zeros_like(x[0]) for _ in range(_floats_of(base, terms) - 1))]
    for place in map(tuple, torch.nonzero(torch.isfinite(x[0])).tolist()):
        rounded = round(_at(x, place), decimals)
        _put(rounded, floats, place)
        if rounded == 0:
            floats[0][place] = math.copysign(0.0, x[0][place].item())
    return _split(floats, base, terms)


@opaque(lambda x, y, name, base, terms: empty_terms((*x, *y), base, terms))
def modulo(
    x: Sequence[Tensor], y: Sequence[Tensor], name: str, base: torch.dtype, terms: int
) -> list[Tensor]:
    """Return `fmod` or `remainder` of normalized expansions as terms of `base`.

    The result is exact if `terms` terms hold it, else it is rounded once. If float64, or float32
    without float64, holds both operands, it computes fmod exactly. Other elements are
    computed one by one as fractions.
    """
    shape = torch.broadcast_shapes(x[0].shape, y[0].shape)
    wide, device = _wide(x[0]), x[0].device
    x = [t.to(wide).broadcast_to(shape) for t in x]
    y = [t.to(wide).to(device).broadcast_to(shape) for t in y]
    (a, a_tail), (b, b_tail) = _in_two(x), _in_two(y)
    is_held = (a_tail == 0) & (b_tail == 0)
    is_special = ~torch.isfinite(a) | torch.isnan(b) | (b == 0)
    found = torch.fmod(a, b)
    first, second = found, torch.zeros_like(found)
    if name == "remainder":
        other = (found != 0) & (torch.signbit(found) != torch.signbit(b))
        total, error = networks.two_sum(found, b)
        first = torch.where(other, total, found)
        second = torch.where(other & torch.isfinite(total), error, second)
    slow = torch.nonzero(~is_held & ~is_special).tolist()
    if not slow:
        return _split([first, second], base, terms)
    rest = [torch.zeros_like(first) for _ in range(_floats_of(base, terms) - 2)]
    floats = [first.clone(), second.clone(), *rest]
    for place in map(tuple, slow):
        divisor, number = b[place].item(), _at(x, place)
        if math.isfinite(divisor):
            exact = _modulo(number, _at(y, place), name)
        elif name == "fmod" or number == 0 or (number < 0) == (divisor < 0):
            exact = number
        else:
            continue
        _put(exact, floats, place)
        if exact == 0:
            floats[0][place] = math.copysign(0.0, a[place].item())
    return _split(floats, base, terms)


def _in_two(x: Terms) -> tuple[Tensor, Tensor]:
    """Terms as two floats; the second is zero where the first is the whole number."""
    if len(x) == 1:
        return x[0], torch.zeros_like(x[0])
    first, second = networks.replace_nonfinite(networks.distill(x, 2), x[0])
    return first, second
