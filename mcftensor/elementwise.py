"""Elementwise arithmetic on expansions, as operators on lists of tensors.

Each operation exists twice: evaluated in a wider machine type (`wide.py`) for bases of 16 bits, and
by networks of error-free transformations (`networks.py`) for the rest.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
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


@functools.cache
def _parsed(text: str) -> tuple[Expression, int]:
    """An expression of its text, and how many operands it has."""
    expression = ast.literal_eval(text)
    return expression, 1 + max(_leaves(expression))


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


def _body(
    expression: Expression, lengths: Sequence[int], are_scalars: Sequence[bool], stochastic: bool
) -> Body:
    """An expression as a function of the vectors and scalars among the terms of its operands.

    Stochastic rounding takes a key as the last scalar.
    """

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        left = {True: iter(scalars), False: iter(vectors)}
        operands = regroup([next(left[is_scalar]) for is_scalar in are_scalars], lengths)
        return _computed(expression, operands, uniform(scalars[-1], index) if stochastic else None)

    return body


# ------------------------------------------------------------------------------------ operators


def _operands(
    expressions: str, terms: Sequence[Tensor], lengths: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...], list[Tensor]]]:
    """Each expression, the numbers of terms of its operands, and those terms."""
    rest, more = iter(terms), iter(lengths)
    for text in expressions.split(";"):
        own = tuple(itertools.islice(more, _parsed(text)[1]))
        yield text, own, list(itertools.islice(rest, sum(own)))


def _format(text: str) -> Format:
    """The format of an expression's result."""
    return Format.from_name(_parsed(text)[0][1])  # type: ignore[index]


def _calls(
    expressions: str,
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    keys: Sequence[Tensor],
    outputs: Sequence[Sequence[Tensor]],
) -> Iterator[tuple[Hashable, Callable[[], Body], Call]]:
    """What each expression asks of the kernels."""
    more_keys = iter(keys)
    of_each = _operands(expressions, terms, lengths)
    for (text, own, block), output in zip(of_each, outputs, strict=True):
        shaped = output[0].dim() > 0
        are_scalars = tuple([shaped and x.dim() == 0 for x in block])
        vectors = [x for x, is_scalar in zip(block, are_scalars, strict=True) if not is_scalar]
        scalars = [x for x, is_scalar in zip(block, are_scalars, strict=True) if is_scalar]
        stochastic = _format(text).rounding == "stochastic"
        if stochastic:
            scalars.append(next(more_keys))
        make = functools.partial(_body, _parsed(text)[0], own, are_scalars, stochastic)
        yield (text, own, are_scalars), make, Call(vectors, scalars, output)


def _outputs(
    expressions: str, terms: Sequence[Tensor], lengths: Sequence[int]
) -> list[list[Tensor]]:
    return [
        empty_terms(block, _format(text).base, _format(text).terms)
        for text, _, block in _operands(expressions, terms, lengths)
    ]


@opaque(
    lambda expressions, terms, lengths, keys: [
        *itertools.chain(*_outputs(expressions, terms, lengths))
    ],
    lays_out=True,
)
def evaluate(
    expressions: str, terms: Sequence[Tensor], lengths: Sequence[int], keys: Sequence[Tensor]
) -> list[Tensor]:
    """The terms of expressions in elementwise operations, one after the other.

    Args:
        expressions: texts of expressions, with semicolons between: `"('mul', 'bf16x2', 0, 1)"`.
        terms: of the operands of the first expression, then of those of the second, and so on.
        lengths: the number of terms of each operand.
        keys: one for each expression that rounds stochastically.
    """
    outputs = _outputs(expressions, terms, lengths)
    run(_calls(expressions, terms, lengths, keys, outputs))
    return list(itertools.chain(*outputs))


@opaque(lambda expressions, targets, terms, lengths, keys: None, mutates=["targets"])
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
