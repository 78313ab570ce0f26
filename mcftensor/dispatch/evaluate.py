"""Elementwise operations of the table on rows of operands, carried out now.

An operation on one tensor is an operation on a list of one. Operands are columns, with one element
for each row, or one for all rows. Rows with operands of the same kinds are computed together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcftensor.dispatch.defer import recorded, some_rows
from mcftensor.dispatch.operands import (
    after,
    component_columns,
    plain,
    require_numbers,
    rounding_key,
    with_long_ints,
)
from mcftensor.dispatch.resolve import Kind, Plan, kind_of, kinds_of, plan
from mcftensor.dispatch.storage_formats import are_apart
from mcftensor.dispatch.store import count_write
from mcftensor.formats import Format, named
from mcftensor.kernels import Columns, run_alike
from mcftensor.kernels.columns import Column, is_bare, places_of, repeated
from mcftensor.kernels.execute import is_dense
from mcftensor.passes import expressions
from mcftensor.passes.expressions import NUMBER, Operand, carry_out, empty
from mcftensor.passes.format_conversion import number_terms
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.step_tensors import GradientTensor
from mcftensor.tensor.tensor import MCFTensor

Lists = Sequence[Sequence[Any]]
Rows = Sequence[int]
_BARE = {Tensor, torch.nn.Parameter, float}
_NUMBERS = {float, int}


def evaluate_rows(
    name: str,
    columns: Lists,
    keywords: tuple[str, ...],
    count: int,
    target: Format | None = None,
    *,
    is_eager: bool = False,
) -> list[Any]:
    """Carry out an operation on rows of operands; keywords name the last operands.

    `is_eager` says that the caller has found the thread outside of a step, and unwatched.

    Returns:
        The results, in the format of a target, if given; None for each row that PyTorch's
        own operation carries out (see `resolve.plan`).
    """
    columns = with_long_ints(columns)
    plans = _plans(name, columns, keywords, count, target)
    if not is_eager and count == 1 and target is None and plans and current_step() is not None:
        found = recorded(name, columns, keywords, in_place=False)
        if found is not None:
            return [*found]
    results: list[Any] = [None] * count
    parts = [_Part(plan, columns, rows, count, is_eager) for plan, rows in plans]
    keys = _keys(parts, columns)
    for part in parts:
        for i, result in zip(part.rows, part.results(keys), strict=True):
            results[i] = result
    return results


def require_writable(name: str, targets: Sequence[Tensor]) -> None:
    """Refuse inference tensors outside of inference mode, as PyTorch does.

    PyTorch does not look where kernels write by address, nor inside of its own dispatch.

    Raises:
        RuntimeError: a target is an inference tensor, outside of inference mode.
    """
    if not torch.is_inference_mode_enabled() and any(x.is_inference() for x in targets):
        raise RuntimeError(
            f"{name}_: an inference tensor cannot be updated in place outside of inference mode; "
            "clone() it first"
        )


def evaluate_rows_into(
    name: str, columns: Lists, keywords: tuple[str, ...], count: int, *, is_eager: bool = False
) -> bool | None:
    """Write the results into the first column, which has expansions.

    Returns:
        None if PyTorch's own operation carries out a row. False if results cannot be written
        elementwise while operands are read, because some have another layout than the targets
        or overlap them. Nothing is written then.

    Raises:
        RuntimeError: as `require_writable`.
    """
    columns = with_long_ints(columns)
    plans = _plans(name, columns, keywords, count, None, in_place=True)
    if sum([len(rows) for _, rows in plans]) < count:
        return None
    require_writable(name, columns[0])
    is_in_step = not is_eager and count == 1 and current_step() is not None
    if is_in_step and recorded(name, columns, keywords, in_place=True):
        return True
    parts = [_Part(plan, columns, rows, count, is_eager) for plan, rows in plans]
    lying: list[Any] = [x.beside_targets() for x in parts]
    are_own = count == 1 and columns[0][0]._is_own
    if None in lying or not (are_own or are_apart(columns)):
        return False
    keys = _keys(parts, columns)
    for part, found in zip(parts, lying, strict=True):
        part.write(found, keys)
    return True


def _device_of(columns: Lists) -> torch.device | None:
    tensors = [x for column in columns for x in column[:1] if isinstance(x, Tensor)]
    return next((x.device for x in tensors if x.dim()), tensors[0].device if tensors else None)


def _entered(
    format: Format, columns: Sequence[Sequence[Any]], device: torch.device | None
) -> tuple[Format, Sequence[Sequence[Any]]]:
    """Return operands in a format, with Python numbers as tensors."""
    if format is not NUMBER or isinstance(columns[0][0], Tensor):
        return format, columns
    entered = [number_terms(x, device) for x in columns[0]]
    return named(entered[0][0]), list(zip(*[terms for _, terms in entered], strict=True))


class Lying(NamedTuple):
    """Tensors with the same layout in memory, and scalars."""

    vectors: list[Column]
    scalars: list[Sequence[Any]]
    like: Column
    """A plain tensor of each row with the layout of the others."""
    addresses: list[list[int]]
    """The addresses of the vectors."""


class _Part:
    """Rows with operands of the same kinds."""

    def __init__(self, plan: Plan, columns: Lists, rows: Rows, count: int, is_eager: bool) -> None:
        self.plan = plan
        self.rows = rows
        self.is_eager = is_eager
        self.width = len(plan.expression.format.components)
        columns = columns if count == 1 else some_rows(columns, rows, count)
        self.targets = columns[0]
        self.read = [
            _components(columns[i] if type(i) is int else [i], kind)
            for i, kind in zip(plan.order, plan.read, strict=True)
        ]

    def results(self, keys: dict[int, Tensor]) -> Sequence[Tensor]:
        """Return new results."""
        format, role = self.plan.expression.format, self.plan.role
        made = self._computed([keys[i] for i in self.rows if i in keys])
        writes = [after(format, keys[i]) if i in keys else None for i in self.rows]
        return [
            MCFTensor.of(components, format, role, own=True, writes=count)
            for components, count in zip(made, writes, strict=True)
        ]

    def _computed(self, keys: list[Tensor]) -> Iterable[Sequence[Tensor]]:
        """Return the components of new results, row by row."""
        expression, count = self.plan.expression, len(self.rows)
        every = list(itertools.chain(*self.read))
        formats = [kind.stored for kind in self.plan.read]
        if not self._is_bare(every, keys):
            device = _device_of(every)
            found = [_entered(x, y, device) for x, y in zip(formats, self.read, strict=True)]
            formats = [format for format, _ in found]
            every = list(itertools.chain(*[columns for _, columns in found]))
            flat = [repeated([plain(x) for x in column], count) for column in every]
            computed = expressions.evaluate(
                expression.operation,
                expression.format.name,
                list(itertools.chain(*flat)),
                [x.name for x in formats],
                keys,
            )
            return [computed[i::count] for i in range(count)]
        lying = lying_alike(self.read, count, in_order=bool(keys))
        if lying is None:
            operands = list(map(Operand, formats, self.read))
            outputs = empty(expression.format, operands, count)
            carry_out(expression, operands, outputs, keys)
            return zip(*outputs, strict=True)
        dtypes = self.plan.on_whole[1].outputs
        made = [[torch.empty_like(x, dtype=dtype) for dtype in dtypes] for x in lying.like]
        outputs = [list(column) for column in zip(*made, strict=True)]
        self._run(lying, outputs, keys, _addresses(outputs))
        return made

    def _is_bare(self, columns: Sequence[Sequence[Any]], keys: Sequence[Tensor] = ()) -> bool:
        """Return `is_bare`, which looks only at types if the caller has checked the thread."""
        if self.is_eager:
            return _BARE.issuperset(map(type, itertools.chain.from_iterable(columns)))
        return is_bare(*columns, keys)

    def _run(
        self,
        lying: Lying,
        outputs: Sequence[Column],
        keys: list[Tensor],
        addresses: list[list[int]],
    ) -> None:
        columns = Columns(lying.vectors, lying.scalars, outputs, keys)
        lengths = list(map(Tensor.numel, lying.like))
        run_alike(*self.plan.on_whole, columns, lengths, [*lying.addresses, *addresses])

    def beside_targets(self) -> Lying | None:
        """Return the layout of operands and, after them, of the targets; None if layouts differ."""
        for x in self.targets:
            if isinstance(x, GradientTensor):
                x.grow_tails()
        format = self.plan.expression.format
        every = [*self.read, _terms(self.targets, format)]
        if not self._is_bare([*itertools.chain(*every)]):
            return None
        return lying_alike(every, len(self.rows), in_order=format.takes_key)

    def write(self, lying: Lying, keys: dict[int, Tensor]) -> None:
        """Write the results into the targets."""
        read = lying._replace(
            vectors=lying.vectors[: -self.width], addresses=lying.addresses[: -self.width]
        )
        own = [keys[i] for i in self.rows if i in keys]
        self._run(read, lying.vectors[-self.width :], own, lying.addresses[-self.width :])
        if self.plan.expression.format.takes_key:
            count_write(self.targets)


def _plans(
    name: str,
    columns: Lists,
    keywords: tuple[str, ...],
    count: int,
    target: Format | None,
    in_place: bool = False,
) -> list[tuple[Plan, Rows]]:
    """Group rows by the kinds of their operands, with their plans; rows without a plan are left
    out.
    """
    if count == 1:
        alone = tuple([kind_of(x) for (x,) in columns])
        only = plan(name, alone, keywords, alone[0].format if in_place else target)
        return [] if only is None else [(only, range(1))]
    groups: Iterable[tuple[tuple[Kind, ...], Rows]]
    kinds = list(map(kinds_of, columns))
    if all(len(set(x)) == 1 for x in kinds):
        groups = [(tuple([x[0] for x in kinds]), range(count))]
    else:
        every = zip(*[x if len(x) == count else x * count for x in kinds], strict=True)
        groups = places_of(every).items()
    found = [
        (plan(name, own, keywords, own[0].format if in_place else target), rows)
        for own, rows in groups
    ]
    return [(plan, rows) for plan, rows in found if plan is not None]


def _components(column: Sequence[Any], kind: Kind) -> Sequence[Sequence[Any]]:
    """Return the components to read of a column of one kind."""
    if kind.number is not None:
        if not _NUMBERS.issuperset(map(type, column)):
            require_numbers(column)
        return [list(map(float, column))]
    if kind.is_gradient:
        return [[x._component0 for x in column]]
    return _terms(column, kind.format)


def _terms(column: Sequence[Any], format: Format) -> Sequence[Sequence[Tensor]]:
    """Return the components of a column of tensors of one kind."""
    if len(column) == 1 and isinstance(column[0], MCFTensor):
        return [[x] for x in column[0]._read()]
    return component_columns(column, format)


def _keys(parts: Sequence[_Part], columns: Lists) -> dict[int, Tensor]:
    """Return a key for each row whose rounding takes one, in the order of rows."""
    keys: dict[int, Any] = {}
    formats = [p.plan.expression.format for p in parts]
    if not any(f.takes_key for f in formats):
        return keys
    taking = {i: f for f, p in zip(formats, parts, strict=True) if f.takes_key for i in p.rows}
    for i in sorted(taking):
        row = [column[i if len(column) > 1 else 0] for column in columns]
        keys[i] = rounding_key(taking[i], row)
    return keys


def lying_alike(
    operands: Sequence[Sequence[Sequence[Any]]], count: int, *, in_order: bool
) -> Lying | None:
    """Return the components of rows of operands, if all tensors of a row have one layout, or None.

    The tensors must be without gaps, and equal in shape, strides and device. Tensors without
    dimensions become scalars. If `in_order`, elements must be contiguous, because rounding keys
    depend on their index.
    """
    vectors: list[Column] = []
    scalars: list[Sequence[Any]] = []
    every: list[Column] = []  # the leading components of vectors
    shapes: list[torch.Size] = []
    devices: set[int] = set()
    are_contiguous = True
    for columns in operands:
        leading = columns[0]
        if type(leading[0]) is float:
            scalars.append(leading)
            continue
        own = list(map(Tensor.size, leading))
        if not own[0]:
            if any(own) or not _are_at_hand(leading, operands):
                return None
            scalars += columns
            continue
        if own != (shapes or own) or len(own) != count or not leading[0].is_floating_point():
            return None
        shapes = own
        devices.update(map(Tensor.get_device, leading))
        are_contiguous = are_contiguous and all(map(Tensor.is_contiguous, leading))
        vectors += columns
        every.append(leading)
    if len(devices) != 1 or (count > 1 and any(0 in shape for shape in shapes)):
        return None
    if not are_contiguous:
        strides = [list(map(Tensor.stride, x)) for x in every]
        are_alike = all(x == strides[0] for x in strides) and all(map(is_dense, every[0]))
        if in_order or not are_alike:
            return None
    return Lying(vectors, scalars, every[0], _addresses(vectors))


def _are_at_hand(scalars: Column, operands: Sequence[Sequence[Sequence[Any]]]) -> bool:
    """Return whether 0-d tensors are all on a CPU, or all on the device of the other tensors."""
    devices = {x.device for x in scalars}
    others = {x.device for column, *_ in operands for x in column if isinstance(x, Tensor)}
    return devices == {torch.device("cpu")} or (len(devices) == 1 and devices == others)


def _addresses(columns: Sequence[Column]) -> list[list[int]]:
    return [list(map(Tensor.data_ptr, column)) for column in columns]
