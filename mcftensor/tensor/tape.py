"""The tape of a step: what its operations do to tensors whose memory nobody else holds.

An optimizer that works by ordinary operations asks for some ten of them on each parameter, one
parameter after the other. Within its step they are put down rather than carried out. Then tensors
to which the same was done go together, in one pass over memory, and what a step makes and drops is
never stored.

What is on the tape has no components for others: who asks for them has it run before. Other tensors
are copied where an operation reads them, so that nobody can change them unseen. At the end of the
step all that is left is run.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mcftensor.formats import Format
from mcftensor.kernels import Column, Columns, run_alike
from mcftensor.passes.traces import EMPTY, Trace

# Strands that are put down before the older half of them is run: enough to go together, and few
# enough to stay in the caches.
FEW = 64

LOCK = threading.RLock()
"""Held while a tape is written or run, for other threads may read what is on it."""

Layout = tuple[torch.device, list[torch.Size], list[tuple[int, ...]]]
"""Of tensors, one for each row: their device, and the shape and strides of each."""

_call = weakref.ref.__call__


class Place:
    """Where tensors stand on a tape: for a variable of a strand, each in a row of it."""

    __slots__ = ("holders", "index", "strand")

    def __init__(self, strand: Strand, index: int, tensors: Sequence[Any]) -> None:
        self.strand, self.index = strand, index
        self.holders = [*map(weakref.ref, tensors)]

    def follow(self) -> tuple[Strand, int]:
        """The strand that its own has become a part of, and the number of the variable in it."""
        strand, index = self.strand, self.index
        while strand.joined is not None:
            strand, offset = strand.joined
            index += offset
        self.strand, self.index = strand, index
        return strand, index

    def is_of(self, column: Sequence[Any]) -> bool:
        """Whether these are the tensors of all rows."""
        return len(column) == len(self.holders) and all(
            map(operator.is_, map(_call, self.holders), column)
        )

    def is_alive(self) -> bool:
        """Whether anybody still has one of the tensors."""
        return self.holders[0]() is not None or any(x() is not None for x in self.holders)


class Strand:
    """What a tape does to some tensors, and to nothing else: a trace for each row of them.

    Attributes:
        tape: the one that it is a part of.
        layout: that of all tensors.
        trace: what is done.
        places: by variable; None of what only the strand knows, copies and numbers.
        columns: the components and numbers that the variables begin with, in their order.
        joined: the strand that this one has become a part of, and the number of its first variable.
    """

    __slots__ = ("columns", "joined", "layout", "places", "tape", "trace")

    def __init__(self, tape: Tape, layout: Layout) -> None:
        self.tape = tape
        self.layout = layout
        self.trace = EMPTY
        self.places: list[Place | None] = []
        self.columns: list[Sequence[Any]] = []
        self.joined: tuple[Strand, int] | None = None

    def write(self, trace: Trace, places: list[Place | None], columns: list[Sequence[Any]]) -> None:
        """Lengthen it."""
        if self.trace is EMPTY:
            self.tape.add(self)
        self.trace, self.places, self.columns = trace, places, columns  # without a call in between

    def join(self, other: Strand) -> None:
        """Take in another strand."""
        count, trace = len(self.places), self.trace.beside(other.trace)
        places, columns = self.places + other.places, self.columns + other.columns
        # No calls from here on: nothing is to be done twice.
        self.trace, self.places, self.columns = trace, places, columns
        other.trace, other.places, other.columns = EMPTY, [], []
        other.joined = self, count

    def results(self) -> tuple[int, ...]:
        """The variables that are to be written to memory: not what nobody has any longer."""
        return tuple([i for i in self.trace.written if (x := self.places[i]) and x.is_alive()])

    def run(self) -> None:
        """Carry out what has been put down."""
        with LOCK:
            if self.trace is not EMPTY:
                _run_together([self], self.results())


class Tape:
    """The strands of a step, in the order in which they begin."""

    def __init__(self) -> None:
        self.strands: list[Strand] = []

    def add(self, strand: Strand) -> None:
        """Begin a strand, and run the older half of many, but for those with new results, which
        somebody may be about to drop."""
        if len(self.strands) >= FEW:
            self.strands = [x for x in self.strands if x.trace is not EMPTY]
            if len(self.strands) >= FEW // 2:
                _run(self.strands[: FEW // 2], with_results=False)
        self.strands.append(strand)

    def run(self) -> None:
        """Carry out all that has been put down."""
        if self.strands:
            with LOCK:
                strands, self.strands = self.strands, []
                _run(strands)


def _run(strands: Sequence[Strand], *, with_results: bool = True) -> None:
    """Run strands, those together of which the same is to be written."""
    groups: dict[Any, list[Strand]] = {}
    for x in strands:
        if x.trace is not EMPTY:
            groups.setdefault((x.trace, x.results(), x.layout[0]), []).append(x)
    for (trace, results, _), group in groups.items():
        if with_results or all(trace.variables[i].begins_as == "tensor" for i in results):
            _run_together(group, results)


def _run_together(strands: Sequence[Strand], results: tuple[int, ...]) -> None:
    trace, places = strands[0].trace, [x.places for x in strands]
    columns = [list(chain(*x)) for x in zip(*[x.columns for x in strands], strict=True)]
    shapes = list(chain(*[x.layout[1] for x in strands]))
    for strand in strands:  # whatever happens, nothing is done twice
        strand.trace, strand.places, strand.columns = EMPTY, [], []
    with _undisturbed():
        if results:
            _write(trace, results, columns, shapes, places)
        for place in chain(*places):
            for holder in place.holders if place else ():
                x = holder()
                if x is not None and x._place is place:
                    x.leave_tape()


def _write(
    trace: Trace,
    results: tuple[int, ...],
    columns: Sequence[Column],
    shapes: Sequence[torch.Size],
    places: Sequence[Sequence[Place | None]],
) -> None:
    """Compute the results and write them to memory, new or that which they begin in."""
    vectors: list[Column] = []
    scalars: list[Sequence[float]] = []
    components: list[list[Column]] = []
    given = iter(columns)
    for format, begins_as in trace.variables:
        own: list[Any] = [next(given) for _ in format.components if begins_as != "nothing"]
        components.append(own)
        if begins_as == "number":
            scalars += [list(map(float, own[0]))]
        else:
            vectors += own
    device = vectors[0][0].device
    for i in results:
        format, begins_as = trace.variables[i]
        if begins_as == "nothing":
            holders = chain(*[x[i].holders for x in places])  # type: ignore[union-attr]
            made = [
                _memory(holder(), shape, format, device)
                for holder, shape in zip(holders, shapes, strict=True)
            ]
            components[i] = list(zip(*made, strict=True))
    outputs = [column for i in results for column in components[i]]
    addresses = {id(x): list(map(Tensor.data_ptr, x)) for x in chain(vectors, outputs)}
    run_alike(
        *trace.kernel(results),
        Columns(vectors, scalars, outputs),
        list(map(torch.Size.numel, shapes)),
        [addresses[id(x)] for x in chain(vectors, outputs)],
    )


def _memory(x: Any, shape: torch.Size, format: Format, device: torch.device) -> list[Tensor]:
    """Components for a result, which it gets at once, if anybody has it."""
    if x is None:
        return [torch.empty(shape, dtype=c.dtype, device=device) for c in format.components]
    stride = x.stride()
    made = [
        torch.empty_strided(shape, stride, dtype=c.dtype, device=device) for c in format.components
    ]
    x._hold(made, format, x._role, own=True)
    return made


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Within, nobody sees or changes what is done with plain tensors."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        yield
