"""Results that are computed when they are read.

An optimizer that works by ordinary operations makes its denominator in three passes over memory
and reads it once, in a fourth. Such an intermediate result is an expansion that holds an
expression in place of terms. The operation that reads it computes it on the way, rounded at every
stage as if it had been stored, so that no bit differs; whatever else touches it computes its terms.

Only results outside of autograd and compilers are deferred, of whole expansions and numbers. When
the components of an expansion are asked for, as they are before every change in place, all that is
deferred and reads the same memory is computed before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mcftensor.elementwise import Expression, evaluate

# Operations in an expression; longer ones are computed.
LONGEST = 4


@dataclass
class Deferred:
    """An expression, and the terms of its operands."""

    expression: Expression
    operands: Sequence[Sequence[Tensor]]
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [t._version for terms in self.operands for t in terms]

    def is_unchanged(self) -> bool:
        """Whether no component of an operand has been written to since."""
        return self._versions() == self.versions

    def require_unchanged(self) -> None:
        """Raise RuntimeError where a component of an operand has been written to since."""
        if not self.is_unchanged():
            raise RuntimeError(
                f"the result of {self.expression} was not computed yet when a component of one of "
                "its operands was written to; read x.components anew before writing to them"
            )

    def compute(self) -> list[Tensor]:
        """The terms.

        Raises:
            RuntimeError: a component of an operand has been written to since.
        """
        self.require_unchanged()
        terms = [term for operand in self.operands for term in operand]
        return evaluate(str(self.expression), terms, [len(x) for x in self.operands], [])


@functools.cache
def length(expression: Expression) -> int:
    """The number of operations in an expression."""
    if isinstance(expression, int):
        return 0
    return 1 + sum(length(part) for part in expression[2:])


@functools.cache
def shifted(expression: Expression, by: int) -> Expression:
    """An expression whose operands have numbers so much larger."""
    if isinstance(expression, int):
        return expression + by
    operation, format, *parts = expression
    return (operation, format, *(shifted(part, by) for part in parts))


# For each piece of memory, the expansions whose expressions read it.
_READERS: dict[int, list[weakref.ref[Any]]] = {}
_FEW = 1024
_until_sweep = _FEW


def watch(x: Any, deferred: Deferred) -> None:
    """Remember that an expansion waits for what it reads."""
    global _until_sweep  # noqa: PLW0603
    reference = weakref.ref(x)
    for memory in _memory(term for operand in deferred.operands for term in operand):
        _READERS.setdefault(memory, []).append(reference)
        _until_sweep -= 1
    if _until_sweep <= 0:
        _until_sweep = max(_FEW, _sweep())


def _sweep() -> int:
    """Forget expansions that are gone or computed, and return how many wait."""
    for memory, references in list(_READERS.items()):
        waiting = [r for r in references if (x := r()) is not None and x._deferred is not None]
        if waiting:
            _READERS[memory] = waiting
        else:
            del _READERS[memory]
    return sum(map(len, _READERS.values()))


def compute_readers(terms: Iterable[Tensor]) -> None:
    """Compute all that is deferred and reads the memory of these terms."""
    if not _READERS:
        return
    for memory in _memory(terms):
        for reference in _READERS.pop(memory, ()):
            x = reference()
            if x is not None and x._deferred is not None and x._deferred.is_unchanged():
                x.compute_terms()  # what did change raises where it is read itself


def _memory(terms: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in terms if t.dim() > 0}
