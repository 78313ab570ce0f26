"""The operations of a trace, carried out in order, each as if its result had been stored.

Numbers are terms, or float32 that rounds as PyTorch's operations do; they are tensors of which a
kernel is recorded, or rows of scratch memory. Each is a class of this evaluation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from mcftensor.passes.traces import Operation, Trace

N = TypeVar("N")

Factor = tuple[bool, tuple[int, ...]]
"""A deferred factor: whether it includes the variable's initial factor, and its numbers."""

Asked = tuple[Any, ...]
"""A scalar: `("number", variable)`, `("factor", variable, Factor)`, `("key", variable)`,
`("count", variable, writes before)` or `("start",)`."""


class Evaluation(ABC, Generic[N]):
    """Some operations of a trace, in order.

    Args:
        trace: the trace.
        writes: how often variables were written by earlier operations.
        factors: the factors that these deferred.

    Attributes:
        numbers: the numbers of variables, decoded or computed.
        unstored: the operations that made numbers which are not stored.
        stored: the components of numbers that were rounded.
    """

    def __init__(
        self,
        trace: Trace,
        writes: Mapping[int, int] | None = None,
        factors: Mapping[int, Factor] | None = None,
    ) -> None:
        self.trace = trace
        self.writes, self.factors = dict(writes or {}), dict(factors or {})
        self.numbers: dict[int, N] = {}
        self.unstored: dict[int, Operation] = {}
        self.stored: dict[int, Sequence[Any]] = {}

    @abstractmethod
    def components(self, i: int) -> Sequence[Any]:
        """Return the components with which a variable begins."""

    @abstractmethod
    def scalar(self, asked: Asked) -> Any:
        """Return a scalar."""

    @abstractmethod
    def decode(self, i: int, components: Sequence[Any], factor: Asked) -> N:
        """Return the numbers that components of a variable store, times a factor."""

    @abstractmethod
    def encode(
        self, i: int, numbers: N, keys: Sequence[Asked], into: Sequence[Any] | None
    ) -> Sequence[Any]:
        """Return numbers as components of a variable; `into` is memory for them."""

    @abstractmethod
    def compute(self, operation: Operation, operands: Sequence[Any]) -> N:
        """Return the result of PyTorch's operation, rounded as PyTorch's."""

    def forget(self, i: int) -> None:
        """Drop the numbers of a variable, if there are any."""
        self.numbers.pop(i, None)

    def carry_out(self, operation: Operation) -> None:
        """Carry out one operation."""
        _, _, operands, target, _, _ = operation
        if self.trace.is_note(operation):
            if target in self.unstored:
                self.store(target)
            self.forget(target)
            of_first, numbers = self.factor_of(target)
            self.factors[target] = of_first, (*numbers, operands[1])
            return
        variables = self.trace.variables
        given = [
            self.scalar(("number", i)) if variables[i].begins_as == "number" else self.read(i)
            for i in operands
        ]
        self.enter(operation, self.compute(operation, given))

    def enter(self, operation: Operation, numbers: N) -> None:
        """Take the result of an operation."""
        i = operation.target
        self.numbers[i], self.unstored[i], self.factors[i] = numbers, operation, (False, ())
        self.writes[i] = self.writes.get(i, 0) + 1

    def read(self, i: int) -> N:
        """Return the numbers of a variable, rounded as if they had been stored."""
        format = self.trace.variables[i].format
        if i in self.unstored and not (format.is_exact or format.arithmetic == "plain"):
            self.store(i)
        if i not in self.numbers:
            own = self.stored[i] if i in self.stored else self.components(i)
            self.numbers[i] = self.decode(i, own, ("factor", i, self.factor_of(i)))
        return self.numbers[i]

    def store(self, i: int) -> None:
        """Round the result that a variable holds."""
        self.stored[i] = self.rounded(i)
        del self.unstored[i]
        self.forget(i)

    def rounded(self, i: int, into: Sequence[Any] | None = None) -> Sequence[Any]:
        """Return the components of a result that is not stored; `into` is memory for them."""
        operation, keys = self.unstored[i], list[Asked]()
        if operation.key is not None:
            keys = [("start",), ("key", operation.key)]
        elif self.trace.variables[i].format.takes_key:
            keys = [("start",), ("count", i, self.writes[i] - 1)]
        return self.encode(i, self.numbers[i], keys, into)

    def factor_of(self, i: int) -> Factor:
        """Return the deferred factor of a variable."""
        return self.factors.get(i, (True, ()))
