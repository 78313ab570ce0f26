"""Elementwise arithmetic on expansions, as operators on lists of tensors.

Each operation exists twice: evaluated in a wider machine type (`wide.py`) for bases of 16 bits, and
by networks of error-free transformations (`networks.py`) for the rest.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcftensor import networks, wide
from mcftensor.formats import Format
from mcftensor.kernels import Body, Calls, run, run_one
from mcftensor.noise import uniform
from mcftensor.operators import columns, empty_terms, is_bare, opaque, places_of, regroup
from mcftensor.rounding import peel, round_to_terms, split_terms

T = TypeVar("T")
Terms = tuple[Tensor, ...]


def _network(two: Callable[..., Terms], more: Callable[..., Terms]) -> Callable[..., Terms]:
    return lambda *operands: (two if len(operands[0]) == 2 else more)(*operands)


_add = _network(networks.add2, networks.add)
_mul = _network(networks.mul2, networks.mul)
_fma = _network(networks.fma2, networks.fma)


def _addcmul(x: Terms, a: Terms, b: Terms, value: Terms) -> Terms:
    return _fma(_mul(value, a), b, x)


def _addcdiv(x: Terms, a: Terms, b: Terms, value: Terms) -> Terms:
    return _add(x, networks.div(_mul(value, a), b))


def _lerp(x: Terms, end: Terms, weight: Terms) -> Terms:
    difference = _add(end, networks.neg(x))
    one = tuple(torch.ones_like(w) if i == 0 else torch.zeros_like(w) for i, w in enumerate(weight))
    near = _fma(weight, difference, x)
    far = _fma(_add(weight, networks.neg(one)), difference, end)
    return tuple(torch.where(weight[0].abs() < 0.5, n, f) for n, f in zip(near, far, strict=True))


# name: (evaluated wide, evaluated by networks)
_OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Terms]]] = {
    "add": (wide.add, _add),
    "mul": (wide.mul, _mul),
    "div": (wide.div, networks.div),
    "sqrt": (wide.sqrt, _network(networks.sqrt2, networks.sqrt)),
    "fma": (wide.fma, _fma),
    "addcmul": (wide.addcmul, _addcmul),
    "addcdiv": (wide.addcdiv, _addcdiv),
    "lerp": (wide.lerp, _lerp),
}


def by_network(
    operation: str, operands: Sequence[Sequence[Tensor]], base: torch.dtype, terms: int
) -> Terms:
    """An operation on operands of any format, by the network of a base and number of terms."""
    entered = [_enter(operand, base, terms) for operand in operands]
    return _OPERATIONS[operation][1](*entered)


def _enter(operand: Sequence[Tensor], base: torch.dtype, terms: int) -> Terms:
    """An operand of a network: the number of terms of the base that it computes with."""
    if any(term.dtype != base for term in operand):
        operand = [part for term in operand for part in split_terms(term, base, terms)]
    if len(operand) > terms:
        return networks.settle(networks.distill(operand, terms), operand[0])
    return *operand, *[torch.zeros_like(operand[0])] * (terms - len(operand))


# ---------------------------------------------------------------------------------- expressions

# An operand, by its number, or an operation, the name of its format, and what it is applied to.
# Each operation rounds its result to its format.
Expression = int | tuple[Any, ...]


# The terms of an operand; a number of Python's enters as float64.
Operand = Sequence[Tensor | float]


@functools.cache
def parsed(text: str) -> Expression:
    """An expression of its text."""
    expression: Expression = ast.literal_eval(text)
    return expression


@functools.cache
def arity(text: str) -> int:
    """How many operands an expression has."""
    return 1 + max(_leaves(parsed(text)))


def length(expression: Expression) -> int:
    """The number of operations in an expression."""
    return 0 if isinstance(expression, int) else 1 + sum(map(length, expression[2:]))


def shifted(expression: Expression, by: int) -> Expression:
    """An expression whose operands have numbers so much larger."""
    if isinstance(expression, int):
        return expression + by
    operation, format, *parts = expression
    return (operation, format, *(shifted(part, by) for part in parts))


def _leaves(expression: Expression) -> list[int]:
    if isinstance(expression, int):
        return [expression]
    return [leaf for part in expression[2:] for leaf in _leaves(part)]


def _computed(
    expression: Expression, operands: Sequence[Sequence[Tensor]], noise: Tensor | None = None
) -> Sequence[Tensor]:
    """The terms of an expression; noise rounds the outermost operation.

    Networks compute one term more for stochastic rounding.
    """
    if isinstance(expression, int):
        return operands[expression]
    operation, name, *parts = expression
    inner = [_computed(part, operands) for part in parts]
    if operation == "neg":
        (x,) = inner
        return -x if isinstance(x, wide.Held) else [-term for term in x]
    format = Format.from_name(name)
    if format.wide is not None:
        result = _OPERATIONS[operation][0](*inner, wide=format.wide)
        total = round_to_terms(result, format.base, format.terms, noise)
        return wide.Held(total, peel(total, format.base, format.terms))
    if noise is None:
        return by_network(operation, inner, format.base, format.terms)
    return networks.shorten(by_network(operation, inner, format.base, format.terms + 1), noise)


@functools.cache
def _body(text: str, lengths: tuple[int, ...], are_scalars: tuple[bool, ...]) -> Body:
    """An expression as a function of the vectors and scalars among the terms of its operands.

    Stochastic rounding takes a key as the last scalar.
    """
    expression = parsed(text)
    stochastic = _format(text).rounding == "stochastic"

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        left: dict[bool, Iterator[Any]] = {True: map(_as_float64, scalars), False: iter(vectors)}
        operands = regroup([next(left[is_scalar]) for is_scalar in are_scalars], lengths)
        return _computed(expression, operands, uniform(scalars[-1], index) if stochastic else None)

    return body


def _as_float64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x


# ------------------------------------------------------------------------------------ operators


@functools.cache
def _format(text: str) -> Format:
    """The format of an expression's result."""
    return Format.from_name(parsed(text)[1])  # type: ignore[index]


