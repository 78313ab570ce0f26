"""Arithmetic with a kernel of its own: out of place, in place, with `out=`, and in lists.

An operation on one tensor is one on a list of one: operands are columns, of an element for each
row, or of one for all rows. Rows whose operands are of the same kinds go together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch import stored
from mcftensor.dispatch.alone import evaluated_alone, evaluated_alone_into
from mcftensor.dispatch.compute import PRECISION, WIDE, compute
from mcftensor.dispatch.operands import (
    after,
    are_lifted,
    common_role,
    component_columns,
    computes_plainly,
    count_write,
    expansions,
    leading,
    overwrite,
    plain,
    require_numbers,
    rounding_key,
    store,
)
from mcftensor.dispatch.plans import FORMULAS, Kind, Plan, kinds_of, plan
from mcftensor.dispatch.recording import recorded, some_rows
from mcftensor.dispatch.registry import TABLE, implements, register_forms
from mcftensor.formats import PLAIN, Format, PlainFormat
from mcftensor.kernels.columns import are_same, places_of, repeated
from mcftensor.kernels.opaque import is_bare
from mcftensor.passes.expressions import NUMBER, Operand, carry_out, empty, evaluate
from mcftensor.tensor.rounded import rounding
from mcftensor.tensor.tensor import LiftedTensor, MCFTensor

aten = torch.ops.aten

Rows = Sequence[int]
Lists = Sequence[Sequence[Any]]


def evaluated(
    name: str,
    columns: Lists,
    keywords: tuple[str, ...],
    count: int,
    target: Format | None = None,
) -> list[Tensor]:
    """The results of an operation on rows of operands, the last of which are given by keywords; in
    the format of a target, if there is one."""
    results: list[Any] = [None] * count
    parts = _parts(name, columns, keywords, count, target)
    keys = _keys(parts, columns)
    for part in parts:
        for i, result in zip(part.rows, part.evaluated(keys), strict=True):
            results[i] = result
    return results


def evaluated_into(name: str, columns: Lists, keywords: tuple[str, ...], count: int) -> bool:
    """Write the results into the first column, which holds expansions, or do nothing and return
    False: where results cannot be written element by element while operands are read."""
    parts = _parts(name, columns, keywords, count, in_place=True)
    if not (parts[0].fits_alone() if count == 1 else _fit(parts)):
        return False
    keys = _keys(parts, columns)
    for part in parts:
        part.write(keys)
    return True


class _Part:
    """Rows whose operands are of the same kinds."""

    def __init__(self, plan: Plan, columns: Lists, rows: Rows) -> None:
        self.plan = plan
        self.columns = columns
        self.rows = rows
        self.reads = [columns[i] if type(i) is int else [i] for i in plan.order]
        self.operands = list(map(_operand, self.reads))
        self.read = [x for operand in self.operands for x in operand.components]

    def evaluated(self, keys: dict[int, Tensor]) -> list[Tensor]:
        """New results."""
        format, role = self.plan.expression.format, self.plan.role
        outputs = self._outputs([keys[i] for i in self.rows if i in keys])
        if isinstance(format, PlainFormat):
            return list(outputs[0])
        return [
            MCFTensor.of(components, format, role, own=True, writes=after(format, keys.get(i)))
            for i, components in zip(self.rows, zip(*outputs, strict=True), strict=True)
        ]

    def _outputs(self, keys: list[Tensor]) -> Sequence[Sequence[Tensor]]:
        expression, count = self.plan.expression, len(self.rows)
        if is_bare(*self.read, keys):
            outputs = empty(expression.format, self.operands, count)
            carry_out(expression, self.operands, outputs, keys)
            return outputs
        flat = [repeated([plain(x) for x in column], count) for column in self.read]
        found = evaluate(
            expression.operation,
            expression.format.name,
            list(itertools.chain(*flat)),
            [x.format.name for x in self.operands],
            keys,
        )
        return [found[i : i + count] for i in range(0, len(found), count)]

    @functools.cached_property
    def targets(self) -> list[Sequence[Tensor]]:
        """The components of the targets."""
        for x in self.columns[0]:
            if type(x) is LiftedTensor:
                x.grow_tails()
        return component_columns(self.columns[0], self.plan.expression.format)

    def fits_alone(self) -> bool:
        """Whether the result of a single row can be written while its operands are read."""
        target = self.columns[0][0]
        if not any(column[0] is target for column in self.reads):
            return False
        written = [column[0] for column in self.targets]
        if set(map(type, written)) != {Tensor}:  # a compiler's, which lie nowhere
            return False
        own = [id(x) for x in written]
        others: list[Any] = [x[0] for x in self.read if type(x[0]) is not float]
        others = [x for x in others if id(x) not in own and x.dim()]
        if not others:
            return True
        lying = [(y.data_ptr(), y.stride()) for y in written]
        places = dict(zip(_memories(written), lying, strict=True))
        return all(
            x.shape == target.shape and places.get(memory) in (None, (x.data_ptr(), x.stride()))
            for x, memory in zip(others, _memories(others), strict=True)
        )

    def write(self, keys: dict[int, Tensor]) -> None:
        """Write into the targets."""
        written, own_keys = self.targets, [keys[i] for i in self.rows if i in keys]
        if is_bare(*written, *self.read, own_keys):
            carry_out(self.plan.expression, self.operands, written, own_keys)
        else:  # a compiler's: operators that write take it long to see through
            new = self._outputs(own_keys)
            for target, result in zip(_rows(written), _rows(new), strict=True):
                overwrite(target, result)
        count_write(self.columns[0])


def _rows(columns: Lists) -> Iterator[tuple[Any, ...]]:
    return zip(*columns, strict=True)


def _parts(
    name: str,
    columns: Lists,
    keywords: tuple[str, ...],
    count: int,
    target: Format | None = None,
    in_place: bool = False,
) -> list[_Part]:
    """Rows whose operands are of the same kinds go together."""
    kinds = list(map(kinds_of, columns))
    groups: Iterable[tuple[tuple[Kind, ...], Rows]]
    if count == 1 or all(len(set(x)) == 1 for x in kinds):
        groups = [(tuple([x[0] for x in kinds]), range(count))]
    else:
        every = zip(*[x if len(x) == count else x * count for x in kinds], strict=True)
        groups = places_of(every).items()
    parts = []
    for own, rows in groups:
        found = plan(name, own, keywords, own[0].format if in_place else target)
        parts.append(_Part(found, some_rows(columns, rows, count), rows))
    return parts


def _operand(column: Sequence[Any]) -> Operand:
    """A column of one kind."""
    first = column[0]
    if not isinstance(first, Tensor):
        require_numbers(column)
        return Operand(NUMBER, [list(map(float, column))])
    if type(first) is LiftedTensor:
        return Operand(PLAIN[first._format.dtype], [[x._component0 for x in column]])
    format = first._format if isinstance(first, MCFTensor) else PLAIN[first.dtype]
    return Operand(format, component_columns(column, format))


def _keys(parts: Sequence[_Part], columns: Lists) -> dict[int, Tensor]:
    """A key for each row whose rounding takes one, in the order of rows, whatever is alike."""
    keys: dict[int, Any] = {}
    formats = [p.plan.expression.format for p in parts]
    taking = {i: f for f, p in zip(formats, parts, strict=True) if f.takes_key for i in p.rows}
    for i in sorted(taking):
        row = [column[i if len(column) > 1 else 0] for column in columns]
        keys[i] = rounding_key(taking[i], row)
    return keys


def _fit(parts: Sequence[_Part]) -> bool:
    """Whether the memory of targets is shared by nothing else, and operands have their shapes."""
    written = [x for part in parts for column in part.targets for x in _memories(column)]
    own = set(written)
    if len(own) < len(written):
        return False
    for part in parts:
        shapes = list(map(Tensor.size, part.columns[0]))
        targets = part.targets
        vectors: list[Sequence[Any]] = [x for x in part.read if type(x[0]) is not float]
        for column in vectors:
            column = repeated(column, len(shapes))
            found = list(map(Tensor.size, column))
            if found != shapes and not all(
                x in (shape, ()) for x, shape in zip(found, shapes, strict=True)
            ):
                return False
            if any(are_same(column, own_column) for own_column in targets):
                continue
            if not own.isdisjoint(_memories(column)):
                return False
    return True


_address = attrgetter("_cdata")


def _memories(column: Iterable[Tensor]) -> Iterator[int]:
    """Where tensors lie."""
    return map(_address, map(Tensor.untyped_storage, column))


# ------------------------------------------------------------------------------- one tensor


def arithmetic_into(
    name: str, target: Tensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Store the result in `target`: all of an expansion, or a plain tensor, rounded once."""
    operands = (*args, *kwargs.values())
    columns, keywords, format = [[x] for x in operands], tuple(kwargs), None
    if isinstance(target, MCFTensor):
        if name in ("add", "sub") and getattr(args[1], "layout", None) == torch.sparse_coo:
            sign = 1 if name == "add" else -1
            return _add_sparse(target, args[1], sign * kwargs.get("alpha", 1))
        if target is args[0] and (
            recorded(name, columns, keywords, in_place=True)
            or evaluated_alone_into(name, operands, keywords)
            or evaluated_into(name, columns, keywords, 1)
        ):
            return target
        format = target._format
    elif are_lifted(operands) or common_role(operands) == "parameter":
        func(*leading(args), **leading(kwargs))
        return target
    if format is None:
        rounding(name, expansions(operands), target)
    (result,) = evaluated(name, columns, keywords, 1, format)
    store(target, result)
    return target


