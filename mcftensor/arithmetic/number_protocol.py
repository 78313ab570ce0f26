"""Numbers of two kinds, under the same operators.

A number is an unevaluated sum of floats. A *machine* number is evaluated in a type wide enough for
its format (`machine_numbers.py`), a *network* number by error-free transformations in the base type
(`network_numbers.py`). Formulas of operations and of optimizers are written once, for both kinds.

The right operand of an operator may also be a float or a 0-d tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mcftensor.arithmetic import networks, ordering
from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.rounding import as_floats, collapse_odd, collapse_terms, move, split_terms

Floats: TypeAlias = Sequence[Tensor]


class Sum:
    """Normalized floats of one dtype, leading one first, that represent their sum."""

    def __init__(self, floats: Floats) -> None:
        self.floats = tuple(floats)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the sum, rounded once."""
        return collapse_terms(self.floats, dtype)

    def to_odd(self) -> Tensor:
        """Return the sum in float32, rounded to odd, so that it can be rounded once more."""
        return collapse_odd(self.floats)

    def split(self, base: torch.dtype, terms: int, noise: Noise | None = None) -> Floats:
        """Return normalized terms of a base, the last one rounded to nearest or by noise.

        A wider base holds every float exactly, and a network gathers the floats. For a narrower
        base, the first term is the rounded sum, the next the rounded remainder, and so on; each
        remainder is exact.
        """
        if len(self.floats) == 1:
            floats = as_floats(self.floats[0])
            if len(floats) == 1:
                return split_terms(floats[0], base, terms, noise)
            return Sum(networks.distill(floats, len(floats))).split(base, terms, noise)
        leading, *tails = self.floats
        if leading.dtype == base and len(tails) < terms:
            return *self.floats, *(torch.zeros_like(leading) for _ in range(terms - 1 - len(tails)))
        holds_both = torch.promote_types(leading.dtype, base)
        entered = tuple(x.to(holds_both) for x in self.floats)
        if holds_both == base:
            longer = networks.replace_nonfinite(networks.distill(entered, terms + 1), entered[0])
            return networks.shorten(longer, noise)
        peeled = []
        for _ in range(terms):
            peeled.append(collapse_terms(entered, base))
            entered = networks.distill([*entered, -peeled[-1].to(holds_both)], len(entered))
        if noise is not None:
            peeled[-1] = move(peeled[-1], entered[0], noise)
        return networks.replace_nonfinite(networks.distill(peeled, terms), peeled[0])


class Number(Sum, ABC):
    """A sum of floats with arithmetic."""

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

    def where(self, condition: Tensor, other: Number) -> Number:
        """Return this number where a condition holds, else another."""
        return type(self)(ordering.choose(condition, self.floats, other.floats))

    def is_below(self, limit: float) -> Tensor:
        """Whether the magnitude of the leading float is below a limit."""
        return self.floats[0].abs() < limit

    def moved_by(self, change: Number) -> Number:
        """self + change, for a small change."""
        return self + change

    def summed(self) -> Number:
        """Return the number as one float, if one float holds it."""
        return self


class Numbers(ABC):
    """A kind of number: how numbers are represented and evaluated."""

    dtype: torch.dtype
    """The dtype of the floats in which numbers are computed."""

    @abstractmethod
    def of(self, floats: Floats) -> Number:
        """Return the number that is the sum of floats of any dtype, leading one first."""

    def available(self) -> Numbers:
        """Return this kind, or the kind that replaces it where float64 is not available."""
        return self
