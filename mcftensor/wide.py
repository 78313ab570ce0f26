"""Arithmetic on expansions by evaluation in a wider machine type.

For bases of 16 bits a float32 (two terms) or float64 (three terms) register holds more bits than
the format promises. Evaluating there and splitting once is cheaper than a network in the base,
and sharper: half a unit of u² and little more. What matters is the order of sums: leading terms
first, `(xh + yh) + (xl + yl)`, so that a cancellation of leading terms is exact. Never
`(xh + xl) + (yh + yl)`, whose relative error has no bound.

Operands are lists of tensors, leading term first, of any floating dtype. Each function returns
one wide tensor, not yet split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from mcftensor import eft
from mcftensor.rounding import add_signed

# What a float32 register holds without loss.
_HELD = (torch.bfloat16, torch.float16, torch.float32)


class Held(list[Tensor]):
    """The terms of a result, and their sum, which the type that it was evaluated in holds."""

    def __init__(self, total: Tensor, terms: Sequence[Tensor]) -> None:
        super().__init__(terms)
        self.total = total

    def __neg__(self) -> Held:
        return Held(-self.total, [-term for term in self])


def levels(operand: Sequence[Tensor], wide: torch.dtype) -> list[Tensor]:
    """The terms of an operand in the wide type; a float64 or an integer takes two of float32."""
    entered = []
    for term in operand:
        leading = term.to(wide)
        entered.append(leading)
        if wide == torch.float32 and term.dtype not in _HELD:
            rest = (term.to(torch.float64) - leading).to(wide)
            entered.append(torch.nan_to_num(rest, 0.0, 0.0, 0.0))
    return entered


def total(x: Sequence[Tensor]) -> Tensor:
    """The sum of levels, last ones first."""
    result = x[-1]
    for level in reversed(x[:-1]):
        result = level + result
    return result


def enter(operand: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """An operand as one wide tensor, whose sign is that of the leading term, zeros included."""
    if isinstance(operand, Held) and operand.total.dtype == wide:
        return operand.total
    leading, *tails = levels(operand, wide)
    return torch.copysign(total([leading, *tails]), leading) if tails else leading


def sum_levels(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """x + y, level by level."""
    leading, *tails = [a if b is None else b if a is None else a + b for a, b in zip_longest(x, y)]
    return add_signed(leading, total(tails)) if tails else leading


def add(x: Sequence[Tensor], y: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """x + y: two roundings, neither where leading terms cancel."""
    return sum_levels(levels(x, wide), levels(y, wide))


def mul(x: Sequence[Tensor], y: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """x * y: three roundings."""
    return enter(x, wide) * enter(y, wide)


def div(x: Sequence[Tensor], y: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """x / y: three roundings."""
    return enter(x, wide) / enter(y, wide)


def sqrt(x: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """The square root of x: one and a half roundings."""
    return eft.sqrt(enter(x, wide))


def fma(x: Sequence[Tensor], y: Sequence[Tensor], z: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """x * y + z, in this order: the product meets the leading term of z."""
    return sum_levels(levels(z, wide), [mul(x, y, wide)])


def addcmul(
    x: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    value: Sequence[Tensor],
    wide: torch.dtype,
) -> Tensor:
    """x + value * a * b."""
    return sum_levels(levels(x, wide), [enter(value, wide) * enter(a, wide) * enter(b, wide)])


def addcdiv(
    x: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    value: Sequence[Tensor],
    wide: torch.dtype,
) -> Tensor:
    """x + value * a / b."""
    return sum_levels(levels(x, wide), [enter(value, wide) * enter(a, wide) / enter(b, wide)])


def lerp(
    x: Sequence[Tensor], end: Sequence[Tensor], weight: Sequence[Tensor], wide: torch.dtype
) -> Tensor:
    """x + weight * (end - x), from the nearer end."""
    start, stop, w = levels(x, wide), levels(end, wide), enter(weight, wide)
    difference = sum_levels(stop, [-level for level in start])
    return torch.where(
        w.abs() < 0.5,
        sum_levels(start, [w * difference]),
        sum_levels(stop, [(w - 1) * difference]),
    )