def _run(
    expression: str,
    terms: Sequence[Sequence[Tensor | float]],
    lengths: tuple[int, ...],
    keys: Sequence[Tensor],
    outputs: Sequence[Sequence[Tensor]],
) -> None:
    """Evaluate an expression on columns of terms into columns of outputs."""
    flags = [_scalars(column, outputs[0]) for column in terms]
    are_scalars = tuple([flag[0] for flag in flags])
    count = len(outputs[0])
    if count > 1 and any(len(flag) > 1 for flag in flags):  # some of a column broadcast
        every = [flag if len(flag) > 1 else flag * count for flag in flags]
        for rows in places_of(zip(*every, strict=True)).values():
            part = [[column[i] for i in rows] for column in terms]
            written = [[column[i] for i in rows] for column in outputs]
            _run(expression, part, lengths, [keys[i] for i in rows] if keys else [], written)
        return
    vectors = [x for x, is_scalar in zip(terms, are_scalars, strict=True) if not is_scalar]
    scalars = [_shared(x) for x, is_scalar in zip(terms, are_scalars, strict=True) if is_scalar]
    if keys:
        scalars.append(keys)
    run(_body(expression, lengths, are_scalars), Calls(vectors, scalars, outputs))  # type: ignore[arg-type]


def _scalars(column: Sequence[Tensor | float], outputs: Sequence[Tensor]) -> list[bool]:
    """Which of a column are scalars beside their outputs; one flag where all are alike."""
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
    """One scalar in place of many that are the same object."""
    return column[:1] if len(set(map(id, column))) == 1 else column


def _outputs(
    expression: str, terms: Sequence[Tensor], lengths: Sequence[int]
) -> list[list[Tensor]]:
    """Columns of tensors for the results."""
    format = _format(expression)
    calls = zip(*columns(terms, len(terms) // sum(lengths)), strict=True)
    made = [
        empty_terms([x for x in call if isinstance(x, Tensor)], format.base, format.terms)
        for call in calls
    ]
    return [list(column) for column in zip(*made, strict=True)]


@opaque(
    lambda expression, terms, lengths, keys: [
        *itertools.chain(*_outputs(expression, terms, lengths))
    ],
    lays_out=True,
    direct=True,
)
def evaluate(
    expression: str, terms: Sequence[Tensor], lengths: Sequence[int], keys: Sequence[Tensor]
) -> list[Tensor]:
    """The terms of an expression in elementwise operations, for any number of sets of operands.

    Args:
        expression: its text, such as `"('mul', 'bf16x2', 0, 1)"`.
        terms: the leading terms of the first operand of all sets, then its second terms, and so on;
            then those of the second operand; outside of compilers a float may stand for a tensor.
        lengths: the number of terms of each operand.
        keys: one for each set, if the result rounds stochastically.

    Returns:
        The leading terms of all results, then their second ones, and so on.
    """
    outputs = _outputs(expression, terms, lengths)
    _run(expression, columns(terms, len(outputs[0])), tuple(lengths), keys, outputs)
    return list(itertools.chain(*outputs))


@opaque(lambda expression, targets, terms, lengths, keys: None, mutates=["targets"], direct=True)
def evaluate_(
    expression: str,
    targets: Sequence[Tensor],
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    keys: Sequence[Tensor],
) -> None:
    """The same, written into the terms of targets, which may be among the operands."""
    outputs = columns(targets, len(targets) // _format(expression).terms)
    _run(expression, columns(terms, len(outputs[0])), tuple(lengths), keys, outputs)


def write(
    expression: str,
    operands: Sequence[Operand],
    keys: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> None:
    """`evaluate_` for one set of operands, in fewer microseconds."""
    terms = [x for operand in operands for x in operand]
    lengths = [len(operand) for operand in operands]
    if not is_bare(terms, outputs):
        evaluate_(expression, list(outputs), terms, lengths, keys)
        return
    shaped = outputs[0].dim() > 0
    flags = [type(x) is float or (shaped and x.dim() == 0) for x in terms]  # type: ignore[union-attr]
    vectors = [x for x, is_scalar in zip(terms, flags, strict=True) if not is_scalar]
    scalars = [x for x, is_scalar in zip(terms, flags, strict=True) if is_scalar]
    body = _body(expression, tuple(lengths), tuple(flags))
    run_one(body, vectors, [*scalars, *keys], outputs)  # type: ignore[arg-type]
