"""Results that wait until they are read, within a step of an optimizer.

An optimizer that works by ordinary operations makes its denominator in three passes over memory
and reads it once, in a fourth. Within its step such an intermediate result is an expansion that
holds an expression in place of components. The operation that reads it computes it on the way,
rounded at every stage as if it had been stored, so that no bit differs; whatever else touches it
computes it first.

It waits only for tensors whose memory nobody else holds: made by the library, and never handed out
as components, views or to a compiler. So every write to them goes through dispatch, which computes
what waits for them before, and so does whatever hands them out later. At the end of the step all
that still waits is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mcftensor.passes.expressions import Expression, Operand, carry_out, empty
from mcftensor.tensor.stepping import unrecorded_step

# Operations in an expression; longer ones are computed.
LONGEST = 4

_FEW = 8

# Elements for which a pass over memory takes longer than to find out that it can be spared.
WORTH = 1 << 17


def is_worth_deferring(tensors: Sequence[Tensor]) -> bool:
    """Whether results of the sizes of these may wait in this thread now, and are large enough."""
    return unrecorded_step() is not None and sum(map(Tensor.numel, tensors)) >= WORTH


@dataclass(frozen=True, eq=False, slots=True)
class Deferred:
    """An expression, one set of its operands, and the expansions whose memory they are."""

    expression: Expression
    operands: Sequence[Operand]
    reads: Sequence[Any]

    def components(self) -> list[Tensor]:
        """What it comes to."""
        outputs = empty(self.expression.format, self.operands, 1)
        carry_out(self.expression, self.operands, outputs)
        return [x for (x,) in outputs]


def watch(x: Any, reads: Sequence[Any]) -> None:
    """Remember that an expansion waits for others."""
    step = unrecorded_step()
    assert step is not None
    reference = weakref.ref(x)
    step.waiting.append(reference)
    for read in reads:
        if len(read._readers) >= _FEW:  # mostly of results that are gone
            read._readers = [r for r in read._readers if _waits(r())]
        read._readers.append(reference)


def _waits(x: Any) -> bool:
    return x is not None and x._deferred is not None


def finish(x: Any) -> None:
    """Compute a result, if it is still there and waits."""
    if _waits(x):
        x.compute_components()


def compute_readers(x: Any) -> None:
    """Compute all that waits for an expansion, which is to be written to or handed out."""
    if x._readers:
        references, x._readers = x._readers, []
        for reference in references:
            finish(reference())
