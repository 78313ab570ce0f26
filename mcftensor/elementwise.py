"""Elementwise arithmetic on expansions, as operators on lists of tensors.

Each operation exists twice: evaluated in a wider machine type (`wide.py`) for bases of 16 bits, and
by networks of error-free transformations (`networks.py`) for the rest.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor import networks, wide
from mcftensor.formats import Format
from mcftensor.kernels import Body, Call, run
from mcftensor.noise import uniform
from mcftensor.operators import empty_terms, opaque, regroup
from mcftensor.rounding import peel, round_to_terms, split_terms

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


def _operands(
    expressions: str, terms: Operand, lengths: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...], list[Any]]]:
    """Each expression, the numbers of terms of its operands, and those terms."""
    rest, more = iter(terms), iter(lengths)
    for text in expressions.split(";"):
        own = tuple(itertools.islice(more, arity(text)))
        yield text, own, list(itertools.islice(rest, sum(own)))


@functools.cache
def _format(text: str) -> Format:
    """The format of an expression's result."""
    return Format.from_name(parsed(text)[1])  # type: ignore[index]


def _calls(
    expressions: str,
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    keys: Sequence[Tensor],
    outputs: Sequence[Sequence[Tensor]],
) -> Iterator[tuple[Body, Call]]:
    """What each expression asks of the kernels."""
    more_keys = iter(keys)
    of_each = _operands(expressions, terms, lengths)
    for (text, own, block), output in zip(of_each, outputs, strict=True):
        shaped = output[0].dim() > 0
        are_scalars = tuple([type(x) is float or (shaped and x.dim() == 0) for x in block])
        vectors = [x for x, is_scalar in zip(block, are_scalars, strict=True) if not is_scalar]
        scalars = [x for x, is_scalar in zip(block, are_scalars, strict=True) if is_scalar]
        if _format(text).rounding == "stochastic":
            scalars.append(next(more_keys))
        yield _body(text, own, are_scalars), Call(vectors, scalars, output)


def _outputs(
    expressions: str, terms: Sequence[Tensor], lengths: Sequence[int]
) -> list[list[Tensor]]:
    return [
        empty_terms(
            [x for x in block if isinstance(x, Tensor)], _format(text).base, _format(text).terms
        )
        for text, _, block in _operands(expressions, terms, lengths)
    ]


@opaque(
    lambda expressions, terms, lengths, keys: [
        *itertools.chain(*_outputs(expressions, terms, lengths))
    ],
    lays_out=True,
    direct=True,
)
def evaluate(
    expressions: str, terms: Sequence[Tensor], lengths: Sequence[int], keys: Sequence[Tensor]
) -> list[Tensor]:
    """The terms of expressions in elementwise operations, one after the other.

    Args:
        expressions: texts of expressions, with semicolons between: `"('mul', 'bf16x2', 0, 1)"`.
        terms: of the operands of the first expression, then of those of the second, and so on;
            outside of compilers a float may stand for a tensor of it.
        lengths: the number of terms of each operand.
        keys: one for each expression that rounds stochastically.
    """
    outputs = _outputs(expressions, terms, lengths)
    run(_calls(expressions, terms, lengths, keys, outputs))
    return list(itertools.chain(*outputs))


@opaque(lambda expressions, targets, terms, lengths, keys: None, mutates=["targets"], direct=True)
def evaluate_(
    expressions: str,
    targets: Sequence[Tensor],
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    keys: Sequence[Tensor],
) -> None:
    """The same, written into the terms of targets, which may be among the operands."""
    outputs = regroup(targets, [_format(text).terms for text in expressions.split(";")])
    run(_calls(expressions, terms, lengths, keys, outputs))
