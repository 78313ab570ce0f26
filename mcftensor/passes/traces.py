"""Several operations in one pass over memory, each rounded as if it had run by itself.

A trace lists operations on variables, which are tensors in a format, or numbers. An operation reads
the results of earlier ones as if they had been stored, so that no bit differs. Traces built in the
same way are the same object.

A trace on terms is one kernel (`term_traces.py`). A trace on storage formats is kernels with the
bits of PyTorch's operations (`decoded_kernels.py`), or calls these (`decoded_traces.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from mcftensor.arithmetic.network_numbers import Network
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels.without_float64 import widest

T = TypeVar("T")

# Operations of networks become kernels that take long to compile.
LONGEST, LONGEST_OF_NETWORKS = 16, 4

# Operations on storage formats, which need no kernel.
LONGEST_OF_STORED = 64

_SHORTEST = min(LONGEST, LONGEST_OF_NETWORKS, LONGEST_OF_STORED)

# The number of traces that follow one trace; programs have few.
_MOST = 256


def longest(format: Format) -> int:
    """Return the largest number of operations in a trace with results in a format."""
    if format.arithmetic != "terms":
        return LONGEST_OF_STORED
    return LONGEST_OF_NETWORKS if isinstance(format.numbers, Network) else LONGEST


class Variable(NamedTuple):
    """A tensor or number that operations read and write."""

    format: Format
    begins_as: Literal["tensor", "number", "nothing"]
    """Its kind before the first operation; None if an operation makes it."""
    takes_factor: bool = False
    """Whether a multiplication by a number is deferred."""
    gradient_of: Format | None = None
    """The format of its parameter, if it is a gradient; results have its terms."""

    @property
    def width(self) -> int:
        """The number of initial columns: its components and, for storage formats, one of states."""
        if self.begins_as == "nothing":
            return 0
        is_stored = self.begins_as == "tensor" and self.format.result is not self.format
        return len(self.format.components) + is_stored


class Operation(NamedTuple):
    """An operation on variables, which are given by their indices.

    On terms it is an operation of `formulas.py`, rounded to nearest. On storage formats it is
    PyTorch's operation of this name, in place if the target is the first operand.
    """

    name: str
    format: Format
    """The format of the target."""
    operands: tuple[int, ...]
    target: int
    keywords: tuple[str, ...] = ()
    """The names of the last operands, for operations on storage formats."""
    key: int | None = None
    """The variable of the key or count with which the target is rounded, if any."""

    @property
    def single_name(self) -> str:
        """The name of the operation on single tensors, also for an operation on lists."""
        return self.name.removeprefix("_foreach_")


class Trace:
    """Operations in order. Use `EMPTY` and the methods that extend it.

    Attributes:
        begun: keys of operations on tensors that entered after the first ones.
        goes_on: those of these keys that belong to this trace, as the tape found when it ended.
        variables: the variables that operations read and write.
        widths: the number of initial columns of each variable.
        width: the number of initial columns of all variables.
        operations: the operations.
        written: the variables that are written to.
        is_of_terms: whether operations are on terms; otherwise they are on storage formats.
        made: objects derived from the trace.
    """

    def __init__(
        self,
        variables: tuple[Variable, ...] = (),
        operations: tuple[Operation, ...] = (),
        begun: frozenset[Hashable] = frozenset(),
    ) -> None:
        self.begun = begun
        self.variables = variables
        self.widths = [x.width for x in variables]
        self.width = sum(self.widths)
        self.operations = operations
        self.written = tuple(sorted({x.target for x in operations}))
        self.is_of_terms = any(x.format.arithmetic == "terms" for x in operations)
        self.made: dict[Hashable, Any] = {}
        self.goes_on: set[Hashable] = set()

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object derived from the trace and a key, made once."""
        made: T | None = self.made.get(key)
        if made is None:
            if len(self.made) >= _MOST:
                self.made.clear()
            made = self.made[key] = make()
        return made

    @property
    def is_full(self) -> bool:
        """Whether the trace has its largest length, which depends on float64."""
        return len(self.operations) >= _SHORTEST and self.once(widest(), self._has_largest_length)

    def _has_largest_length(self) -> bool:
        limits = [longest(x.format) for x in self.operations]
        return bool(limits) and len(self.operations) >= min(limits)

    def with_variable(self, variable: Variable) -> Trace:
        """Return the trace with one more variable."""
        variables = (*self.variables, variable)
        return self.once(variable, lambda: Trace(variables, self.operations, self.begun))

    def then(self, operation: Operation, key: Hashable = None) -> Trace:
        """Return the trace with one more operation; a key marks an operation on other tensors."""
        operations, begun = (*self.operations, operation), self.begun | {key} if key else self.begun
        return self.once((operation, key), lambda: Trace(self.variables, operations, begun))

    def is_note(self, operation: Operation) -> bool:
        """Whether an operation is a multiplication of a tensor by a number that is deferred."""
        name, _, operands, target, *_ = operation
        return (
            name in ("mul", "_foreach_mul")
            and operands[0] == target
            and self.variables[target].takes_factor
            and self.variables[operands[1]].begins_as == "number"
        )


EMPTY = Trace()
NUMBERS = Variable(PLAIN[torch.float64], "number")
KEYS = Variable(PLAIN[torch.int64], "number")
