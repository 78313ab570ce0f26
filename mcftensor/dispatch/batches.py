"""An operation in place on a list of expansions, by columns.

What has to be asked of thousands of small tensors takes longer than their arithmetic: here it is
asked of whole columns. What does not fit is left to be done tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import term_columns
from mcftensor.dispatch.plans import Kind, Prepared, kind_of, prepare
from mcftensor.elementwise import evaluate_
from mcftensor.noise import draw_key
from mcftensor.operators import places_of
from mcftensor.tensor import MCFTensor

# Of an operand: the column of its leading terms, that of its second ones, and so on.
Terms = Sequence[Sequence[Any]]


@dataclass(slots=True)
class _Batch:
    """Rows whose operands are of the same kinds."""

    prepared: Prepared
    targets: Terms
    operands: list[Terms]
    read: Terms  # of operands other than the targets

    @classmethod
    def of(cls, name: str, columns: Sequence[Sequence[Any]], keywords: tuple[str, ...]) -> _Batch:
        target = columns[0][0]
        kinds = tuple([kind_of(column[0]) for column in columns])
        prepared = prepare(name, kinds, keywords, target._format)
        targets = term_columns(columns[0], target._format)
        operands: list[Terms] = []
        read: list[Sequence[Any]] = []
        for i in prepared.order:
            if i == 0 and type(i) is int:
                operands.append(targets)
                continue
            found = _operands(columns[int(i)] if type(i) is int else [i] * len(columns[0]))
            operands += found
            read += chain(*found)
        return cls(prepared, targets, operands, read)

    def fits(self) -> bool:
        """Whether targets are plain memory, and what is read is of their shape or a scalar."""
        shapes = list(map(Tensor.size, self.targets[0]))
        whole = all(set(map(type, column)) == {Tensor} for column in self.targets)
        return whole and all(
            type(column[0]) is float or _fits(column, shapes) for column in self.read
        )

    def write(self, keys: Sequence[Tensor]) -> None:
        evaluate_(
            self.prepared.expression,
            list(chain(*self.targets)),
            list(chain(*chain(*self.operands))),
            [len(operand) for operand in self.operands],
            keys,
        )


def write(name: str, columns: Sequence[Sequence[Any]], keywords: tuple[str, ...]) -> bool:
    """Carry out an operation on columns of operands, of which the last are given by keywords, into
    the first column, or do nothing and return False.

    It is done where all targets are expansions, and their memory is shared by nothing else. What is
    deferred and reads a target has been computed before.
    """
    if not all(isinstance(x, MCFTensor) and x._deferred is None for x in columns[0]):
        return False
    groups = _by_kind(columns)
    batches = [
        _Batch.of(name, [[column[i] for i in rows] for column in columns], keywords)
        for rows in groups
    ]
    written = [place for batch in batches for place in _memory(batch.targets)]
    own = set(written)
    if len(own) < len(written) or not all(
        batch.fits() and own.isdisjoint(_memory(batch.read)) for batch in batches
    ):
        return False
    keys = {  # in this order, whatever is alike
        i: draw_key(x.device)
        for i, x in enumerate(columns[0])
        if x._format.rounding == "stochastic"
    }
    for rows, batch in zip(groups, batches, strict=True):
        batch.write([keys[i] for i in rows if i in keys])
    return True


def _by_kind(columns: Sequence[Sequence[Any]]) -> Iterable[list[int]]:
    """The rows whose operands are of the same kinds."""
    kinds = [[kind_of(x) for x in column] for column in columns]
    codes = [list(map(_code, *pair)) for pair in zip(columns, kinds, strict=True)]
    return places_of(zip(*codes, strict=True)).values()


def _code(x: Any, kind: Kind) -> Any:
    """What tells kinds apart, which are mostly the same objects; and the numbers of terms of what a
    deferred operand reads."""
    if isinstance(x, MCFTensor) and x._deferred is not None:
        return id(kind), *map(len, x._deferred.operands)
    return id(kind)


def _operands(column: Sequence[Any]) -> list[Terms]:
    """The terms of a column of one kind; deferred operands become those of their expressions."""
    first = column[0]
    if not isinstance(first, Tensor):
        return [[list(map(float, column))]]
    if not isinstance(first, MCFTensor) or first._deferred is None:
        return [term_columns(column, getattr(first, "_format", None))]
    for x in column:
        x._deferred.require_unchanged()
    inner = zip(*[x._deferred.operands for x in column], strict=True)
    return [[*zip(*operand, strict=True)] for operand in inner]


def _fits(column: Sequence[Tensor], targets: list[torch.Size]) -> bool:
    shapes = list(map(Tensor.size, column))
    return shapes == targets or all(
        own in (target, ()) for own, target in zip(shapes, targets, strict=True)
    )


def _memory(columns: Terms) -> list[int]:
    """Where tensors lie; numbers lie nowhere."""
    return [
        x.untyped_storage()._cdata
        for column in columns
        if type(column[0]) is not float
        for x in column
    ]
