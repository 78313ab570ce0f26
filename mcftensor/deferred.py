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

import operator
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from mcftensor.elementwise import Operand, evaluate

# Operations in an expression; longer ones are computed.
LONGEST = 4


class Deferred:
    """An expression, and the terms of its operands."""

    def __init__(self, expression: str, operands: list[Operand]) -> None:
        self.expression = expression
        self.operands = operands
        self.tensors = [t for terms in operands for t in terms if isinstance(t, Tensor)]
        self.versions = [t._version for t in self.tensors]

    def is_unchanged(self) -> bool:
        """Whether no component of an operand has been written to since."""
        return [t._version for t in self.tensors] == self.versions

    def require_unchanged(self) -> None:
        """Raise RuntimeError where a component of an operand has been written to since."""
        if not self.is_unchanged():
            raise RuntimeError(
                f"the result of {self.expression} was not computed yet when a component of one of "
                "its operands was written to; read x.components anew before writing to them"
            )

    def reads_as(self, other: Deferred) -> bool:
        """Whether the same tensors are read as by another."""
        return len(self.tensors) == len(other.tensors) and all(
            map(operator.is_, self.tensors, other.tensors)
        )

    def compute(self) -> list[Tensor]:
        """The terms.

        Raises:
            RuntimeError: a component of an operand has been written to since.
        """
        self.require_unchanged()
        terms: list[Any] = [term for operand in self.operands for term in operand]
        return evaluate(self.expression, terms, [len(x) for x in self.operands], [])


# For each piece of memory, the expansions whose expressions read it.
READERS: dict[int, list[weakref.ref[Any]]] = {}
_lock = threading.RLock()  # what the garbage collector runs may come here again
_FEW = 1024
_until_sweep = _FEW


def watch(x: Any, deferred: Deferred) -> None:
    """Remember that an expansion waits for what it reads."""
    global _until_sweep  # noqa: PLW0603
    reference = weakref.ref(x)
    memories = _memory(deferred.tensors)
    with _lock:
        for memory in memories:
            READERS.setdefault(memory, []).append(reference)
        _until_sweep -= len(memories)
        if _until_sweep <= 0:
            _until_sweep = max(_FEW, _sweep())


def _sweep() -> int:
    """Forget expansions that are gone or computed, and return how many wait."""
    for memory, references in list(READERS.items()):
        waiting = [r for r in references if (x := r()) is not None and x._deferred is not None]
        if waiting:
            READERS[memory] = waiting
        else:
            READERS.pop(memory, None)
    return sum(map(len, READERS.values()))


def compute_readers(terms: Sequence[Tensor]) -> None:
    """Compute all that is deferred and reads the memory of these terms."""
    if READERS and len(terms) > len(READERS):  # to forget is less work than to look for each term
        with _lock:
            _sweep()
    if not READERS:
        return
    for memory in _memory(terms):
        with _lock:
            references = READERS.pop(memory, ())
        for reference in references:
            x = reference()
            if x is not None and x._deferred is not None and x._deferred.is_unchanged():
                x.compute_terms()  # what did change raises where it is read itself


def _memory(terms: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in terms if t.dim() > 0}
