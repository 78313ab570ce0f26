"""Rows of a matrix cut into slices: short numbers, whose products a machine sums without rounding.

A row has an exponent e, and all its elements are below 2^e in magnitude. Divided by 2^e, an element
is at most 1, and its first slice is that element rounded to a multiple of 2^(1 - w), where w is the
width. The remainder, at most 2^-w, is multiplied by 2^w and cut in the same way. So an element is
2^e times the sum of s_i 2^(-w i), where each slice s_i is an integer times 2^(1 - w) and at most 1
in magnitude.

**Exact products.** A product of two slices is an integer, at most 2^(2w - 2), times 2^(2 - 2w). A
sum of k of them is exact in a float of p bits, in any order and with any grouping, if k 2^(2w - 2)
<= 2^p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, power_of_two
from mcftensor.arithmetic.eft import two_sum as opaque_two_sum
from mcftensor.kernels.custom_ops import inline

two_sum = inline(opaque_two_sum)

LONGEST = {torch.float64: 1 << 40, torch.float32: 1 << 18}
"""The machine types that multiply slices, and the longest sums of products in them."""

_WIDEST = {torch.float64: 25, torch.float32: 9}
"""The largest w of slices. With 2w + 3 <= p, slices stay short (see `cut`). float32 slices of 9
bits are bfloat16 and TF32 numbers too, so that products remain exact if PyTorch replaces float32
products by products in these types."""

_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Width:
    """The bits of slices for products over an inner length.

    Attributes:
        machine: the type in which slices are multiplied.
        bits: w.
        together: the number of products of two slices whose sum is still exact.
    """

    machine: torch.dtype
    bits: int
    together: int


def width_for(inner: int, machine: torch.dtype) -> Width:
    """The widest slices whose products over an inner length are exact.

    Raises:
        ValueError: an inner length beyond `LONGEST`.
    """
    if inner > LONGEST[machine]:
        raise ValueError(
            f"matrix products in {machine} have an inner length of at most {LONGEST[machine]}, not "
            f"{inner}; add the products of shorter parts"
        )
    room = BASES[machine].precision + 2
    bits = min((room - (max(inner, 1) - 1).bit_length()) // 2, _WIDEST[machine])
    return Width(machine, bits, 2 ** (room - 2 * bits) // max(inner, 1))


def by_powers(x: Tensor, exponent: Tensor) -> Tensor:
    """x * 2^exponent, by three powers of two that do not overflow."""
    first = exponent // 3
    second = (exponent - first) // 2
    for part in (first, second, exponent - first - second):
        x = x * power_of_two(part, x.dtype)
    return x


def exponents(x: Tensor) -> Tensor:
    """Return the exponents of the rows of a matrix as a column of int32.

    All elements of a row are below 2^exponent in magnitude. Rows of zeros and rows with infinities
    or NaN have the exponent 0.
    """
    if x.shape[1] == 0:
        return torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
    largest = x.abs().amax(1, keepdim=True)
    return torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0)


def cut(terms: Sequence[Tensor], exponent: Tensor, width: Width, count: int) -> Tensor:
    """Return the first `count` slices of numbers.

    *Requires*: normalized terms of one shape, leading term first, finite, of the machine type;
    exponents of rows that broadcast to the shape.

    *Returns*: slices in the machine type, of shape (count, *shape).

    *Error*: the remainder of an element is at most 2^(exponent - w count) in magnitude, and slices
    are at most 1. Let R be the remainder before a cut, scaled to |R| <= 1 + 2^-w / 2, and r the sum
    of its terms from the last to the first, rounded: |r - R| <= 4u, with u = 2^-p of the machine
    type. r is rounded to the grid, to at most 1 in magnitude, so that the next R is at most 1 + 4u
    2^w. This is below 1 + 2^-w / 2, as 2w + 3 <= p.
    """
    shape = terms[0].shape
    scaled = [by_powers(x, -exponent).reshape(-1) for x in terms]
    slices = torch.empty(count, scaled[0].numel(), dtype=width.machine, device=terms[0].device)
    step, anchor = 2.0**width.bits, 1.5 * 2.0 ** (BASES[width.machine].precision - width.bits)
    for start in range(0, slices.shape[1], _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        left = [x[part] for x in scaled]
        for i in range(count):
            for j in reversed(range(len(left) - 1)):
                left[j], left[j + 1] = two_sum(left[j], left[j + 1])
            torch.sub(left[0] + anchor, anchor, out=slices[i, part])
            left[0] = left[0] - slices[i, part]
            left = [x * step for x in left]
    return slices.view(count, *shape)
