"""Elementwise operations, carried out in one pass over memory."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mcftensor.arithmetic.formulas import operation
from mcftensor.arithmetic.noise import noise_of
from mcftensor.arithmetic.number_protocol import Floats, Number
from mcftensor.formats import PLAIN, Format, named
from mcftensor.kernels import Body, Column, Columns, Scalar, Signature, run
from mcftensor.kernels.columns import columns_of, places_of, regroup, repeated
from mcftensor.kernels.custom_ops import opaque, template_of
from mcftensor.kernels.without_float64 import Pieces

T = TypeVar("T")

NUMBER = PLAIN[torch.float64]
"""The format of Python numbers."""


@dataclass(frozen=True)
class Expression:
    """An operation, and the format to which its result is rounded."""

    operation: str
    format: Format

    def number(self, operands: Sequence[Floats]) -> Number:
        """Return the result before rounding; operands are sums of floats."""
        return operation(self.operation)(*map(self.format.numbers.of, operands))


class Operand(NamedTuple):
    """Operands of many calls in one format: a column for each component. A Python number stands for
    itself."""

    format: Format
    components: Sequence[Sequence[Scalar]]


def carry_out(
    expression: Expression,
    operands: Sequence[Operand],
    outputs: Sequence[Column],
    keys: Column = (),
) -> None:
    """Write the results of an expression for all calls into components of its format."""
    columns = [column for operand in operands for column in operand.components]
    count = len(outputs[0])
    flags = [_are_scalars(column, outputs[0]) for column in columns]
    if count > 1 and any(len(flag) > 1 for flag in flags):  # a column mixes scalars and vectors
        for rows in places_of(zip(*[repeated(x, count) for x in flags], strict=True)).values():
            part = [
                Operand(x.format, [[repeated(y, count)[i] for i in rows] for y in x.components])
                for x in operands
            ]
            written = [[column[i] for i in rows] for column in outputs]
            carry_out(expression, part, written, [keys[i] for i in rows] if keys else ())
        return
    are_scalars = tuple([flag for flag, *_ in flags])
    scalars = [_shared(x) for x in itertools.compress(columns, are_scalars)]
    vectors = [
        repeated(x, count)
        for x, is_scalar in zip(columns, are_scalars, strict=True)
        if not is_scalar
    ]
    body = _body(expression, tuple([x.format for x in operands]), are_scalars)
    run(body, Columns(vectors, scalars, outputs, keys))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _body(
    expression: Expression, formats: tuple[Format, ...], are_scalars: tuple[bool, ...]
) -> Body:
    """Return an expression as a function of vectors and scalars, the components of its operands.

    The key of stochastic rounding is the last scalar.
    """
    lengths = [len(f.components) for f in formats]
    format = expression.format

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        left: dict[bool, Iterator[Any]] = {True: map(scalar_tensor, scalars), False: iter(vectors)}
        stored = regroup([next(left[is_scalar]) for is_scalar in are_scalars], lengths)
        floats = [stored_floats(f, x) for f, x in zip(formats, stored, strict=True)]
        noise = noise_of(format.rounding, scalars[-1], index) if format.takes_key else None
        return format.encode(expression.number(floats), noise)

    return body


def stored_floats(format: Format, stored: Sequence[Any]) -> Floats:
    """Decode stored components to floats; pieces are returned unchanged."""
    return stored[0] if isinstance(stored[0], Pieces) else format.decode(stored)


def on_whole(
    expression: Expression, operands: Sequence[tuple[Format, bool]]
) -> tuple[Body, Signature]:
    """Return an expression as a body and its signature, for operands of the result's shape.

    `formats` has the format of each operand, and whether the operand is a Python number.
    """
    flags = [flag for format, flag in operands for _ in format.components]
    dtypes = [x.dtype for format, _ in operands for x in format.components]
    scalars = list(itertools.compress(dtypes, flags))
    if expression.format.takes_key:
        scalars.append(torch.int64)
    vectors = itertools.compress(dtypes, map(operator.not_, flags))
    outputs = [x.dtype for x in expression.format.components]
    body = _body(expression, tuple([format for format, _ in operands]), tuple(flags))
    return body, Signature(tuple(vectors), tuple(scalars), tuple(outputs))


def scalar_tensor(x: Any) -> Any:
    """Return a scalar; a Python number becomes a float64 tensor, or its pieces without float64."""
    if isinstance(x, Tensor | Pieces):
        return x
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def _are_scalars(column: Sequence[Scalar], outputs: Column) -> list[bool]:
    """Return which rows of a column are scalars; a single flag if all are equal."""
    if len(column) == 1:
        (x,) = column
        return [type(x) is float or (x.dim() == 0 and outputs[0].dim() > 0)]  # type: ignore[union-attr]
    if set(map(type, column)) == {float}:
        return [True]
    if type(column[0]) is not float and 0 not in map(Tensor.dim, column):  # type: ignore[arg-type]
        return [False]
    flags = [
        not isinstance(x, Tensor) or (x.dim() == 0 and output.dim() > 0)
        for x, output in zip(column, outputs, strict=True)
    ]
    return flags if len(set(flags)) > 1 else flags[:1]


def _shared(column: Sequence[T]) -> Sequence[T]:
    """Replace many references to one object by one."""
    return column[:1] if len(column) > 1 and len(set(map(id, column))) == 1 else column


# ------------------------------------------------------------------------------------ operators


def empty(format: Format, operands: Sequence[Operand], count: int) -> list[list[Tensor]]:
    """Return uninitialized columns of components for the results of `count` calls."""
    columns = [repeated(x, count) for operand in operands for x in operand.components]
    made = [
        format.empty_like(template_of([x for x in call if isinstance(x, Tensor)]))
        for call in zip(*columns, strict=True)
    ]
    return [list(column) for column in zip(*made, strict=True)]


def _operands(flat: Sequence[Any], formats: Sequence[str]) -> tuple[list[Operand], int]:
    """Return a flat list as operands, and the number of calls."""
    found = [named(name) for name in formats]
    lengths = [len(f.components) for f in found]
    count = len(flat) // sum(lengths)
    columns = regroup(columns_of(flat, count), lengths)
    return [Operand(f, x) for f, x in zip(found, columns, strict=True)], count


@opaque(
    lambda operation, format, operands, formats, keys: [
        *itertools.chain(*empty(named(format), *_operands(operands, formats)))
    ],
    schema="(str operation, str format, Tensor[] operands, str[] formats, Tensor[] keys)"
    " -> Tensor[]",
    lays_out=True,
)
def evaluate(
    operation: str,
    format: str,
    operands: Sequence[Tensor],
    formats: Sequence[str],
    keys: Sequence[Tensor],
) -> list[Tensor]:
    """Return the results of an elementwise operation, in a format.

    Args:
        operation: its name.
        format: the format of the results.
        operands: the leading components of the first operand of all calls, then its second
            components, and so on; then the components of the second operand.
        formats: the format of each operand; for a plain tensor, its dtype.
        keys: one key for each call, if the result rounds stochastically.

    Returns:
        The leading components of all results, then their second components, and so on.
    """
    found, count = _operands(operands, formats)
    result = named(format)
    outputs = empty(result, found, count)
    carry_out(Expression(operation, result), found, outputs, keys)
    return list(itertools.chain(*outputs))
