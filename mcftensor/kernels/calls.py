"""What functions are called with, and where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Call:
    """One set of tensors for an elementwise function.

    Outputs are of one shape, vectors too or of one that broadcasts; scalars are Python floats or
    tensors without dimensions. An output may be one of the vectors, and overlaps no other.
    """

    vectors: Sequence[Tensor]
    scalars: Sequence[Tensor | float]
    outputs: Sequence[Tensor]


@dataclass(slots=True)
class Rows:
    """Calls of one kernel whose tensors are dense: their lengths, and one after the other the
    addresses of all vectors and outputs."""

    calls: list[Call] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)

    def add(self, call: Call, length: int, addresses: Sequence[int]) -> None:
        """Append a call."""
        self.calls.append(call)
        self.lengths.append(length)
        self.addresses += addresses

    @property
    def columns(self) -> list[list[int]]:
        """The lengths, then the addresses of each vector and each output."""
        width = len(self.addresses) // len(self.calls)
        return [self.lengths, *(self.addresses[i::width] for i in range(width))]

    @property
    def scalars(self) -> Iterator[tuple[Tensor | float, ...]]:
        """Each scalar, as all calls have it."""
        return zip(*[call.scalars for call in self.calls], strict=True)


def dtype_of(scalar: Tensor | float) -> torch.dtype:
    """The dtype of a scalar; a number of Python's is a float64."""
    return scalar.dtype if isinstance(scalar, Tensor) else torch.float64


def number_of(scalar: Tensor | float) -> float:
    """A scalar as a number of Python's; that of a device is waited for."""
    return scalar.item() if isinstance(scalar, Tensor) else scalar


def by_rows(columns: Sequence[Sequence[T]]) -> Iterator[T]:
    """The elements of columns, row by row."""
    return chain.from_iterable(zip(*columns, strict=True))
