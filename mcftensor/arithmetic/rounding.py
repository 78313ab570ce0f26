"""Rounding between machine floats, exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, NARROW
from mcftensor.arithmetic.noise import Noise
from mcftensor.kernels.custom_ops import opaque
from mcftensor.kernels.without_float64 import widest


def add_signed(a: Tensor, b: Tensor) -> Tensor:
    """a + b, keeping the sign of a zero a where b = 0."""
    return torch.where(b == 0, a, a + b)


def _make_odd(rounded: Tensor, error: Tensor) -> Tensor:
    """Turn a rounding to nearest into one to odd, given the error or a number of its sign.

    The error is the exact number minus the rounded one. An inexact result with an even last bit
    moves to its odd neighbour on the exact side, which is one up or down in the bit pattern.
    """
    bits = rounded.view(BASES[rounded.dtype].integer)
    odd = _on_the_side_of(error, rounded, bits | 1, (bits - 1) | 1)
    inexact = (error != 0) & torch.isfinite(error)
    return torch.where(inexact, odd, bits).view(rounded.dtype)


def _on_the_side_of(error: Tensor, x: Tensor, outward: Tensor, inward: Tensor) -> Tensor:
    """Select `outward` where an error points away from zero, else `inward`."""
    positive = torch.where(error > 0, outward, inward)
    return torch.where(torch.signbit(x), torch.where(error < 0, outward, inward), positive)


def add_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b rounded to odd: inexact sums get an odd last bit, so they can be rounded once more.

    Source: S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
    """
    s = a + b
    bb = s - a
    error = (a - (s - bb)) + (b - bb)
    return _make_odd(s, error)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to nearest even in `dtype`, once.

    PyTorch converts float64 and integers to bfloat16 and float16 through float32, with two
    roundings. Here the first step rounds to odd, which makes the second one correct.
    """
    if dtype in NARROW and not x.is_floating_point():
        x = collapse_odd([x])
    elif dtype in NARROW and x.dtype == torch.float64:
        nearest = x.to(torch.float32)
        x = _make_odd(nearest, torch.where(torch.isfinite(x), x - nearest.to(torch.float64), 0))
    return x.to(dtype)


def collapse_terms(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of normalized terms, rounded once to `dtype`."""
    leading, *tails = terms
    if dtype == leading.dtype:
        return leading.clone()
    if not tails:
        return round_to(leading, dtype)
    if dtype == torch.float64:
        return add_signed(leading.to(torch.float64), _sum_odd(tails))
    if torch.promote_types(leading.dtype, widest(leading.device)) == torch.float64:
        return round_to(_sum_odd(terms), dtype)
    nearest, error = _sum_in_float32(terms)
    return nearest if dtype == torch.float32 else _make_odd(nearest, error).to(dtype)


def _sum_odd(terms: Sequence[Tensor]) -> Tensor:
    """The sum of normalized terms in float64, rounded to odd, with the sign of the leading one."""
    total = terms[-1].to(torch.float64)
    for term in reversed(terms[:-1]):
        leading = term.to(torch.float64)
        total = torch.where(total == 0, leading, add_odd(leading, total))
    return total


def collapse_odd(terms: Sequence[Tensor]) -> Tensor:
    """The sum of normalized terms in float32, rounded to odd, so it can be rounded once more."""
    if len(terms) == 1:
        terms = as_floats(terms[0])
    if len(terms) == 1 and terms[0].dtype != torch.float64:
        return terms[0].to(torch.float32)
    if torch.promote_types(terms[0].dtype, widest(terms[0].device)) == torch.float32:
        return _make_odd(*_sum_in_float32(terms))
    total = _sum_odd(terms)
    nearest = total.to(torch.float32)
    return _make_odd(nearest, total - nearest.to(torch.float64))