def _register(name: str) -> None:
    def out_of_place(func: Any, *args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        if stored.are_numbers(operands):
            return stored.on_numbers(func, args, kwargs)
        if computes_plainly(operands):
            return func(*leading(args), **leading(kwargs))
        columns, keywords = [[x] for x in operands], tuple(kwargs)
        found = recorded(name, columns, keywords, in_place=False)
        if found is not None:
            return found[0]
        result = evaluated_alone(name, operands, keywords)
        return evaluated(name, columns, keywords, 1)[0] if result is None else result

    def in_place(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        if stored.are_numbers(args):
            return stored.on_numbers(func, args, kwargs)
        return arithmetic_into(name, args[0], func, args, kwargs)

    def with_out(func: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if stored.are_numbers((*args, out)):
            return stored.on_numbers(func, args, kwargs | {"out": out})
        return arithmetic_into(name, out, functools.partial(func, out=out), args, kwargs)

    register_forms(name, out_of_place, in_place, with_out)


for _name in FORMULAS:
    _register(_name)


def register_in_place(operator: str, name: str) -> None:
    """Let an operator that returns nothing carry out the operation `name` on its first argument."""

    def in_place(func: Any, *args: Any) -> None:
        arithmetic_into(name, args[0], func, args, {})

    TABLE[operator] = in_place


@implements(aten.pow.Tensor_Scalar)  # x ** 2
def power(func: Any, x: Any, exponent: Any) -> Any:
    """The powers that are one or two of the operations above."""
    if exponent == 2:
        return torch.square(x)
    if exponent == 3:
        return torch.square(x) * x
    if exponent == 0.5:
        return torch.sqrt(x)
    if exponent == -1:
        return torch.reciprocal(x)
    return compute(func, x, exponent)


# ---------------------------------------------------- sparse gradients, as embeddings make them


def _add_sparse(target: MCFTensor, source: Tensor, alpha: Any) -> MCFTensor:
    """Add alpha times a sparse tensor in place; other elements stay as they are.

    Rows of the same place are summed first, exactly but for rounding in float64.
    """
    source = source.to(WIDE).coalesce()
    places = tuple(source.indices())
    rows = target[places] if places else target.clone()
    rows.add_(source.values(), alpha=alpha)
    target[places] = rows
    return target


@implements(aten.sparse_mask.default)  # SparseAdam
def sparse_mask(func: Any, x: Any, mask: Tensor) -> Tensor:
    """The elements where a sparse tensor has some, sparse and in float64."""
    if not isinstance(x, MCFTensor) or x.format.precision > PRECISION:
        return compute(func, x, mask)
    return func(x._collapsed(WIDE), mask.to(WIDE))
