"""Operations that go on the tape of a step, where nobody can tell.

That is, within a step of an optimizer and where gradients are not recorded: an operation that is
rounded to nearest, on tensors that lie alike and on numbers. What it writes to is in memory that
nobody else has; what it reads is so too, or small enough to be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcftensor.dispatch.plans import Kind, plan
from mcftensor.dispatch.registry import SHORTCUTS
from mcftensor.formats import PLAIN, ExpansionFormat, Format
from mcftensor.kernels.columns import are_same
from mcftensor.kernels.opaque import is_eager
from mcftensor.passes.expressions import NUMBER
from mcftensor.passes.traces import EMPTY, NUMBERS, Operation, Trace, Variable
from mcftensor.tensor.stepping import open_tape
from mcftensor.tensor.tape import LOCK, Layout, Place, Strand, Tape
from mcftensor.tensor.taped import TapedTensor
from mcftensor.tensor.tensor import LiftedTensor, MCFTensor

Lists = Sequence[Sequence[Any]]

# Elements of a tensor that is copied rather than read at once.
SMALL = 1 << 17

_PLAIN = (Tensor, torch.nn.Parameter)


class _Call(NamedTuple):
    """An operation, the names of its last operands, and whether it writes to its first one."""

    name: str
    keywords: tuple[str, ...]
    in_place: bool


def recorded(name: str, columns: Lists, keywords: tuple[str, ...], *, in_place: bool) -> Any:
    """Put an operation on rows of operands on the tape, the last of which are given by keywords.

    Returns:
        The results, or what is written to, the first column. None where nothing was put down.
    """
    tape = open_tape()
    if tape is None or not is_eager():
        return None
    with LOCK:
        return _put_down(tape, _Call(name, keywords, in_place), columns)


def _put_down(tape: Tape, call: _Call, columns: Lists) -> Sequence[Any] | None:
    count = len(columns[0])
    marks: list[Any] = []  # what operands are
    new: list[_New] = []
    added: list[Any] = []  # what is new, and numbers
    strand: Strand | None = None
    for column in columns:
        cls = type(column[0])
        if cls is TapedTensor:
            place = column[0]._place
            own, index = place.found()
            if own.tape is not tape or not own.has(place, index) or not place.is_of(column):
                return None
            if strand is None:
                strand = own
            elif own is not strand:
                if own.layout != strand.layout:
                    return None
                if not strand.trace.has_room_for(own.trace):
                    strand.run()
                    own.run()
                    return _put_down(tape, call, columns)
                strand.join(own)
                _, index = place.found()
            marks.append(index)
        elif cls is float or cls is int:
            mark = _mark_of_numbers(column, count)
            if mark is None:
                return None
            marks.append(mark)
            added.append(column)
        elif len(column) != count:
            return None
        elif again := [i for i, x in enumerate(new) if are_same(x.tensors, column)]:
            marks.append(-1 - again[0])
        else:
            found = _new(cls, column, is_target=call.in_place and not marks)
            if found is None:
                return None
            marks.append(found.mark)
            new.append(found)
            added.append(found)
    layout = new[0].layout if strand is None else strand.layout
    for x in new:
        if x.layout != layout:
            return None
    if count > 1 and not _are_apart(new):
        return None
    if strand is None:
        strand = Strand(tape, layout)
    elif not strand.trace.has_room_for(EMPTY):
        strand.run()
        return _put_down(tape, call, columns)
    trace = strand.trace
    move = trace.once((call, *marks), lambda: _move(trace, call, marks))
    if move is _IMPOSSIBLE:
        return None
    results = _written(strand, move, added)
    return results if results else columns[0]


# ------------------------------------------------------------------------------ what operands are


class _New:
    """Tensors that are not on the tape, one for each row."""

    __slots__ = ("is_copied", "layout", "mark", "rows", "tensors")

    def __init__(
        self,
        mark: Format | Kind,
        tensors: Sequence[Any],
        rows: Sequence[Sequence[Tensor]],
        layout: Layout,
        is_copied: bool,
    ) -> None:
        self.mark = mark
        self.tensors = tensors
        self.rows = rows
        self.layout = layout
        self.is_copied = is_copied


def _new(cls: type, column: Sequence[Any], *, is_target: bool) -> _New | None:
    """Tensors for the tape; None where they cannot go there."""
    first = column[0]
    mark: Format | Kind
    if len(column) > 1 and not _look_alike(cls, column):
        return None
    if cls is MCFTensor:
        mark = first._format
        is_own = all(x._is_own or (is_target and x.regain()) for x in column)
        rows = [x._read() for x in column]
    elif cls is LiftedTensor:
        mark, is_own = Kind(first._format, "value", has_dims=True, is_lifted=True), False
        rows = [(x._component0,) for x in column]
    elif cls in _PLAIN and first.dtype.is_floating_point:
        mark, is_own = PLAIN[first.dtype], False
        rows = [(x,) for x in column]
    else:
        return None
    if is_target and not is_own:
        return None
    device = rows[0][0].device
    if device.type == "meta":
        return None
    shapes, strides = [], []
    for row in rows:
        x = row[0]
        shape = x.shape
        if (
            not shape
            or type(x) not in _PLAIN
            or x.layout is not torch.strided
            or not x.is_contiguous()
            or x.device != device
            or not 0 < x.numel() <= (_LARGEST if is_own else SMALL)
        ):
            return None
        shapes.append(shape)
        strides.append(x.stride())
    return _New(mark, column, rows, (device, shapes, strides), not is_own)


_LARGEST = 1 << 62


def _look_alike(cls: type, column: Sequence[Any]) -> bool:
    """Whether tensors are of one class, and of one format or dtype."""
    if set(map(type, column)) != {cls}:
        return False
    if issubclass(cls, MCFTensor):
        return len({x._format for x in column}) == 1
    return len({x.dtype for x in column}) == 1


def _are_apart(new: Sequence[_New]) -> bool:
    """Whether no tensor of one row that goes on the tape stands in another one."""
    own = [id(x) for part in new if not part.is_copied for x in part.tensors]
    return len(set(own)) == len(own)


def _mark_of_numbers(column: Sequence[Any], count: int) -> str | None:
    """Whether numbers are one, which some operations depend on; None where they are not alike."""
    if len(column) == 1:
        (x,) = column
        if type(x) is int and not -(2**63) <= x < 2**63:
            return None
        return "one" if x == 1 else "other"
    if len(column) != count or not {float, int}.issuperset(map(type, column)):
        return None
    ones = column.count(1)
    return None if 0 < ones < count else "one" if ones else "other"


# ------------------------------------------------------------------------------- what comes of it


class _Move(NamedTuple):
    """How an operation lengthens a trace."""

    trace: Trace
    constants: tuple[float, ...]
    """Numbers of its own, behind those it is given."""
    result: Format | None
    """The format of a new result."""


_IMPOSSIBLE = _Move(EMPTY, (), None)


def _move(trace: Trace, call: _Call, marks: Sequence[Any]) -> _Move:
    """The move of an operation that is rounded to nearest, of an expansion."""
    kinds: list[Kind] = []
    indices: list[int] = []
    own: list[tuple[Kind, int]] = []  # of what is new
    for mark in marks:
        if type(mark) is int and mark < 0:
            kind, index = own[-1 - mark]
        elif type(mark) is int:
            kind, index = _kind(trace.variables[mark].format), mark
        else:
            kind, index = _kind(mark), len(trace.variables)
            trace = trace.with_variable(NUMBERS if kind.number else Variable(kind.stored, "tensor"))
            if not kind.number:
                own.append((kind, index))
        kinds.append(kind)
        indices.append(index)
    found = plan(call.name, tuple(kinds), call.keywords, kinds[0].format if call.in_place else None)
    format = found.expression.format
    if not isinstance(format, ExpansionFormat) or format.rounding != "nearest":
        return _IMPOSSIBLE
    read, constants = [], []
    for i in found.order:
        if type(i) is float:
            constants.append(i)
            read.append(len(trace.variables))
            trace = trace.with_variable(NUMBERS)
        else:
            read.append(indices[i])
    if call.in_place:
        target = indices[0]
    else:
        target = len(trace.variables)
        trace = trace.with_variable(Variable(format, "nothing"))
    operation = Operation(found.expression.operation, format, tuple(read), target)
    return _Move(trace.then(operation), tuple(constants), None if call.in_place else format)


def _kind(mark: Any) -> Kind:
    if isinstance(mark, str):
        return Kind(NUMBER, number=mark)
    if isinstance(mark, ExpansionFormat):
        return Kind(mark, "value", has_dims=True)
    return mark if isinstance(mark, Kind) else Kind(mark)


def _written(strand: Strand, move: _Move, added: Sequence[Any]) -> list[TapedTensor]:
    """Write an operation down, and return its results, if they are new."""
    count = len(strand.layout[1])
    places: list[Place | None] = [*strand.places]
    columns = [*strand.columns]
    for x in added:
        place = None
        if type(x) is not _New:
            columns.append([float(y) for y in x] * (count // len(x)))
        elif x.is_copied:
            columns += zip(*[[y.clone() for y in row] for row in x.rows], strict=True)
        else:
            columns += zip(*x.rows, strict=True)
            place = Place(strand, len(places), x.tensors)
            for tensor in x.tensors:
                TapedTensor.enter(tensor, place)
        places.append(place)
    for constant in move.constants:
        columns.append([constant] * count)
        places.append(None)
    results = []
    if move.result is not None:
        device, shapes, strides = strand.layout
        for shape, stride in zip(shapes, strides, strict=True):
            results.append(TapedTensor.result(shape, stride, move.result, device))
        place = Place(strand, len(places), results)
        for made in results:
            made._place = place
        places.append(place)
    strand.write(move.trace, places, columns)
    return results


# ---------------------------------------------------------------- without PyTorch's dispatcher

# name: how many operands are given by their places.
_TAKES = {
    **dict.fromkeys(("sqrt", "square", "reciprocal"), 1),
    **dict.fromkeys(("add", "sub", "mul", "div"), 2),
    **dict.fromkeys(("lerp", "addcmul", "addcdiv"), 3),
}
_KEYWORDS = {"alpha", "value"}


def _at_once(name: str, *, in_place: bool) -> Callable[..., Any]:
    """What puts an operation on the tape without PyTorch's dispatcher, which takes longer."""
    count = _TAKES[name]

    def put_down(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if open_tape() is None or len(args) != count or not _KEYWORDS.issuperset(kwargs):
            return NotImplemented
        columns = [(x,) for x in (*args, *kwargs.values())]
        found = recorded(name, columns, tuple(kwargs), in_place=in_place)
        if found is None:
            return NotImplemented
        if in_place:
            torch._C._increment_version(args[:1])
        return found[0]

    return put_down


def _lists_at_once(name: str, *, in_place: bool) -> Callable[..., Any]:
    """The same of lists."""
    count = _TAKES[name]

    def put_down(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        valued = len(args) == count + 1 and name in ("addcmul", "addcdiv") and not kwargs
        if open_tape() is None or not (valued or len(args) == count):
            return NotImplemented
        columns = [x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *kwargs.values())]
        if not all(columns) or not _KEYWORDS.issuperset(kwargs):
            return NotImplemented
        keywords = ("value",) if valued else tuple(kwargs)
        found = recorded(name, columns, keywords, in_place=in_place)
        if found is None:
            return NotImplemented
        if not in_place:
            return tuple(found)
        torch._C._increment_version(args[0])
        return args[0]

    return put_down


for _name in _TAKES:
    for _suffix, _in_place in (("", False), ("_", True)):
        SHORTCUTS[getattr(Tensor, _name + _suffix)] = _at_once(_name, in_place=_in_place)
        _foreach = getattr(torch, f"_foreach_{_name}{_suffix}", None)
        if _foreach is not None:
            SHORTCUTS[_foreach] = _lists_at_once(_name, in_place=_in_place)
