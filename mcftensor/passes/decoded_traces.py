"""Traces on storage formats: decoded, computed by PyTorch, and encoded.

Rows are decoded one after the other into flat float32 scratch memory, as many at a time as fit the
caches. Each operation is PyTorch's, called once for all rows of a part: an elementwise operation
gives an element the same bits at any place. Nothing is encoded before all has been computed, unless
the format rounds: then an operation reads the rounded numbers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mcftensor.arithmetic.write_counts import moved
from mcftensor.formats import Format
from mcftensor.kernels import cpu, execute
from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.columns import Column, Flat
from mcftensor.passes.decoded_kernels import Stage, stages
from mcftensor.passes.evaluation import Asked, Evaluation, Factor
from mcftensor.passes.format_conversion import decode_columns, encode_columns, part_of
from mcftensor.passes.traces import NUMBERS, Operation, Trace

TOGETHER, TOGETHER_ON_OTHERS = 1 << 19, 1 << 24


def most_together(device: torch.device) -> int:
    """Return how many elements are decoded together.

    The caches of a CPU hold this many of several variables, and they occupy its threads.
    """
    return TOGETHER if device.type == "cpu" else TOGETHER_ON_OTHERS


class _Factor(Protocol):
    """The deferred factor of a tensor."""

    value: float


class State(NamedTuple):
    """The state of a tensor apart from its components."""

    writes: Tensor | None
    first: int
    factor: _Factor | None

    def counted(self) -> Tensor | None:
        """Return the write count of the first element, which in a view is not that of its base."""
        if self.writes is None or not self.first:
            return self.writes
        return moved(self.writes, self.first)


NO_STATE = State(None, 0, None)


class Rows(NamedTuple):
    """Rows computed together, or a part of one long row."""

    first: int
    stop: int
    start: int
    """The first element of the part."""
    lengths: list[int]
    is_part: bool


@dataclass
class Decoded:
    """A trace applied to rows of tensors.

    Args:
        trace: the operations.
        results: the variables to write.
        columns: the initial columns of each variable.
        shapes: the shape of each row.
        make: allocates a result, given its variable and row.
        device: the device of all tensors.
    """

    trace: Trace
    results: tuple[int, ...]
    columns: Sequence[Sequence[Sequence[Any]]]
    shapes: Sequence[torch.Size]
    make: Callable[[int, int], Sequence[Tensor]]
    device: torch.device

    def __post_init__(self) -> None:
        self.errors: list[Exception] = []
        self.lost: set[tuple[int, int]] = set()  # results with a part that could not be computed
        self.steps, self.last_use, self._writes = _steps(self.trace, self.results)
        self.stages = self._usable_stages()
        self._made: dict[tuple[int, int], Sequence[Tensor]] = {}
        self._factors: dict[int, list[float]] = {}
        self._parts = self._cut()
        self._size = max([sum(x.lengths) for x in self._parts])
        self._at: tuple[int, _Computed | _Launched | None] = (0, None)
        self._scratch: list[Tensor] = []

    def run(self) -> None:
        """Do the remaining work; may be called again after an interrupt.

        Raises:
            Exception: the first error of an operation, after all work that does not depend on it.
        """
        while self._at[0] < len(self._parts):
            i, computed = self._at
            if computed is None:
                computed = self._computed(self._parts[i])
                self._at = i, computed
            computed.commit()
            self._at = i + 1, None
            computed.give_back()
        if self._at[0] == len(self._parts):
            self._count_writes()
        if self.errors:
            raise self.errors[0]

    def _computed(self, rows: Rows) -> _Computed | _Launched:
        try:
            launches = self._launches(rows)
            return _Launched(self, rows, launches) if launches else _Computed(self, rows)
        except Exception as error:  # noqa: BLE001
            self.errors.append(error)
            return _Computed(self, rows, is_careful=True)

    def _usable_stages(self) -> list[Stage]:
        """Return kernels for all operations, with the bits of PyTorch's; or none."""
        is_on_cpu = self.device.type == "cpu" and "cpu" not in execute.TRITON_DEVICES
        if not (is_on_cpu and self._have_whole_parts(0, len(self.shapes))):
            return []
        for variable, columns in zip(self.trace.variables, self.columns, strict=True):
            if variable == NUMBERS and not all(map(_is_narrow, set(columns[0]))):
                return []
        return stages(self.trace, self.results, self.steps)

    def _launches(self, rows: Rows) -> list[cpu.Launch]:
        """Return the compiled form of the kernels, or none unless all are compiled."""
        size = sum(rows.lengths), len(rows.lengths)
        found = [execute.kernel_of(x.body, x.signature).compiled(*size) for x in self.stages]
        return [x for x in found if x is not None] if all(found) else []

    def _cut(self) -> list[Rows]:
        limit = most_together(self.device)
        lengths = list(map(torch.Size.numel, self.shapes))
        parts: list[Rows] = []
        first = 0
        while first < len(lengths):
            if lengths[first] > limit and self._has_whole_parts(first):
                for start in range(0, lengths[first], limit):
                    length = min(limit, lengths[first] - start)
                    parts.append(Rows(first, first + 1, start, [length], True))
                first += 1
                continue
            stop, total = first + 1, lengths[first]
            while stop < len(lengths) and total + lengths[stop] <= limit:
                total += lengths[stop]
                stop += 1
            parts.append(Rows(first, stop, 0, lengths[first:stop], False))
            first = stop
        return parts

    def _has_whole_parts(self, row: int) -> bool:
        """Whether parts of a row consist of whole blocks, if blocks share a component."""
        length = self.shapes[row].numel()
        return all(BLOCK_SIZE * x[row].numel() == length for x in self._shared)

    def _have_whole_parts(self, first: int, stop: int) -> bool:
        return not self._shared or all(map(self._has_whole_parts, range(first, stop)))

    @functools.cached_property
    def _shared(self) -> list[Column]:
        """The columns of components that blocks share."""
        pairs = zip(self.trace.variables, self.columns, strict=True)
        return [x[i] for variable, x in pairs if x for i in variable.format.shared]

    def scratch(self) -> Tensor:
        """Return memory for the numbers of a variable in any of the parts."""
        if self._scratch:
            return self._scratch.pop()
        return torch.empty(self._size, dtype=torch.float32, device=self.device)

    def give_back(self, used: Tensor) -> None:
        """Release memory that is no longer needed."""
        self._scratch.append(used.as_strided((self._size,), (1,), 0))

    def states(self, i: int) -> Sequence[State]:
        """Return the states of a variable, apart from its components."""
        return self.columns[i][-1] if self.trace.widths[i] > 1 else ()

    def scalar(self, asked: Asked, rows: Rows) -> Sequence[Any]:
        """Return a scalar of each row."""
        kind, *which = asked
        own = slice(rows.first, rows.stop)
        if kind == "start":
            return [rows.start]
        if kind == "factor":
            return self._product(which[0], which[1], rows)
        if kind == "count":
            i, before = which
            counts = [x.counted() for x in self.states(i)[own]]
            return [x + before if before else x for x in counts if x is not None]
        return self.columns[which[0]][0][own]

    def _product(self, i: int, factor: Factor, rows: Rows) -> list[float]:
        is_of_first, numbers = factor
        found = [1.0] * len(rows.lengths)
        if is_of_first:
            if i not in self._factors:
                states = self.states(i)
                self._factors[i] = [1.0 if x.factor is None else x.factor.value for x in states]
            found = self._factors[i][rows.first : rows.stop] or found
        for j in numbers:
            column = self.columns[j][0][rows.first : rows.stop]
            found = [x * y for x, y in zip(found, column, strict=True)]
        return found

    def leave_factors(self, i: int, rows: Rows, factor: Factor) -> None:
        """Record the factors of rows that stay deferred after the computation."""
        self._left[i][rows.first : rows.stop] = self._product(i, factor, rows)

    @functools.cached_property
    def _left(self) -> dict[int, list[float]]:
        return {i: [1.0] * len(self.shapes) for i in range(len(self.trace.variables))}

    def components(self, i: int, rows: Rows) -> list[Column]:
        """Return the components of a variable; allocate memory for results."""
        format, begins_as, *_ = self.trace.variables[i]
        if begins_as == "nothing":
            made = []
            for row in range(rows.first, rows.stop):
                if (i, row) not in self._made:
                    self._made[i, row] = self.make(i, row)
                made.append(self._made[i, row])
            columns: Sequence[Column] = list(zip(*made, strict=True))
        else:
            count = len(format.components)
            columns = [x[rows.first : rows.stop] for x in self.columns[i][:count]]
        if not rows.is_part:
            return [list(x) for x in columns]
        (length,) = rows.lengths
        return [[x] for x in part_of(format, [x for (x,) in columns], rows.start, length)]

    def views(self, flat: Tensor, rows: Rows, format: Format) -> Column:
        """Return the rows of scratch memory as views."""
        if rows.is_part:
            (length,) = rows.lengths
            shape = (length // BLOCK_SIZE, BLOCK_SIZE) if format.shared else (length,)
            return Flat(flat, rows.lengths, [shape])
        shapes = self.shapes[rows.first : rows.stop]
        if not format.shared or self._have_whole_parts(rows.first, rows.stop):
            return Flat(flat, rows.lengths, shapes)
        return [x.view(y) for x, y in zip(flat.split(rows.lengths), shapes, strict=True)]

    def _count_writes(self) -> None:
        calls: list[functools.partial[Any]] = []
        for i in self.results:
            states = self.states(i)
            counts = [x.writes for x in states if x.writes is not None]
            if counts and i in self._writes:
                calls.append(functools.partial(torch._foreach_add_, counts, self._writes[i]))
            for x, left in zip(states, self._left[i], strict=False):
                if x.factor is not None:
                    calls.append(functools.partial(setattr, x.factor, "value", left))
        calls.append(functools.partial(setattr, self, "_at", (len(self._parts) + 1, None)))
        list(map(functools.partial.__call__, calls))  # one bytecode, so no signal interrupts it


_call: Callable[[functools.partial[Any]], Any] = functools.partial.__call__


class _Launched:
    """Rows computed by kernels, one kernel after the other."""

    def __init__(self, run: Decoded, rows: Rows, launches: Sequence[cpu.Launch]) -> None:
        self._run, self._rows = run, rows
        *self._starts, self._size = accumulate(rows.lengths, initial=0)
        self._scratch: dict[int | None, Tensor] = {}
        self._addresses: dict[int | None, list[list[int]]] = {}
        self._left: list[functools.partial[Any]] = []
        for stage, launch in zip(run.stages, launches, strict=True):
            addresses = [x for i in (*stage.vectors, *stage.stored) for x in self._places(i)]
            if stage.then_run is not None:
                addresses += self._places(None)
            scalars = [run.scalar(x, rows) for x in stage.scalars]
            dtypes = stage.signature.scalars
            widths = rows.lengths if stage.signature.shared else None
            call = execute.prepared(launch, rows.lengths, addresses, scalars, dtypes, widths)
            self._left.append(call)
            if stage.then_run is not None:
                flat = self._scratch[None]
                self._left.append(functools.partial(stage.then_run, flat, out=flat))

    def commit(self) -> None:
        """Run the remaining kernels."""
        drop = functools.partial(self._left.pop, 0)
        while self._left:  # one bytecode per kernel, so no signal interrupts it
            list(map(_call, (self._left[0], drop)))
        for i in self._run.results:
            if self._run.states(i):
                factor = self._run.stages[-1].factors.get(i, (True, ()))
                self._run.leave_factors(i, self._rows, factor)

    def give_back(self) -> None:
        """Return the scratch memory for other rows."""
        while self._scratch:
            self._run.give_back(self._scratch.popitem()[1])

    def _places(self, i: int | None) -> list[list[int]]:
        """Return addresses of a variable's components, or of scratch if it is not a result."""
        run, rows = self._run, self._rows
        if i not in self._addresses:
            if i is None or (not run.columns[i] and i not in run.results):
                flat = self._scratch[i] = run.scratch()[: self._size]
                first, width = flat.data_ptr(), flat.element_size()
                self._addresses[i] = [[first + width * x for x in self._starts]]
            else:
                columns = run.components(i, rows)
                self._addresses[i] = [list(map(Tensor.data_ptr, x)) for x in columns]
        return self._addresses[i]


class _Computed(Evaluation[Tensor]):
    """Computed rows that are not stored yet.

    If `is_careful` is set, an error skips only the operation that raises and its dependents.
    """

    def __init__(self, run: Decoded, rows: Rows, is_careful: bool = False) -> None:
        super().__init__(run.trace)
        self._run, self._rows = run, rows
        self._lost: set[int] = set()
        for place, operation in enumerate(run.steps):
            target = operation.target
            if self._lost.isdisjoint(operation.operands):
                try:
                    self.carry_out(operation)
                except Exception:
                    if not is_careful:
                        raise
            if target not in self.writes and self.trace.variables[target].begins_as == "nothing":
                self._lost.add(target)
            for i in run.last_use[place]:
                self.forget(i)

    def commit(self) -> None:
        """Store the results. Repeating it has no effect."""
        run, rows = self._run, self._rows
        for i in run.results:
            try:
                self._write(i)
            except Exception as error:  # noqa: BLE001
                run.errors.append(error)
                self._write_if_possible(i)
            if i in self._lost:
                run.lost.update([(i, row) for row in range(rows.first, rows.stop)])
            if run.states(i):
                run.leave_factors(i, rows, self.factor_of(i))

    def _write(self, i: int) -> None:
        if i in self.unstored:
            self.rounded(i, self.components(i))
        elif i in self.stored:
            for own, new in zip(self.components(i), self.stored[i], strict=True):
                torch._foreach_copy_(list(own), list(new))

    def _write_if_possible(self, i: int) -> None:
        try:
            self._write(i)
        except Exception:  # noqa: BLE001
            if self.trace.variables[i].begins_as == "nothing":
                self._lost.add(i)

    def give_back(self) -> None:
        """Return the scratch memory for other rows."""
        for i in list(self.numbers):
            self.forget(i)

    def forget(self, i: int) -> None:
        if i in self.numbers:
            self._run.give_back(self.numbers.pop(i))

    def components(self, i: int) -> list[Column]:
        return self._run.components(i, self._rows)

    def scalar(self, asked: Asked) -> Sequence[Any]:
        return self._run.scalar(asked, self._rows)

    def decode(self, i: int, components: Sequence[Column], factor: Asked) -> Tensor:
        format, numbers = self.trace.variables[i].format, self._new()
        decode_columns(format, components, self._run.views(numbers, self._rows, format))
        for rows, own in self._alike({0: self.scalar(factor)}):
            if own[0] != 1:
                numbers[rows].mul_(own[0])
        return numbers

    def encode(
        self, i: int, numbers: Tensor, keys: Sequence[Asked], into: Sequence[Column] | None
    ) -> Sequence[Column]:
        format = self.trace.variables[i].format
        if into is None:
            into = [[torch.empty_like(x) for x in column] for column in self.components(i)]
        rows = self._run.views(numbers, self._rows, format)
        if format.arithmetic == "plain":
            torch._foreach_copy_(list(into[0]), list(rows))
        else:
            drawn = list(self.scalar(keys[1])) if keys else []
            encode_columns(format, rows, into, drawn, start=self._rows.start)
        return into

    def compute(self, operation: Operation, operands: Sequence[Any]) -> Tensor:
        places, keywords = range(len(operands)), operation.keywords
        given = {i: operands[i] for i in places if not isinstance(operands[i], Tensor)}
        is_in_place = operation.operands[0] == operation.target
        function = _function(operation.name, is_in_place)
        made: Tensor = operands[0] if is_in_place else self._new()
        count = len(operands) - len(keywords)
        for rows, numbers in self._alike(given):
            own = [numbers[i] if i in given else operands[i][rows] for i in places]
            named = dict(zip(keywords, own[count:], strict=True))
            if not is_in_place:
                named["out"] = made[rows]
            function(*own[:count], **named)
        return made

    def _new(self) -> Tensor:
        return self._run.scratch()[: sum(self._rows.lengths)]

    def _alike(self, given: dict[int, Sequence[Any]]) -> list[tuple[slice, dict[int, Any]]]:
        """Yield slices of scratch in which the numbers are the same, with these numbers."""
        total = sum(self._rows.lengths)
        if all(map(_is_one_number, given.values())):
            return [(slice(0, total), {place: x[0] for place, x in given.items()})]
        ends = list(accumulate(self._rows.lengths))
        return [
            (slice(end - length, end), {place: x[row] for place, x in given.items()})
            for row, (end, length) in enumerate(zip(ends, self._rows.lengths, strict=True))
        ]


def _function(name: str, is_in_place: bool) -> Callable[..., Any]:
    """Return PyTorch's function of a name; on GPUs, list functions have special kernels."""
    single = name.removeprefix("_foreach_")
    if single == name or not torch.cuda.is_available():
        return getattr(Tensor, f"{single}_") if is_in_place else getattr(torch, single)
    function = getattr(torch, f"{name}_" if is_in_place else name)

    def of_list(*args: Any, out: Tensor | None = None, **kwargs: Any) -> None:
        made = function(*[[x] if isinstance(x, Tensor) else x for x in args], **kwargs)
        if out is not None:
            out.copy_(made[0])

    return of_list


def _is_narrow(x: float) -> bool:
    """Whether kernels can take a number, and PyTorch accepts it as a float32."""
    return abs(x) < (2.0**53 if type(x) is int else 2.0**127) or x != x


def _is_one_number(column: Sequence[Any]) -> bool:
    first = column[0]
    return len(column) == 1 or (first != 0 and column.count(first) == len(column))


@functools.lru_cache(maxsize=1024)
def _steps(
    trace: Trace, results: tuple[int, ...]
) -> tuple[tuple[Operation, ...], list[list[int]], Counter[int]]:
    """Return the operations that results need, the variables last used by each, and the number of
    writes to each variable.
    """
    needed, steps = set(results), []
    for operation in reversed(trace.operations):
        if operation.target in needed:
            needed.update(operation.operands)
            steps.append(operation)
    steps.reverse()
    seen, last = set(results), []
    for operation in reversed(steps):
        own = {*operation.operands, operation.target} - seen
        seen |= own
        last.append(sorted(own))
    last.reverse()
    writes = Counter(x.target for x in steps if not trace.is_note(x))
    return tuple(steps), last, writes
