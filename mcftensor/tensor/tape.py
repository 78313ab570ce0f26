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

import itertools
import operator
import threading
import weakref
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mcftensor.formats import Format
from mcftensor.kernels import Column, Columns, run_alike
from mcftensor.passes.traces import EMPTY, Trace

# Strands that are put down before the older half of them is run: enough to go together, and few
# enough to stay in the caches.
FEW = 64

# Elements of tensors on strands after which all these are run: what they hold is not to pile up.
MUCH = 1 << 20

LOCK = threading.RLock()
"""Held while a tape is written or run, for other threads may read what is on it."""

Layout = tuple[tuple[torch.device, torch.Size, tuple[int, ...]], ...]
"""Of tensors, one for each row: the device, shape and strides of each."""


class Strand:
    """What a tape does to some tensors: a trace for each row of them.

    Attributes:
        tape: the one that it is a part of.
        layout: that of all tensors.
        number: how many strands of the tape began before.
        trace: what is done.
        holders: by variable weak references to the tensors of the rows; nothing of what only the
            strand knows, copies and numbers.
        columns: the components and numbers that the variables begin with, in their order.
        next: the strand that was begun when this one ended.
        followed_by: the operation with which it begins.
    """

    __slots__ = ("columns", "followed_by", "holders", "layout", "next", "number", "tape", "trace")

    def __init__(self, tape: Tape, layout: Layout, number: int) -> None:
        self.tape = tape
        self.layout = layout
        self.number = number
        self.trace = EMPTY
        self.holders: list[Sequence[weakref.ref[Any]]] = []
        self.columns: list[Sequence[Any]] = []
        self.next: Strand | None = None
        self.followed_by: Hashable = None

    def holds(self, column: Sequence[Any], index: int) -> bool:
        """Whether a variable stands for these tensors, row by row."""
        if index >= len(self.holders):  # a signal has cut something short
            return False
        held = self.holders[index]
        return len(column) == len(held) and all(map(operator.is_, map(_call, held), column))

    def results(self) -> tuple[int, ...]:
        """The variables that are to be written to memory: not what nobody has any longer."""
        held = [(i, self.holders[i]) for i in self.trace.written]
        return tuple([i for i, x in held if x[0]() is not None or any(map(_is_alive, x))])

    def run(self) -> None:
        """Carry out what has been put down, and what is alike on other strands."""
        with LOCK:
            trace = self.trace
            _run([self, *[x for x in self.tape.strands if x.trace is trace and x is not self]])


_call = weakref.ref.__call__


def _is_alive(reference: weakref.ref[Any]) -> bool:
    return reference() is not None


class Tape:
    """The strands of a step, and the latest one of each layout."""

    def __init__(self) -> None:
        self.strands: list[Strand] = []
        self._latest: dict[Layout, Strand] = {}
        self._elements = 0
        self._numbers = itertools.count()

    def strand_for(self, layout: Layout, key: Hashable) -> Strand:
        """The strand on which an operation goes none of whose tensors is on the tape."""
        latest = self._latest.get(layout)
        if latest is not None and latest.trace is not EMPTY:
            if not (latest.trace.is_full or latest.trace.ends_before(key)):
                return latest
            latest.followed_by = key
        self._make_room()
        strand = self._latest[layout] = Strand(self, layout, next(self._numbers))
        if latest is not None:
            latest.next = strand
        self.strands.append(strand)
        self._elements += sum([shape.numel() for _, shape, _ in layout])
        return strand

    def _make_room(self) -> None:
        """Run the older half of many strands, and all of large ones, but for those with new
        results, which somebody may be about to drop."""
        is_much = self._elements > MUCH
        if is_much or len(self.strands) >= FEW:
            _run(self.strands if is_much else self.strands[: FEW // 2], with_results=False)
            self.strands = [x for x in self.strands if x.trace is not EMPTY]
            self._latest = {x.layout: x for x in self.strands}
            self._elements = 0

    def part(self, strands: Sequence[Strand]) -> None:
        """Run all but the last of some strands, for an operation that needs what is on all. Where
        one has begun when another ended, that is not to end there any more."""
        *others, last = sorted(strands, key=lambda x: x.number)
        for x in others:
            if x.next is last:
                x.trace.goes_on_with(x.followed_by)
            x.run()

    def run(self) -> None:
        """Carry out all that has been put down."""
        if self.strands:
            with LOCK:
                strands, self.strands, self._latest = self.strands, [], {}
                self._elements = 0
                _run(strands)


def _run(strands: Sequence[Strand], *, with_results: bool = True) -> None:
    """Run strands, those together of which the same is to be written."""
    groups: dict[Any, list[Strand]] = {}
    for x in strands:
        if x.trace is not EMPTY:
            groups.setdefault((x.trace, x.results(), x.layout[0][0]), []).append(x)
    for (trace, results, _), group in groups.items():
        if with_results or all(trace.variables[i].begins_as == "tensor" for i in results):
            _run_together(group, results)


def _run_together(strands: Sequence[Strand], results: tuple[int, ...]) -> None:
    trace, holders = strands[0].trace, [x.holders for x in strands]
    columns = [list(chain(*x)) for x in zip(*[x.columns for x in strands], strict=True)]
    shapes = [shape for x in strands for _, shape, _ in x.layout]
    for strand in strands:  # whatever happens, nothing is done twice
        strand.trace, strand.holders, strand.columns = EMPTY, [], []
    # Nobody is to see or change what is done with plain tensors. Contexts written in Python would
    # not do: a KeyboardInterrupt may cut their ends.
    modes = []
    is_inference = torch.is_inference_mode_enabled()
    with (
        torch._C.DisableTorchFunctionSubclass(),
        torch._C._InferenceMode(False) if is_inference else nullcontext(),
    ):
        try:
            while torch._C._len_torch_dispatch_stack():
                modes.append(torch._C._pop_torch_dispatch_stack(None))
            if results:
                _write(trace, results, columns, shapes, holders)
            for strand, own in zip(strands, holders, strict=True):
                for reference in chain(*own):
                    x = reference()
                    if x is not None and x._place is not None and x._place[0] is strand:
                        x.leave_tape()
        finally:
            while modes:
                torch._C._push_on_torch_dispatch_stack(modes.pop())


def _write(
    trace: Trace,
    results: tuple[int, ...],
    columns: Sequence[Column],
    shapes: Sequence[torch.Size],
    holders: Sequence[Sequence[Sequence[weakref.ref[Any]]]],
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
            references = chain(*[x[i] for x in holders])
            made = [
                _memory(reference(), shape, format, device)
                for reference, shape in zip(references, shapes, strict=True)
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
