"""Several operations in one pass over memory, each rounded as if it had run by itself.

A trace is what operations do to variables: tensors in a format, or numbers. What an operation
writes, a later one reads as it would have been stored, so that no bit differs. Traces that are
made in the same way are the same object.

Those on terms are one kernel. Those on formats that only store numbers are PyTorch's own operations
on what is stored (`decoded_traces.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from mcftensor.arithmetic.formulas import OPERATIONS
from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.network_numbers import Network
from mcftensor.arithmetic.number_protocol import Number, Numbers
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels import Body, Signature
from mcftensor.passes.expressions import scalar_tensor, stored_floats

T = TypeVar("T")

# Operations of networks become kernels that take long to compile.
LONGEST, LONGEST_OF_NETWORKS = 16, 4

# Operations on stored numbers, of which no kernel is made.
LONGEST_OF_STORED = 64

# Traces that follow on one, of which programs have few.
_MOST = 256


def longest(format: Format) -> int:
    """Operations that a trace with results in a format may have."""
    if format.arithmetic != "terms":
        return LONGEST_OF_STORED
    return LONGEST_OF_NETWORKS if isinstance(format.numbers, Network) else LONGEST


class Variable(NamedTuple):
    """What operations read and write."""

    format: Format
    begins_as: Literal["tensor", "number", "nothing"]
    """What it is before the first operation; nothing is what an operation makes."""
    takes_factor: bool = False
    """Whether a number by which it is multiplied is only noted."""

    @property
    def width(self) -> int:
        """The number of columns that it begins as: components, and beside those of numbers that
        are only stored, what else tensors have."""
        if self.begins_as == "nothing":
            return 0
        is_stored = self.begins_as == "tensor" and self.format.result is not self.format
        return len(self.format.components) + is_stored


class Operation(NamedTuple):
    """An operation; variables are given by their places.

    On terms it is one of `formulas.py`, rounded to nearest. On stored numbers it is PyTorch's of
    this name, in place where the target is the first operand.
    """

    name: str
    format: Format
    """That of the target."""
    operands: tuple[int, ...]
    target: int
    keywords: tuple[str, ...] = ()
    """The names of the last operands, of one on stored numbers."""
    key: int | None = None
    """What the target is rounded by, where that is drawn."""


class Trace:
    """Operations in order; use `EMPTY` and the methods that lengthen it.

    Attributes:
        begun: keys of the operations on tensors that came later than the first ones.
        variables: what the operations read and write.
        width: the number of columns that these begin as.
        operations: what is done.
        written: the variables that are written to.
        is_full: whether it is as long as it may become.
        is_of_terms: whether operations are on terms, and not on stored numbers.
        made: what follows from it.
    """

    def __init__(
        self,
        variables: tuple[Variable, ...] = (),
        operations: tuple[Operation, ...] = (),
        begun: frozenset[Hashable] = frozenset(),
    ) -> None:
        self.begun = begun
        self.variables = variables
        self.width = sum([x.width for x in variables])
        self.operations = operations
        self.written = tuple(sorted({x.target for x in operations}))
        limits = [longest(x.format) for x in operations]
        self.is_full = bool(limits) and len(operations) >= min(limits)
        self.is_of_terms = any(x.format.arithmetic == "terms" for x in operations)
        self.made: dict[Hashable, Any] = {}
        self._goes_on: set[Hashable] = set()

    def ends_before(self, key: Hashable) -> bool:
        """Whether an operation on other tensors begins another trace: one that has begun
        with other tensors in this one, too, unless it was seen that they belong together."""
        return key in self.begun and key not in self._goes_on

    def goes_on_with(self, key: Hashable) -> None:
        """It was seen."""
        self._goes_on.add(key)

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
        variables = (*self.variables, variable)
        return self.once(variable, lambda: Trace(variables, self.operations, self.begun))

    def then(self, operation: Operation, key: Hashable = None) -> Trace:
        """With one more operation; a key tells one on other tensors than those before."""
        operations, begun = (*self.operations, operation), self.begun | {key} if key else self.begun
        return self.once((operation, key), lambda: Trace(self.variables, operations, begun))

    def is_note(self, operation: Operation) -> bool:
        """Whether a tensor is multiplied by a number that is only noted."""
        name, _, operands, target, *_ = operation
        return (
            name in ("mul", "_foreach_mul")
            and operands[0] == target
            and self.variables[target].takes_factor
            and self.variables[operands[1]].begins_as == "number"
        )

    def kernel(self, results: tuple[int, ...]) -> tuple[Body, Signature]:
        """What computes these of the variables, given the components of tensors, and numbers."""
        return self.once(results, lambda: self._kernel(results))

    def _kernel(self, results: tuple[int, ...]) -> tuple[Body, Signature]:
        dtypes: dict[str, list[torch.dtype]] = {"tensor": [], "number": [], "nothing": []}
        for format, begins_as, _ in self.variables:
            dtypes[begins_as] += [x.dtype for x in format.components]
        written = [x.dtype for i in results for x in self.variables[i].format.components]

        def body(
            vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor
        ) -> Sequence[Tensor]:
            left = {"tensor": iter(vectors), "number": map(scalar_tensor, scalars)}
            stored: list[Sequence[Tensor]] = [
                list(itertools.islice(left.get(begins_as, ()), len(format.components)))
                for format, begins_as, _ in self.variables
            ]
            entered: dict[tuple[int, Numbers], Number] = {}
            for name, format, operands, target, *_ in self.operations:
                for i in operands:
                    if (i, format.numbers) not in entered:
                        floats = stored_floats(self.variables[i].format, stored[i])
                        entered[i, format.numbers] = format.numbers.of(floats)
                number = OPERATIONS[name](*[entered[i, format.numbers] for i in operands])
                made = zip(format.encode(number, None), format.components, strict=True)
                stored[target] = [x.to(component.dtype) for x, component in made]
                entered = {key: x for key, x in entered.items() if key[0] != target}
                if isinstance(format.numbers, Machine):  # the same, at less cost
                    entered[target, format.numbers] = format.rounded(number)
            return [x for i in results for x in stored[i]]

        signature = Signature(tuple(dtypes["tensor"]), tuple(dtypes["number"]), tuple(written))
        return body, signature


EMPTY = Trace()
NUMBERS = Variable(PLAIN[torch.float64], "number")
KEYS = Variable(PLAIN[torch.int64], "number")
