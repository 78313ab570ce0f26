"""Operations deferred on the tape of a step, if no other code can notice.

Operations are deferred within an optimizer's step while autograd does not record. They round to
nearest, on numbers and on tensors of one layout. An operation writes only to memory without other
owners. The tensors that it reads have no other owners either, or are small enough to be copied.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import NARROW
from mcftensor.arithmetic.noise import draw_key
from mcftensor.dispatch.registry import IN_STEP, Shortcut
from mcftensor.dispatch.resolve import Kind, kind, plan
from mcftensor.dispatch.storage_formats import are_apart
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels import LOCK
from mcftensor.kernels.columns import are_same, places_of
from mcftensor.passes.decoded_traces import NO_STATE, State
from mcftensor.passes.expressions import NUMBER
from mcftensor.passes.operators import OPERATORS
from mcftensor.passes.traces import EMPTY, KEYS, NUMBERS, Operation, Trace, Variable
from mcftensor.tensor.step_context import open_tape
from mcftensor.tensor.step_tensors import (
    GradientTensor,
    PendingTensor,
    TapedGradient,
    TapedTensor,
    on_plain,
)
from mcftensor.tensor.tape import Layout, Strand, Tape
from mcftensor.tensor.tensor import MCFTensor

Lists = Sequence[Sequence[Any]]

# The most elements of one copied tensor, and of all copied tensors of a list.
SMALL, MANY = 1 << 20, 1 << 22

# A tensor with a smaller factor than SETTLED defers no more multiplications, and no number smaller
# than LEAST_NOTED is deferred: the product of as many as a trace has is a normal float32.
SETTLED, LEAST_NOTED = 2.0**-60, 0.5

_PLAIN = (Tensor, torch.nn.Parameter)
_increment_version = torch._C._increment_version
_has_function_mode = torch._C._is_torch_function_mode_enabled


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """An operation, the names of its last operands, and whether it writes to its first one."""

    name: str
    keywords: tuple[str, ...]
    in_place: bool
    is_list: bool = False
    """Whether it is an operation on lists."""


_call = functools.lru_cache(maxsize=256)(_Call)


def recorded(name: str, columns: Lists, keywords: tuple[str, ...], *, in_place: bool) -> Any:
    """Record an operation on rows of operands on the tape; keywords name the last operands.

    Returns:
        The results, or the first column if it is written to; None if nothing was recorded.
    """
    tape = None if torch.compiler.is_compiling() else open_tape()
    return None if tape is None else _put_lists(tape, _call(name, keywords, in_place), columns)


def parts_of(columns: Lists, count: int) -> Sequence[Sequence[int]]:
    """Return groups of rows with operands of the same kinds, or all rows if their order matters."""
    kinds = [[_kind_of(x) for x in column] for column in columns]
    groups = places_of(zip(*[x if len(x) == count else x * count for x in kinds], strict=True))
    if len(groups) > 1:
        targets = set(map(id, columns[0]))
        others = [
            x
            for column in columns[1:]
            for x, y in zip(column, columns[0], strict=False)
            if x is not y
        ]
        if len(targets) < count or not targets.isdisjoint(map(id, others)):
            return [range(count)]
        loose = list(filter(_is_loose, columns[0]))  # nothing aliases the others
        if loose and not are_apart([loose, list(filter(_is_loose, others))]):
            return [range(count)]
    return list(groups.values())


def some_rows(columns: Lists, rows: Sequence[int], count: int) -> Lists:
    """Return columns of some rows; a column of one element serves all rows."""
    if len(rows) == count:
        return columns
    return [[x[i] for i in rows] if len(x) == count else x for x in columns]


def _is_loose(x: Any) -> bool:
    """Return whether another tensor may alias the memory of x."""
    is_ours = getattr(x, "_place", None) is not None or getattr(x, "_is_own", False)
    return isinstance(x, Tensor) and not is_ours


def _kind_of(x: Any) -> Any:
    if isinstance(x, (MCFTensor, PendingTensor)):
        place = getattr(x, "_place", None)
        return place or (type(x), getattr(x, "_format", None), x._role)
    return x.dtype if isinstance(x, Tensor) else type(x)


def _put_lists(tape: Tape, call: _Call, columns: Lists) -> Sequence[Any] | None:
    row = [column[0] for column in columns]
    return _put_down(tape, call, row, None if len(columns[0]) == 1 else columns)


def _put_down(
    tape: Tape, call: _Call, row: Sequence[Any], columns: Lists | None = None
) -> Sequence[Any] | None:
    """Record an operation on the first row of columns, which is the only one without columns."""
    with LOCK:
        while True:  # until its operands are on one strand that may become longer
            given = _given(tape, call, row, columns)
            if given is None:
                return None
            key, added, strands, layout = given
            if not strands:
                is_stored = True in [type(x) is _Mark and x.is_stored for x in key]
                strand = tape.strand_for((layout, is_stored), layout, key)
                break
            strand = strands[0]
            if len(strands) > 1:
                tape.part(strands)
            elif key not in strand.trace.made and strand.trace.is_full:
                strand.run()
            else:
                break
        trace = strand.trace
        move = trace.made.get(key) or trace.once(key, lambda: _move(trace, call, key[1:]))
        if move is _IMPOSSIBLE:
            return None
        return _written(strand, move, added) or (row[:1] if columns is None else columns[0])


# --------------------------------------------------------------------------------------- operands

_Added = list[tuple[Sequence[Any], Iterable[Sequence[Any]] | None, bool]]
"""Columns that are not on the tape; the columns of their components and, for storage formats, of
their states, or None for numbers; and whether the tape copies them. Of a single row the elements
themselves are given."""

_ON_TAPE = (TapedTensor, TapedGradient, PendingTensor)


def _given(
    tape: Tape, call: _Call, row: Sequence[Any], columns: Lists | None
) -> tuple[tuple[Any, ...], _Added, list[Strand], Layout] | None:
    """Return rows of operands for the tape, or None if they cannot go there.

    Returns:
        The operation and a mark of each operand, which is its variable on the trace, the place of
        a new operand counted from -1 on, or a property; the new columns, numbers included; the
        strands of the other operands; the layout of all.
    """
    key: list[Any] = [call]
    added: _Added = []
    new: list[Any] = []
    strands: list[Strand] = []
    layout: Layout = ()
    count = 1 if columns is None else len(columns[0])
    mark: Any
    for i, x in enumerate(row):
        cls, column = type(x), x if columns is None else columns[i]
        if cls is float or cls is int:
            mark = _mark_of_number(x) if columns is None else _mark_of_numbers(column, count)
            if mark is None:
                return None
            added.append((column, None, False))
        elif cls in _ON_TAPE and (place := x.__dict__.get("_place")):
            strand, mark = place
            if strand not in strands:
                if strand.tape is not tape or (layout and strand.layout != layout):
                    return None
                layout = strand.layout
                strands.append(strand)
            if not strand.holds(column, mark):
                return None
        elif columns is not None and len(column) != count:
            return None
        elif new and (place := _index(new, column)) >= 0:
            mark = -1 - place
        else:
            is_target = call.in_place and i == 0
            one = _one(tape, x, is_target) if columns is None else _new(tape, column, is_target)
            if one is None:
                return None
            mark, components, its_layout, is_copied = one
            if layout and its_layout != layout:
                return None
            layout = its_layout
            new.append(column)
            added.append((column, components, is_copied))
        key.append(mark)
    if not layout or (count > 1 and new and not _are_apart(added)):
        return None
    return tuple(key), added, strands, layout


# ----------------------------------------------------------------------------------- new operands

_New = tuple[Any, Any, Layout, bool]


def _new(tape: Tape, column: Sequence[Any], is_target: bool) -> _New | None:
    """Return tensors as new operands, or None if they cannot go on the tape.

    Returns:
        Their mark or plain format; the columns of `_Added`; their layout; whether the tape copies
        them.
    """
    first = _one(tape, column[0], is_target)
    if first is None:
        return None
    mark, components, layout, is_copied = first
    rows, layouts = [components], [layout[0]]
    for x in column[1:]:
        found = _one(tape, x, is_target)
        if found is None or found[0] is not mark or found[2][0][0] != layout[0][0]:
            return None
        rows.append(found[1])
        layouts.append(found[2][0])
        is_copied |= found[3]
    if is_copied and (is_target or sum([shape.numel() for _, shape, _ in layouts]) > MANY):
        return None
    return mark, zip(*rows, strict=True), tuple(layouts), is_copied


def _one(tape: Tape, x: Any, is_target: bool) -> _New | None:
    """Return one tensor as `_new`, with its components instead of columns, or None."""
    cls, is_own = type(x), False
    if cls is MCFTensor:
        factor = x._factor
        mark: Any = _mark(x._format, False, factor is not None and x._role == "value")
        is_own = x._is_own or (is_target and x.reclaim())
        components = x._held()
        if factor is not None and (factor.value < SETTLED if is_own else factor.value != 1):
            return None
    elif cls is GradientTensor:
        is_own = not is_target and x.has_one_owner()
        mark, components = _mark(x._format, True, False), (x._component0,)
    elif cls in _PLAIN and x.dtype.is_floating_point:
        mark, components = PLAIN[x.dtype], (x,)
    else:
        return None
    leading = components[0]
    format = mark.variable.format if isinstance(mark, _Mark) else mark
    layout = tape.layout_of(leading, format) if type(leading) in _PLAIN else None
    if layout is None or not (is_own or (not is_target and layout[0][1].numel() <= SMALL)):
        return None
    if cls is MCFTensor and mark.is_stored:
        has_state = is_own and (x._writes is not None or x._factor is not None)
        state = State(x._writes, x._first, x._factor) if has_state else NO_STATE
        components = (*components, state)
    return mark, components, layout, not is_own


class _Mark:
    """The properties of an expansion that is not on the tape."""

    def __init__(self, format: Format, is_gradient: bool, takes_factor: bool) -> None:
        self.kind = kind(format, "value", True, None, is_gradient)
        of = format if is_gradient else None
        self.variable = Variable(self.kind.stored, "tensor", takes_factor, of)
        self.is_stored = format.arithmetic == "numbers"


_mark = functools.lru_cache(maxsize=256)(_Mark)


def _index(columns: Sequence[Any], column: Any) -> int:
    """Return the index of the column of the same tensors, or of the same tensor, or -1."""
    for i, x in enumerate(columns):
        if x is column or (not isinstance(x, Tensor) and are_same(x, column)):
            return i
    return -1


def _are_apart(added: _Added) -> bool:
    """Return whether no tensor of one row occurs in another row, copied or not."""
    own: list[int] = []
    copied: list[int] = []
    for column, components, is_copied in added:
        if components is not None:
            (copied if is_copied else own).extend(map(id, column))
    return len(set(own)) == len(own) and (not copied or set(own).isdisjoint(copied))


def _mark_of_number(x: float) -> str | None:
    """Return whether a number is 1, slightly less, or another; some operations depend on it.

    Return None if it is too large for PyTorch.
    """
    if type(x) is int and not -(2**63) <= x < 2**63:
        return None
    return "one" if x == 1.0 else "below one" if LEAST_NOTED <= x < 1.0 else "other"


def _mark_of_numbers(column: Sequence[Any], count: int) -> str | None:
    """Return the mark of all numbers, or of one for all rows; None if they differ in it."""
    if len(column) not in (1, count) or not {float, int}.issuperset(map(type, column)):
        return None
    marks = set(map(_mark_of_number, column))
    return marks.pop() if len(marks) == 1 else None


# ------------------------------------------------------------------------------------------ moves


class _Move(NamedTuple):
    """An extension of a trace by one operation."""

    trace: Trace
    constants: tuple[float, ...]
    """Constants of the operation, after the given numbers."""
    result: Format | None
    """The format of a new result."""
    draws: bool = False
    """Whether keys are drawn, after the constants."""


_IMPOSSIBLE = _Move(EMPTY, (), None)


def _move(trace: Trace, call: _Call, marks: Sequence[Any]) -> _Move:
    """Return the move of an operation on an expansion, or `_IMPOSSIBLE`."""
    kinds: list[Kind] = []
    indices: list[int] = []
    own: list[tuple[Kind, int]] = []  # of new operands
    for mark in marks:
        if type(mark) is int and mark < 0:
            kind, index = own[-1 - mark]
        elif type(mark) is int:
            kind, index = _kind_on_tape(trace.variables[mark]), mark
        else:
            kind, index = _kind(mark), len(trace.variables)
            trace = trace.with_variable(_variable(mark))
            if not kind.number:
                own.append((kind, index))
        kinds.append(kind)
        indices.append(index)
    begins = None if any(type(x) is int and x >= 0 for x in marks) else (call, *marks)
    ours = {kind.format.arithmetic == "numbers" for kind in kinds if kind.role is not None}
    is_of_terms = ours == {False}
    is_plain = not ours and all(type(x) is not int or x < 0 for x in marks)
    if is_plain or len(ours) > 1 or (trace.operations and trace.is_of_terms is not is_of_terms):
        return _IMPOSSIBLE
    if is_of_terms:
        return _move_of_terms(trace, call, kinds, indices, begins)
    return _move_of_numbers(trace, call, kinds, indices, begins, marks)


def _move_of_terms(
    trace: Trace, call: _Call, kinds: Sequence[Kind], indices: Sequence[int], begins: Any
) -> _Move:
    if call.in_place and (kinds[0].role is None or kinds[0].is_gradient):
        return _IMPOSSIBLE
    found = plan(call.name, tuple(kinds), call.keywords, kinds[0].format if call.in_place else None)
    assert found is not None
    format = found.expression.format
    if format.takes_key:
        return _IMPOSSIBLE
    read, constants = [], []
    for i in found.order:
        if type(i) is float:
            constants.append(i)
            read.append(len(trace.variables))
            trace = trace.with_variable(NUMBERS)
        else:
            read.append(indices[int(i)])
    if call.in_place:
        target = indices[0]
    else:
        target = len(trace.variables)
        trace = trace.with_variable(Variable(format, "nothing"))
    operation = Operation(found.expression.operation, format, tuple(read), target)
    return _moved(trace, operation, begins, tuple(constants), None if call.in_place else format)


def _move_of_numbers(
    trace: Trace,
    call: _Call,
    kinds: Sequence[Kind],
    indices: Sequence[int],
    begins: Any,
    marks: Sequence[Any],
) -> _Move:
    """Return the move of one of PyTorch's operations on decoded numbers, with plain results."""
    stored = [kind.stored for kind in kinds if kind.number is None]
    if kinds[0].number or not all(x.result is _FLOAT32 or x.dtype in NARROW for x in stored):
        return _IMPOSSIBLE
    name, key = call.name, None
    format: Format = _FLOAT32
    if call.is_list:
        name = f"_foreach_{name}"
    if call.in_place:
        target, format = indices[0], stored[0]
        if kinds[0].is_gradient or not (format.arithmetic == "numbers" or format is _FLOAT32):
            return _IMPOSSIBLE
    else:
        target = len(trace.variables)
        trace = trace.with_variable(Variable(_FLOAT32, "nothing"))
    operation = Operation(name, format, tuple(indices), target, call.keywords)
    if trace.is_note(operation):
        if marks[1] == "other":
            return _IMPOSSIBLE
    elif call.in_place and format.rounding == "stochastic":
        key = len(trace.variables)
        trace = trace.with_variable(KEYS)
    operation = operation._replace(key=key)
    result = None if call.in_place else _FLOAT32
    return _moved(trace, operation, begins, (), result, draws=key is not None)


