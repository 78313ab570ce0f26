"""What is computed with: numbers of two kinds, under the same operators.

A number is an unevaluated sum of floats. Of a *machine* kind it is evaluated in a type wide enough
for its format (`wide.py`), of a *network* kind by error-free transformations in the base type alone
(`terms.py`). Formulas, of operations and of optimizers, are written once, for both.

What stands on the right of an operator may also be a float, or a tensor without dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.rounding import collapse_terms, move, split_terms

Floats: TypeAlias = Sequence[Tensor]


class Sum:
    """Normalized floats of one type, leading one first, that stand for their sum."""

    def __init__(self, floats: Floats) -> None:
        self.floats = tuple(floats)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The sum, rounded once."""
        return collapse_terms(self.floats, dtype)

    def split(self, base: torch.dtype, terms: int, noise: Tensor | None = None) -> Floats:
        """Normalized terms of a base, the last of them rounded to nearest, or stochastically where
        there is noise."""
        if len(self.floats) == 1:
            return split_terms(self.floats[0], base, terms, noise)
        return convert_terms(self.floats, base, terms, noise)


class Number(Sum, ABC):
    """A sum that one computes with."""

    @abstractmethod
    def __neg__(self) -> Number: ...

    @abstractmethod
    def __add__(self, other: Number | Tensor | float) -> Number: ...

    @abstractmethod
    def __mul__(self, other: Number | Tensor | float) -> Number: ...

    @abstractmethod
    def __truediv__(self, other: Number | Tensor | float) -> Number: ...

    def __sub__(self, other: Number | float) -> Number:
        return self + -other

    @abstractmethod
    def sqrt(self) -> Number:
        """The square root."""

    @abstractmethod
    def fma(self, y: Number, z: Number) -> Number:
        """self * y + z."""

    @abstractmethod
    def maximum(self, other: Number) -> Number:
        """The larger of two numbers."""

    @abstractmethod
    def where(self, condition: Tensor, other: Number) -> Number:
        """This number where a condition holds, else another."""

    @abstractmethod
    def is_below(self, limit: float) -> Tensor:
        """Whether the magnitude is below a limit, as the leading float says."""

    @abstractmethod
    def moved_by(self, change: Number) -> Number:
        """self + change, where the change is small: it meets the tails first."""

    @abstractmethod
    def summed(self) -> Number:
        """The same as one float, where one holds it."""


class Numbers(ABC):
    """A kind of numbers."""

    dtype: torch.dtype
    """That of the floats which they are computed in."""

    @abstractmethod
    def of(self, floats: Floats) -> Number:
        """The number that is the sum of floats of any type, leading one first."""


def convert_terms(x: Floats, base: torch.dtype, terms: int, noise: Tensor | None) -> Floats:
    """Normalized terms as `terms` normalized terms of another base, with one rounding.

    A wider base takes every term as it is, and the network gathers them. A narrower one takes the
    whole rounded, then what remains rounded, each remainder exactly.
    """
    if x[0].dtype == base and len(x) <= terms:
        return *x, *(torch.zeros_like(x[0]) for _ in range(terms - len(x)))
    holds_both = torch.promote_types(x[0].dtype, base)
    if holds_both == base:
        entered = [t.to(base) for t in x]
        longer = networks.settle(networks.distill(entered, terms + 1), entered[0])
        return networks.shorten(longer, noise)
    rest = tuple(t.to(holds_both) for t in x)
    peeled = []
    for _ in range(terms):
        peeled.append(collapse_terms(rest, base))
        rest = networks.distill([*rest, -peeled[-1].to(holds_both)], len(rest))
    if noise is not None:
        peeled[-1] = move(peeled[-1], rest[0], noise)
    return networks.settle(networks.distill(peeled, terms), peeled[0])
