"""Several operations in one pass over memory, each rounded as if it had run by itself.

A trace is what operations do to variables: tensors in a format, or numbers. What an operation
writes, a later one reads as it would have been stored, so that no bit differs. Traces that are
made in the same way are the same object.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from mcftensor.arithmetic.formulas import OPERATIONS
from mcftensor.arithmetic.numbers import Number, Numbers
from mcftensor.arithmetic.terms import Network
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels import Body, Signature

T = TypeVar("T")

# Operations of networks become kernels that take long to compile.
LONGEST, LONGEST_OF_NETWORKS = 16, 4

# Traces that follow on one, of which programs have few.
_MOST = 256


def longest(format: Format) -> int:
    """Operations that a trace with results in a format may have."""
    return LONGEST_OF_NETWORKS if isinstance(format.numbers, Network) else LONGEST


class Variable(NamedTuple):
    """What operations read and write."""

    format: Format
    begins_as: Literal["tensor", "number", "nothing"]
    """What it is before the first operation; nothing is what an operation makes."""


class Operation(NamedTuple):
    """An operation of `formulas.py`, rounded to nearest; variables are given by their places."""

    name: str
    format: Format
    operands: tuple[int, ...]
    target: int


class Trace:
    """Operations in order; use `EMPTY` and the methods that lengthen it."""

    def __init__(
        self, variables: tuple[Variable, ...] = (), operations: tuple[Operation, ...] = ()
    ) -> None:
        self.variables = variables
        self.operations = operations
        self.written = tuple(sorted({x.target for x in operations}))
        self.longest = min([LONGEST, *[longest(x.format) for x in operations]])
        self.made: dict[Hashable, Any] = {}

    def has_room_for(self, other: Trace) -> bool:
        """Whether one more operation may follow on the operations of both."""
        count = len(self.operations) + len(other.operations)
        return count < self.longest and count < other.longest

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What follows from the trace and a key, made once."""
        made: T | None = self.made.get(key)
        if made is None:
            if len(self.made) >= _MOST:
                self.made.clear()
            made = self.made[key] = make()
        return made

    def with_variable(self, variable: Variable) -> Trace:
        """With one more variable."""
        return self.once(variable, lambda: Trace((*self.variables, variable), self.operations))

    def then(self, operation: Operation) -> Trace:
        """With one more operation."""
        return self.once(operation, lambda: Trace(self.variables, (*self.operations, operation)))

    def beside(self, other: Trace) -> Trace:
        """With the variables and operations of another one behind its own."""
        return self.once(other, lambda: self._beside(other))

    def _beside(self, other: Trace) -> Trace:
        count = len(self.variables)
        moved = [
            Operation(x.name, x.format, tuple([i + count for i in x.operands]), x.target + count)
            for x in other.operations
        ]
        return Trace((*self.variables, *other.variables), (*self.operations, *moved))

    def kernel(self, results: tuple[int, ...]) -> tuple[Body, Signature]:
        """What computes these of the variables, given the components of tensors, and numbers."""
        return self.once(results, lambda: self._kernel(results))

    def _kernel(self, results: tuple[int, ...]) -> tuple[Body, Signature]:
        dtypes: dict[str, list[torch.dtype]] = {"tensor": [], "number": [], "nothing": []}
        for format, begins_as in self.variables:
            dtypes[begins_as] += [x.dtype for x in format.components]
        written = [x.dtype for i in results for x in self.variables[i].format.components]

        def body(
            vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor
        ) -> Sequence[Tensor]:
            left = {"tensor": iter(vectors), "number": map(_as_tensor, scalars)}
            stored = [
                list(itertools.islice(left.get(begins_as, ()), len(format.components)))
                for format, begins_as in self.variables
            ]
            found: dict[tuple[int, Numbers], Number] = {}
            for name, format, operands, target in self.operations:
                for i in operands:
                    if (i, format.numbers) not in found:
                        floats = self.variables[i].format.decode(stored[i])
                        found[i, format.numbers] = format.numbers.of(floats)
                number = OPERATIONS[name](*[found[i, format.numbers] for i in operands])
                made = zip(format.encode(number, None), format.components, strict=True)
                stored[target] = [x.to(component.dtype) for x, component in made]
                found = {key: x for key, x in found.items() if key[0] != target}
            return [x for i in results for x in stored[i]]

        signature = Signature(tuple(dtypes["tensor"]), tuple(dtypes["number"]), tuple(written))
        return body, signature


EMPTY = Trace()
NUMBERS = Variable(PLAIN[torch.float64], "number")


def _as_tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
