"""Expansions as numbers for the update rules of formats that compute by networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor import networks
from mcftensor.conversion import convert_terms
from mcftensor.elementwise import by_network
from mcftensor.formats import Format
from mcftensor.ordering import maximum
from mcftensor.rounding import split_terms


class Number:
    """The terms of a format, under Python's operators.

    What stands on the right of an operator may also be a float, or a tensor without dimensions.
    """

    def __init__(self, terms: Sequence[Tensor], format: Format) -> None:
        self.terms = tuple(terms)
        self.format = format

    @classmethod
    def of(cls, quantity: Sequence[Tensor], format: Format) -> Number:
        """A plain tensor, as a sequence of one, or the terms of an expansion in any format."""
        if len(quantity) == 1:
            return cls(split_terms(quantity[0], format.base, format.terms), format)
        return cls(convert_terms(tuple(quantity), format.base, format.terms, None), format)

    def _of(self, operation: str, *others: Number | Tensor | float) -> Number:
        operands = [self.terms, *(self._terms_of(x) for x in others)]
        format = self.format
        return Number(by_network(operation, operands, format.base, format.terms), format)

    def _terms_of(self, x: Number | Tensor | float) -> Sequence[Tensor]:
        if isinstance(x, Number):
            return x.terms
        if isinstance(x, Tensor):
            return [x]
        return [torch.scalar_tensor(x, dtype=torch.float64, device=self.terms[0].device)]

    def __neg__(self) -> Number:
        return Number(networks.neg(self.terms), self.format)

    def __add__(self, other: Number | Tensor | float) -> Number:
        return self._of("add", other)

    def __sub__(self, other: Number) -> Number:
        return self._of("add", -other)

    def __mul__(self, other: Number | Tensor | float) -> Number:
        return self._of("mul", other)

    def __truediv__(self, other: Number | Tensor | float) -> Number:
        return self._of("div", other)

    def sqrt(self) -> Number:
        """The square root."""
        return self._of("sqrt")

    def maximum(self, other: Number) -> Number:
        """The larger of two numbers."""
        return Number(maximum(self.terms, other.terms), self.format)