def _sum_in_float32(terms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum normalized terms of at most 32 bits to float32; return the sum and its error.

    The error may be any number of its sign. A chain of exact sums from the last term on leaves the
    sum and errors. A second chain gathers the errors, and a third the errors of the second, of
    which the sign suffices.
    """
    x = [term.to(torch.float32) for term in terms]
    for first in range(3):
        for i in range(len(x) - 1, first, -1):
            a, b = x[i - 1], x[i]
            total = a + b
            bb = total - a
            x[i - 1], x[i] = total, (a - (total - bb)) + (b - bb)
    rest = x[1] if len(x) == 2 else _make_odd(x[1], x[2])
    total = add_signed(x[0], rest)
    bb = total - x[0]
    error = (x[0] - (total - bb)) + (rest - bb)
    finite = torch.isfinite(total)
    leading = terms[0].to(torch.float32)
    total = torch.where(finite, torch.copysign(total, leading), leading)
    return total, torch.where(finite, error, 0)


def _to_precision(x: Tensor, base: torch.dtype) -> Tensor:
    """Round x once to nearest even at the precision of a base, where the result is normal."""
    if x.dtype == torch.float64 and base in NARROW:
        dropped = 53 - BASES[base].precision
        bits = x.view(torch.int64)
        half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
        x = (((bits + half) >> dropped) << dropped).view(torch.float64)
    return x.to(base)


def as_floats(x: Tensor) -> list[Tensor]:
    """Convert a plain tensor to floats, leading one first.

    Integers become up to two float64 tensors, or up to three float32 tensors without float64.
    """
    if x.is_floating_point():
        return [x]
    wide = widest(x.device)
    floats = [x.to(wide)]
    while x.dtype.itemsize >= wide.itemsize and len(floats) < 64 // torch.finfo(wide).bits + 1:
        x = x - floats[-1].to(x.dtype)
        floats.append(x.to(wide))
    return floats


def split_terms(
    x: Tensor, base: torch.dtype, terms: int, noise: Noise | None = None
) -> list[Tensor]:
    """Return x as `terms` normalized terms of dtype `base`.

    The last term is rounded to nearest, or by noise if given.
    """
    if x.dtype == base or x.dtype.itemsize < base.itemsize:
        return [x.to(base, copy=True), *(torch.zeros_like(x, dtype=base) for _ in range(terms - 1))]
    return peel(round_to_terms(x, base, terms, noise), base, terms)


def round_to_terms(x: Tensor, base: torch.dtype, terms: int, noise: Noise | None = None) -> Tensor:
    """Round x, of a wider dtype than `base`, to a sum of `terms` terms, returned as one number.

    Each term is rounded and x is subtracted from it, exactly, so the next term has the other sign.
    The terms need not be normalized: a term that rounds onto a tie next to an odd term before it
    (one in a thousand) leaves that term off by an ulp. So the next term is subtracted again, and
    `peel` splits the difference. A zero keeps its sign, as -0 - (-0 - -0) = -0.
    """
    wide = torch.float32 if noise is None else widest(x.device)
    x = x.to(torch.promote_types(x.dtype, wide))
    rounded = []
    for _ in range(terms - 1):
        rounded.append(x.to(base).to(x.dtype))
        x = torch.nan_to_num(rounded[-1] - x, 0.0, 0.0, 0.0)
    last = round_to(x, base)
    if noise is not None:
        last = move(last, _remainder(x, last), noise)
    x = last.to(x.dtype)
    for term in reversed(rounded):
        x = term - x
    # Noise may cancel the least number above zero.
    return x if noise is None else torch.copysign(x, rounded[0])


def peel(x: Tensor, base: torch.dtype, terms: int) -> list[Tensor]:
    """Split a result of `round_to_terms` into normalized terms; the remainder fits the last one."""
    peeled = []
    for _ in range(terms - 1):
        peeled.append(_to_precision(x, base))
        x = _remainder(x, peeled[-1])
    return [*peeled, narrow(x, base)]


@opaque(lambda x, dtype: torch.empty_like(x, dtype=dtype), lays_out=True)
def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert numbers that a narrower dtype holds exactly; compiled kernels omit the rounding."""
    return x.to(dtype)


def move(x: Tensor, remainder: Tensor, noise: Noise) -> Tensor:
    """Return x + remainder rounded by noise: x, or its neighbour on the side of the remainder.

    The neighbour is taken where the noise is below the remainder divided by the distance to it, so
    that the mean is x + remainder.
    """
    bits = x.view(BASES[x.dtype].integer)
    neighbour = _on_the_side_of(remainder, x, bits + 1, bits - 1).view(x.dtype)
    least = torch.ones_like(bits).view(x.dtype)
    neighbour = torch.where(x == 0, torch.copysign(least, remainder.to(x.dtype)), neighbour)
    if widest(x.device) == torch.float32:
        way = neighbour.to(torch.float32) - x.to(torch.float32)
        return torch.where(noise.is_below(remainder.to(torch.float32) / way), neighbour, x)
    way = neighbour.to(torch.float64) - x.to(torch.float64)
    return torch.where(noise.uniform() < remainder.to(torch.float64) / way, neighbour, x)


def split_by_noise(x: Tensor, levels: Sequence[Tensor], noise: Noise) -> list[Tensor]:
    """Return a sum of float32 levels as two bfloat16 terms, the second rounded by noise.

    `x` is the sum of the levels, rounded to float32. In the mean, the terms also keep what it lost.
    A float32 ends in 16 bits that bfloat16 lacks; noise is added to them, and a carry rounds up.
    """
    leading = x.to(torch.bfloat16).to(torch.float32)
    tail = levels[0] - leading
    for level in levels[1:]:
        tail = tail + level
    bits = torch.nan_to_num(tail, 0.0, 0.0, 0.0).view(torch.int32) + noise.bits(16)
    tail = (bits & -(1 << 16)).view(torch.float32)
    # A neighbour if the tail is a tie now. A zero gets no sign.
    first = (leading + tail + 0.0).to(torch.bfloat16)
    tail = tail - (first.to(torch.float32) - leading)
    return [first, narrow(torch.nan_to_num(tail, 0.0, 0.0, 0.0), torch.bfloat16)]


def quiet(x: Tensor) -> Tensor:
    """Replace every NaN by the same one, since processors produce NaNs of either sign."""
    return torch.nan_to_num(x, torch.nan, torch.inf, -torch.inf)


def _remainder(x: Tensor, term: Tensor) -> Tensor:
    """x - term, exactly; zero where a term is not finite."""
    return torch.nan_to_num(x - term.to(x.dtype), 0.0, 0.0, 0.0)
