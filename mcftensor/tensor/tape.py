"""The tape of a step: deferred operations on tensors whose memory has no other owner.

A for-loop optimizer calls about ten operations per parameter, one parameter after the other. Within
its step the operations are deferred. Tensors with the same operations are then computed together,
in one pass over memory, and temporary results are never stored.

Access to the components of a tensor on the tape runs its strand first. Other tensors that an
operation reads are copied, so that later changes to them do not matter. The end of the step runs
all remaining operations.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Hashable, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mcftensor.formats import Format
from mcftensor.kernels import LOCK, Column, Columns, run_alike
from mcftensor.kernels.facts import facts_of
from mcftensor.passes.decoded_traces import Decoded
from mcftensor.passes.expressions import Expression, Operand, carry_out
from mcftensor.passes.term_traces import kernel
from mcftensor.passes.traces import EMPTY, Trace

# The number of strands at which the older half of them is run: enough to compute many tensors
# together, and few enough for the caches.
FEW = 256

# The number of elements on the tape at which all strands are run, to bound the memory in use.
MUCH = 1 << 20

Layout = tuple[tuple[torch.device, torch.Size, tuple[int, ...]], ...]
"""The device, shape and strides of each of several tensors, one for each row."""


class Strand:
    """Deferred operations on some tensors: one trace, which is run for each row of tensors.

    Attributes:
        tape: the tape of this strand.
        layout: the layout of all its tensors, row by row.
        number: the number of strands of the tape that began before.
        trace: the operations.
        is_one: whether it has one row. Its holders and columns are then single objects, not lists.
        holders: for each variable, weak references to the tensors of the rows, or None for copies
            and numbers, which only the strand uses.
        columns: the components and numbers that the variables begin with, in their order.
        next: the strand that began when this one ended.
        followed_by: the operation with which that strand begins.
    """

    __slots__ = (
        *("columns", "followed_by", "holders", "is_one", "layout", "next", "number", "tape"),
        "trace",
    )

    def __init__(self, tape: Tape, layout: Layout, number: int) -> None:
        self.tape = tape
        self.layout = layout
        self.number = number
        self.trace = EMPTY
        self.is_one = len(layout) == 1
        self.holders: list[Any] = []
        self.columns: list[Any] = []
        self.next: Strand | None = None
        self.followed_by: Hashable = None

    def holds(self, column: Any, index: int) -> bool:
        """Return whether a variable stands for these tensors, row by row, or for this tensor."""
        held = self.holders[index] if index < len(self.holders) else None
        if held is None:  # a signal has interrupted an append
            return False
        if self.is_one:
            return held() is column
        if isinstance(column, Tensor) or len(column) != len(held):
            return False
        return all(map(operator.is_, map(_call, held), column))

    def results(self) -> tuple[int, ...]:
        """Return the variables to write to memory, which are still referenced."""
        holders, is_alive = self.holders, _is_alive if self.is_one else _is_any_alive
        return tuple([i for i in self.trace.written if is_alive(holders[i])])

    def run(self) -> None:
        """Run this strand, together with other strands of the same trace."""
        with LOCK:
            trace = self.trace
            _run([self, *[x for x in self.tape.strands if x.trace is trace and x is not self]])


_call = weakref.ref.__call__


def _is_alive(reference: weakref.ref[Any]) -> bool:
    return reference() is not None


def _is_any_alive(references: Sequence[weakref.ref[Any]]) -> bool:
    return any(map(_is_alive, references))


class Tape:
    """The strands of a step, and the latest one of each kind."""

    def __init__(self) -> None:
        self.strands: list[Strand] = []
        self._latest: dict[Hashable, Strand] = {}
        self._layouts: dict[torch.Size, Layout] = {}
        self._elements = 0
        self._numbers = itertools.count()

    def layout_of(self, x: Tensor, format: Format) -> Layout | None:
        """Return the layout of a tensor with a leading component, or None if it has no elements or
        dimensions, or they are not in order.

        An equal layout is reused, because Python's collector traverses every object that stays
        alive.
        """
        if x.layout is not torch.strided:
            return None
        (shape, stride, _), device = format.layout(x), x.device
        found = self._layouts.get(shape)
        if found is None or found[0][2] != stride or found[0][0] != device:
            if not shape or not shape.numel() or not x.is_contiguous() or x.is_meta:
                return None
            found = self._layouts[shape] = ((device, shape, stride),)
        return found

    def strand_for(self, kind: Hashable, layout: Layout, key: Hashable) -> Strand:
        """Return a strand for an operation none of whose tensors is on the tape.

        `kind` is what the tensors of a strand have in common, their layout included; `key`
        identifies the operation.
        """
        latest = self._latest.get(kind)
        if latest is not None and latest.trace is not EMPTY:
            trace = latest.trace
            begins_anew = key in trace.begun and key not in trace.goes_on
            if not (trace.is_full or begins_anew):
                return latest
            latest.followed_by = key
        self._make_room()
        strand = self._latest[kind] = Strand(self, layout, next(self._numbers))
        if latest is not None:
            latest.next = strand
        self.strands.append(strand)
        self._elements += sum([shape.numel() for _, shape, _ in layout])
        return strand

    def _make_room(self) -> None:
        """Run the older half of the strands if they are many, or all but the latest if their
        tensors are large.

        The next strand may be read together with the latest one, and `part` is to see it. Strands
        with results that have no memory yet are left: the caller may be about to drop them.
        """
        is_much = self._elements > MUCH
        if is_much or len(self.strands) >= FEW:
            try:
                _run(self.strands[: -1 if is_much else FEW // 2], with_results=False)
            finally:
                self.strands = [x for x in self.strands if x.trace is not EMPTY]
                self._latest = {k: x for k, x in self._latest.items() if x.trace is not EMPTY}
                self._elements = 0

    def part(self, strands: Sequence[Strand]) -> None:
        """Run all but the last of some strands, for an operation that reads tensors of all.

        A strand that ended where the last one began will not end there the next time.
        """
        *others, last = sorted(strands, key=lambda x: x.number)
        for x in others:
            if x.next is last:
                x.trace.goes_on.add(x.followed_by)
            x.run()

    def run(self) -> None:
        """Carry out all deferred operations."""
        if self.strands:
            with LOCK:
                strands, self.strands, self._latest = self.strands, [], {}
                self._elements = 0
                _run(strands)


def _run(strands: Sequence[Strand], *, with_results: bool = True) -> None:
    """Run strands, in groups of equal trace, results and device, single rows apart from lists.

    An error of one group is raised after the other groups have been run.
    """
    groups: dict[Any, list[Strand]] = {}
    for x in strands:
        if x.trace is not EMPTY:
            groups.setdefault((x.trace, x.results(), x.is_one, x.layout[0][0]), []).append(x)
    errors: list[BaseException] = []
    for (trace, results, *_), group in groups.items():
        if with_results or all(trace.variables[i].begins_as == "tensor" for i in results):
            try:
                _run_together(group, results)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
    if errors:
        raise errors[0]


def _run_together(strands: Sequence[Strand], results: tuple[int, ...]) -> None:
    trace, holders, is_one = strands[0].trace, [x.holders for x in strands], strands[0].is_one
    every = zip(*[x.columns for x in strands], strict=True)
    columns: list[Any] = [*every] if is_one else [list(chain(*x)) for x in every]
    shapes = [shape for x in strands for _, shape, _ in x.layout]
    device = strands[0].layout[0][0]
    done: list[tuple[int, None]] = []
    begun: list[Decoded] = []
    # Modes and transforms must not see the operations on plain tensors. Context managers written in
    # Python would not be safe: a KeyboardInterrupt may cut their ends.
    modes: list[Any] = []
    transforms: list[Any] = []
    is_inference = torch.is_inference_mode_enabled()
    with (
        torch._C.DisableTorchFunction(),
        torch._C._InferenceMode(False) if is_inference else nullcontext(),
    ):
        try:
            for strand in strands:  # even after an error, no operation is carried out twice
                strand.trace, strand.holders, strand.columns = EMPTY, [], []
            while torch._C._len_torch_dispatch_stack():
                modes.append(torch._C._pop_torch_dispatch_stack(None))
            while torch._C._functorch.peek_interpreter_stack() is not None:
                transforms.append(torch._C._functorch.pop_dynamic_layer_stack())
            if results and trace.is_of_terms:
                _write(trace, results, columns, shapes, holders, done)
            elif results:
                _write_numbers(trace, results, columns, shapes, holders, device, begun)
        except BaseException as error:
            if trace.is_of_terms:
                _write_the_rest(trace, results, columns, shapes, holders, done)
            elif results and not isinstance(error, Exception):
                _write_numbers(trace, results, columns, shapes, holders, device, begun)
            raise
        finally:
            try:
                for strand, own in zip(strands, holders, strict=True):
                    for reference in own if is_one else chain(*filter(None, own)):
                        x = None if reference is None else reference()
                        if x is None:
                            continue
                        place = x.__dict__.get("_place")
                        if place is not None and place[0] is strand:
                            x.leave_tape()
            finally:
                while transforms:
                    torch._C._functorch.push_dynamic_layer_stack(transforms.pop())
                while modes:
                    torch._C._push_on_torch_dispatch_stack(modes.pop())


def _references(holders: Sequence[Sequence[Any]], i: int) -> list[weakref.ref[Any]]:
    """Return the references to a variable of several strands, row by row."""
    found = [x[i] for x in holders]
    return found if isinstance(found[0], weakref.ref) else [*chain(*found)]


def _write(
    trace: Trace,
    results: tuple[int, ...],
    columns: Sequence[Column],
    shapes: Sequence[torch.Size],
    holders: Sequence[Sequence[Any]],
    done: list[tuple[int, None]],
) -> None:
    """Compute the results and write them to memory: their own, or newly allocated."""
    vectors: list[Column] = []
    scalars: list[Sequence[float]] = []
    components = _beginnings(trace, columns)
    for (_, begins_as, *_), own in zip(trace.variables, components, strict=True):
        if begins_as == "number":
            scalars += [list(map(float, own[0]))]
        else:
            vectors += own
    device = vectors[0][0].device
    for i in results:
        format, begins_as, *_ = trace.variables[i]
        if begins_as == "nothing":
            references = _references(holders, i)
            made = [
                _memory(reference(), shape, format, device)
                for reference, shape in zip(references, shapes, strict=True)
            ]
            components[i] = list(zip(*made, strict=True))
    outputs = [column for i in results for column in components[i]]
    addresses: dict[int, list[int]] = {}
    for x in chain(vectors, outputs):
        if id(x) not in addresses:
            addresses[id(x)] = facts_of(x)[3]
    run_alike(
        *kernel(trace, results),
        Columns(vectors, scalars, outputs, done=done),
        list(map(torch.Size.numel, shapes)),
        [addresses[id(x)] for x in chain(vectors, outputs)],
    )


def _write_numbers(
    trace: Trace,
    results: tuple[int, ...],
    columns: Sequence[Column],
    shapes: Sequence[torch.Size],
    holders: Sequence[Sequence[Any]],
    device: torch.device,
    begun: list[Decoded],
) -> None:
    """Compute with decoded numbers, or resume a computation that an interrupt has cut."""
    references = {i: _references(holders, i) for i in results}

    def memory(i: int, row: int) -> list[Tensor]:
        return _memory(references[i][row](), shapes[row], trace.variables[i].format, device)

    if not begun:
        beginnings = _beginnings(trace, columns)
        begun.append(Decoded(trace, results, beginnings, shapes, memory, device))
    try:
        begun[0].run()
    finally:
        for i, row in begun[0].lost:
            if (x := references[i][row]()) is not None:
                x.give_memory()


def _beginnings(trace: Trace, columns: Sequence[Column]) -> list[list[Any]]:
    """Return the columns that each variable begins with."""
    given = iter(columns)
    return [[next(given) for _ in range(width)] for width in trace.widths]


def _write_the_rest(
    trace: Trace,
    results: tuple[int, ...],
    columns: Sequence[Column],
    shapes: Sequence[torch.Size],
    holders: Sequence[Sequence[Any]],
    done: Sequence[tuple[int, None]],
) -> None:
    """After an error, carry out the remaining operations one by one and row by row.

    Only the results of operations that raise again are missing, as in eager execution.
    """
    left, components = sum([count for count, _ in done]), _beginnings(trace, columns)
    made = [i for i in results if not components[i]]
    references = {i: _references(holders, i) for i in made}
    rows = []
    for row, shape in enumerate(shapes):
        start = min(left, shape.numel())
        left -= start
        if start < shape.numel():
            own = {i: x for i in made if (x := references[i][row]()) is not None}
            rows.append((row, start, {i: (x, x.give_memory()) for i, x in own.items()}))
    for row, start, own in rows:
        stored = [
            [x.view(-1)[start:] if isinstance(x, Tensor) else float(x) for x in beginning]
            for beginning in [[column[row] for column in each] for each in components]
        ]
        _write_row(trace, stored, own, shapes[row], start)


def _write_row(
    trace: Trace,
    stored: list[list[Any]],
    made: dict[int, tuple[Any, list[Tensor] | None]],
    shape: torch.Size,
    start: int,
) -> None:
    """Carry out a trace on the elements of one row from `start` on.

    `stored` are the components that variables begin with, and `made` the results with their
    memory. Operations that raise are skipped, and so are operations that read their results.
    """
    for name, format, operands, target, *_ in trace.operations:
        if not all(stored[i] for i in operands):
            continue
        with suppress(Exception):  # the caller raises the first one
            read = [Operand(trace.variables[i].format, [[x] for x in stored[i]]) for i in operands]
            vectors = [x for i in operands for x in stored[i] if isinstance(x, Tensor)]
            new = format.empty_like(vectors[0])
            carry_out(Expression(name, format), read, [[x] for x in new])
            if stored[target]:
                torch._foreach_copy_(stored[target], new)  # by one call, which no signal interrupts
            elif target in made:
                x, memory = made[target]
                memory = memory or _empty(x, shape, format, new[0].device)
                stored[target] = [c.view(-1)[start:] for c in memory]
                torch._foreach_copy_(stored[target], new)
                x._hold(memory, format, x._role, own=True)
            else:
                stored[target] = new


def _memory(x: Any, shape: torch.Size, format: Format, device: torch.device) -> list[Tensor]:
    """Allocate components for a result, and attach them if the result is still referenced."""
    made = _empty(x, shape, format, device)
    if x is not None:
        x._hold(made, format, x._role, own=True)
    return made


def _empty(x: Any, shape: torch.Size, format: Format, device: torch.device) -> list[Tensor]:
    """Allocate memory for the components of a result that may have no reference."""
    if x is None:
        return [torch.empty(shape, dtype=c.dtype, device=device) for c in format.components]
    stride = x.stride()
    return [
        torch.empty_strided(shape, stride, dtype=c.dtype, device=device) for c in format.components
    ]