def _moved(
    trace: Trace,
    operation: Operation,
    begins: Any,
    constants: tuple[float, ...],
    result: Format | None,
    draws: bool = False,
) -> _Move:
    return _Move(trace.then(operation, begins), constants, result, draws)


_FLOAT32 = PLAIN[torch.float32]


def _kind(mark: Any) -> Kind:
    if isinstance(mark, str):
        return kind(NUMBER, None, False, "one" if mark == "one" else "other")
    if isinstance(mark, _Mark):
        return mark.kind
    return kind(mark, None if mark.arithmetic == "plain" else "value", True)


def _kind_on_tape(variable: Variable) -> Kind:
    if variable.gradient_of is not None:
        return kind(variable.gradient_of, "value", True, None, True)
    return _kind(variable.format)


def _variable(mark: Any) -> Variable:
    if isinstance(mark, str):
        return NUMBERS
    return mark.variable if isinstance(mark, _Mark) else Variable(mark, "tensor")


_reference = weakref.ref


def _copied(x: Any) -> Any:
    """Return a component, or the state beside components, that later writes do not change."""
    if isinstance(x, Tensor):
        return x.clone()
    return x if x.factor is None else x._replace(factor=SimpleNamespace(value=x.factor.value))


def _written(strand: Strand, move: _Move, added: _Added) -> list[TapedTensor | PendingTensor]:
    """Record an operation on a strand, and return its results, if they are new.

    Entries after the variables of the trace, which an interrupt may leave, are overwritten.
    """
    begun, width = len(strand.trace.variables), strand.trace.width
    holders: list[Any] = []
    columns: list[Any] = []
    is_one, count = strand.is_one, len(strand.layout)
    for column, components, is_copied in added:
        held: Any = None
        if components is None:
            columns.append(column if is_one else [*column] * (count // len(column)))
        elif is_copied:
            columns += (
                map(_copied, components) if is_one else [[*map(_copied, x)] for x in components]
            )
        else:
            place = strand, begun + len(holders)
            columns += components
            held = _reference(column) if is_one else [*map(_reference, column)]
            tensors: Sequence[Any] = (column,) if is_one else column
            for tensor in tensors:
                tensor._place = place
                is_gradient = tensor.__class__ is GradientTensor
                tensor.__class__ = TapedGradient if is_gradient else TapedTensor
        holders.append(held)
    for constant in move.constants:
        columns.append(constant if is_one else [constant] * count)
        holders.append(None)
    if move.draws:
        keys = [draw_key(device) for device, _, _ in strand.layout]
        columns.append(keys[0] if is_one else keys)
        holders.append(None)
    results: list[TapedTensor | PendingTensor] = []
    if move.result is not None:
        place = strand, begun + len(holders)
        result = (PendingTensor if move.result.arithmetic == "plain" else TapedTensor).result
        results = [result(x, move.result, place) for x in strand.layout]
        holders.append(_reference(results[0]) if is_one else [*map(_reference, results)])
    strand.holders[begun:] = holders
    strand.columns[width:] = columns
    strand.trace = move.trace
    return results


# ---------------------------------------------------------------- without PyTorch's dispatcher


def _at_once(name: str, *, in_place: bool) -> Callable[..., Any]:
    """Return a function that records an operation without PyTorch's dispatcher, to save time."""
    _, count, _, keyword, _ = OPERATORS[name]
    ordinary, valued = _call(name, (), in_place), _call(name, (keyword,), in_place)

    def put_down(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = open_tape()
        if tape is None or len(args) != count:
            return NotImplemented
        if in_place and type(args[0]) in _PLAIN:
            return _on_plain(func, args, kwargs)
        if not kwargs:
            found = _put_down(tape, ordinary, args)
        elif len(kwargs) == 1 and keyword in kwargs:
            found = _put_down(tape, valued, (*args, kwargs[keyword]))
        else:
            return NotImplemented
        if found is None:
            return NotImplemented
        if in_place:
            _increment_version(found)
        return found[0]

    return put_down


def _on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run PyTorch's own operation if it writes and reads no expansion with tails."""
    target = args[0]
    is_list = isinstance(target, (list, tuple))
    dtype = target[0].dtype if is_list else target.dtype
    if is_list and any(type(x) not in _PLAIN or x.dtype != dtype for x in target):
        return NotImplemented
    plain: list[Any] = [target]
    for x in args[1:]:
        is_list = isinstance(x, (list, tuple))
        own = [_as_plain(y, dtype) for y in x] if is_list else _as_plain(x, dtype)
        if own is NotImplemented or (is_list and any(y is NotImplemented for y in own)):
            return NotImplemented
        plain.append(own)
    return func(*plain, **kwargs)


def _as_plain(x: Any, dtype: torch.dtype) -> Any:
    """Return an operand without a wrapper, or NotImplemented if it has tails."""
    if isinstance(x, GradientTensor) and x._format.dtype == dtype:
        return x.__dict__["_component0"]
    return NotImplemented if isinstance(x, Tensor) and type(x) not in _PLAIN else x


def _lists_at_once(name: str, *, in_place: bool) -> Callable[..., Any]:
    """Evaluate lists like `_at_once`; record rows with operands of the same kinds together."""
    _, count, _, keyword, _ = OPERATORS[name]

    def put_down(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = open_tape()
        valued = len(args) == count + 1 and keyword == "value" and not kwargs
        if tape is None or not (valued or len(args) == count):
            return NotImplemented
        columns = [x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *kwargs.values())]
        lengths = [len(x) for x in args if isinstance(x, (list, tuple))]
        if not all(columns) or len(set(lengths)) > 1 or (kwargs and [*kwargs] != [keyword]):
            return NotImplemented
        if in_place and type(columns[0][0]) in _PLAIN:
            return _on_plain(func, args, kwargs)
        call = _call(name, ("value",) if valued else tuple(kwargs), in_place, True)
        found = _put_lists(tape, call, columns)
        uncounted = args[0]
        if found is None:
            before = [getattr(x, "_version", None) for x in columns[0]]
            found = _by_parts(tape, call, columns, func, args, kwargs)
            each = zip(columns[0], before, strict=True)
            uncounted = [x for x, version in each if found and x._version == version]
        if found is None:
            return NotImplemented
        if not in_place:
            return tuple(found)
        if any(isinstance(x, MCFTensor) for x in args[0]):  # lists of plain tensors count nothing
            _increment_version(uncounted)
        return args[0]

    return put_down


def _by_parts(
    tape: Tape,
    call: _Call,
    columns: Lists,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Sequence[Any] | None:
    """Record the rows that can be deferred, and carry out the others; None if all are alike."""
    count = max(map(len, columns))
    parts = parts_of(columns, count)
    draws = any(isinstance(x, MCFTensor) and x._format.rounding == "stochastic" for x in columns[0])
    if len(parts) == 1 or draws:  # keys are drawn row by row
        return None
    results: list[Any] = [None] * count
    left: list[int] = []
    for rows in parts:
        found = _put_lists(tape, call, some_rows(columns, rows, count))
        if found is None:
            left += rows
        else:
            for i, x in zip(rows, found, strict=True):
                results[i] = x
    if len(left) == count:
        return None
    if left:
        left.sort()
        own = [[x[i] for i in left] if isinstance(x, (list, tuple)) else x for x in args]
        named = {
            key: [x[i] for i in left] if isinstance(x, (list, tuple)) else x
            for key, x in kwargs.items()
        }
        for i, x in zip(left, func(*own, **named), strict=True):
            results[i] = x
    return results


def _method(name: str, func: Any) -> None:
    """Define the same as a method of tensors on the tape.

    It avoids `__torch_function__`, whose call by PyTorch takes longer than the rest.
    """
    original, put_down = getattr(Tensor, name), IN_STEP[func]

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not _has_function_mode():
            found = put_down(func, args, kwargs)
            if found is not NotImplemented:
                return found
        return original(*args, **kwargs)

    setattr(TapedTensor, name, method)
    setattr(PendingTensor, name, method)


_DEFERRED: dict[Any, Shortcut] = {}
for _name, *_, _symbol in OPERATORS.values():
    for _suffix, _in_place in (("", False), ("_", True)):
        _func = getattr(Tensor, _name + _suffix, None)
        if _func is None:  # rsub
            continue
        IN_STEP[_func] = _DEFERRED[_func] = _at_once(_name, in_place=_in_place)
        _method(_name + _suffix, _func)
        if _symbol is not None:
            _method(f"__{'i' * _in_place}{_symbol}__", _func)
        _foreach = getattr(torch, f"_foreach_{_name}{_suffix}", None)
        if _foreach is not None:
            IN_STEP[_foreach] = _DEFERRED[_foreach] = _lists_at_once(_name, in_place=_in_place)


def pending_function(
    cls: type,
    func: Any,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Defer an operation on a pending tensor, or compute it and carry out the operation."""
    kwargs = kwargs or {}
    put_down = _DEFERRED.get(func)
    if put_down is not None:
        result = put_down(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return on_plain(func, types, args, kwargs)


PendingTensor.__torch_function__ = classmethod(pending_function)  # type: ignore[assignment]
