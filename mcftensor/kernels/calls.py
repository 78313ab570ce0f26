"""What functions are called with, and where it lies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Column = Sequence[Tensor]

_FEW = 128
_dtype = operator.attrgetter("dtype")


@dataclass(eq=False, slots=True)
class Calls:
    """Calls of an elementwise function, by columns: the first of each column make the first call.

    The outputs of a call are of one shape, its vectors too or of one that broadcasts; its scalars
    are Python floats or tensors without dimensions, and a column of one scalar is for all calls. A
    column of outputs may be one of vectors, and overlaps no other.
    """

    vectors: Sequence[Column]
    scalars: Sequence[Sequence[Tensor | float]]
    outputs: Sequence[Column]

    def __len__(self) -> int:
        return len(self.outputs[0])

    def __iter__(self) -> Iterator[tuple[list[Tensor], list[Tensor | float], list[Tensor]]]:
        """Call by call."""
        for i in range(len(self)):
            (vectors, scalars, outputs) = ([x for (x,) in part] for part in self._rows([i]))
            yield vectors, scalars, outputs  # type: ignore[misc]

    def only(self, rows: Sequence[int]) -> Calls:
        """Some of the calls."""
        return Calls(*self._rows(rows))  # type: ignore[arg-type]

    def _rows(self, rows: Sequence[int]) -> Iterator[list[list[Tensor | float]]]:
        yield [[x[i] for i in rows] for x in self.vectors]
        yield [[x[i] for i in rows] for x in self.every_scalar()]
        yield [[x[i] for i in rows] for x in self.outputs]

    def every_scalar(self) -> list[Sequence[Tensor | float]]:
        """The columns of scalars, with one for each call."""
        return [repeated(column, len(self)) for column in self.scalars]


def places(
    vectors: Sequence[T], outputs: Sequence[T], are_same: Callable[[T, T], bool]
) -> tuple[list[T], list[int]]:
    """Vectors and outputs without repetition, and which of them the outputs are."""
    found = list(vectors)
    where = []
    for output in outputs:
        i = 0
        while i < len(found) and not are_same(found[i], output):
            i += 1
        if i == len(found):
            found.append(output)
        where.append(i)
    return found, where


def are_same(a: Column, b: Column) -> bool:
    """Whether two columns are of the same tensors."""
    return a is b or all(map(operator.is_, a, b))


@dataclass(eq=False, slots=True)
class Facts:
    """What kernels have to know of the tensors of a column."""

    dtypes: set[torch.dtype]
    devices: set[int]  # indices; the CPU has -1
    lengths: list[int]
    addresses: list[int]
    are_contiguous: bool

    @classmethod
    def of(cls, column: Column) -> Facts:
        """Asked while a few tensors at a time are in the caches: there may be thousands."""
        facts = cls(set(), set(), [], [], True)
        for i in range(0, len(column), _FEW):
            part = column[i : i + _FEW]
            facts.dtypes.update(map(_dtype, part))
            facts.devices.update(map(Tensor.get_device, part))
            facts.lengths += map(Tensor.numel, part)
            facts.addresses += map(Tensor.data_ptr, part)
            facts.are_contiguous &= all(map(Tensor.is_contiguous, part))
        return facts


def repeated(column: Sequence[T], count: int) -> Sequence[T]:
    """A column of so many, which may be given as one for all."""
    return column if len(column) == count else [*column] * count


def dtype_of(scalar: Tensor | float) -> torch.dtype:
    """The dtype of a scalar; a number of Python's is a float64."""
    return scalar.dtype if isinstance(scalar, Tensor) else torch.float64


def number_of(scalar: Tensor | float) -> float:
    """A scalar as a number of Python's; that of a device is waited for."""
    return scalar.item() if isinstance(scalar, Tensor) else scalar


def by_rows(columns: Sequence[Sequence[T]]) -> Iterator[T]:
    """The elements of columns, row by row."""
    return chain.from_iterable(zip(*columns, strict=True))
