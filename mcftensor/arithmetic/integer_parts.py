"""Whole numbers and remainders of expansions: exact on all terms."""

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
from mcftensor.kernels.custom_ops import opaque
from mcftensor.kernels.result_layout import empty_terms
from mcftensor.kernels.without_float64 import has_float64

Terms = Sequence[Tensor]


def _is_odd(x: Tensor) -> Tensor:
    return torch.remainder(x, 2) == 1


def _rounded(term: Tensor, rest: Tensor, is_odd: Tensor) -> Tensor:
    """A term that is no whole number, to the nearest one; what follows it decides ties, or an even
    sum with the terms before."""
    below = torch.floor(term)
    middle = below + 0.5
    is_up = (rest > 0) | ((rest == 0) & (is_odd ^ _is_odd(below)))
    return below + ((term > middle) | ((term == middle) & is_up)).to(term.dtype)


# A whole number beside one that is none: by it, the leading term, what follows, whether what
# stands before is odd.
_PARTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "floor": lambda t, leading, rest, odd: torch.floor(t),
    "ceil": lambda t, leading, rest, odd: torch.ceil(t),
    "trunc": lambda t, leading, rest, odd: torch.where(leading < 0, torch.ceil(t), torch.floor(t)),
    "round": lambda t, leading, rest, odd: _rounded(t, rest, odd),
}


@opaque(lambda x, name: [torch.empty_like(t) for t in x], of_one=True)
def whole(x: Sequence[Tensor], name: str) -> list[Tensor]:
    """The floor, ceil, trunc or round (ties to even) of a normalized expansion, exactly; or its
    frac, x - trunc(x).

    The first term that is no whole number decides: those before it are kept, and those behind it
    are less than its distance to any whole number, or to the middle of two if it is not there.
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
    # What the terms come to where that is not finite, as of the largest number of float16.
    plain = leading - parts[0] if name == "frac" else functools.reduce(torch.add, parts)
    first, *tails = networks.settle(networks.distill(values, len(x)), plain)
    if name != "frac":
        first = torch.where(first == 0, torch.copysign(first, leading), first)
    return [first, *tails]


# --------------------------------------------------------------------------- as fractions


def _modulo(x: Fraction, y: Fraction, name: str) -> Fraction:
    """With the sign of y, or, of fmod, with that of x."""
    if name == "remainder":
        return x % y
    size = abs(x) % abs(y)
    return -size if x < 0 else size


def _at(terms: Terms, place: tuple[int, ...]) -> Fraction:
    return sum((Fraction(t[place].item()) for t in terms), Fraction(0))


_FLOATS = 8
"""Terms that hold every fraction whose bits lie within the range of float32."""


def _wide(x: Tensor) -> torch.dtype:
    """The type in which elements are computed."""
    return torch.float64 if has_float64(x.device) else torch.float32


def _put(x: Fraction, floats: Sequence[Tensor], place: tuple[int, ...]) -> None:
    """A fraction as floats, each the nearest to what remains."""
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
    """Normalized terms of a wide type as those of a base, rounded once."""
    if base == floats[0].dtype != torch.float64:
        return [x.clone() for x in networks.settle(networks.distill(floats, terms), floats[0])]
    if base == torch.float64:
        floats = [*floats, *[torch.zeros_like(floats[0])] * (terms - len(floats))][:terms]
        return [x.clone() for x in networks.settle(networks.distill(floats, terms), floats[0])]
    return [x.clone() for x in Sum(floats).split(base, terms)]


def _floats_of(base: torch.dtype, terms: int) -> int:
    return terms if base == torch.float64 else _FLOATS


@opaque(lambda x, decimals, base, terms: empty_terms(x, base, terms))
def decimals_of(x: Sequence[Tensor], decimals: int, base: torch.dtype, terms: int) -> list[Tensor]:
    """A normalized expansion rounded to decimals, ties to even, as terms of a base: the number as
    a fraction, rounded, and what that is, rounded once. Elements are computed one by one."""
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
    """`fmod` or `remainder` of normalized expansions, as terms of a base: exact where these hold
    the result, else rounded once.

    Where float64, or without it float32, holds both operands it computes fmod exactly. Other
    elements are computed as fractions, one by one.
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
    """Terms as two floats, the second of which is zero where the first is all."""
    if len(x) == 1:
        return x[0], torch.zeros_like(x[0])
    first, second = networks.settle(networks.distill(x, 2), x[0])
    return first, second
