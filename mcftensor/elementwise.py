"""Elementwise arithmetic on expansions, as operators on lists of tensors.

Each operation exists twice: evaluated in a wider machine type (`wide.py`) for bases of 16 bits, and
by networks of error-free transformations (`networks.py`) for the rest.
"""

from __future__ import annotations

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
from mcftensor.rounding import split_terms

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


def _body(
    operation: str, lengths: Sequence[int], are_scalars: Sequence[bool], format: Format
) -> Body:
    """An operation as a function of the vectors and scalars among the terms of its operands.

    Stochastic rounding takes a key as the last scalar; networks compute one term more for it.
    """
    by_wide, _ = _OPERATIONS[operation]
    terms = format.terms + (format.rounding == "stochastic")

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        left = {True: iter(scalars), False: iter(vectors)}
        operands = regroup([next(left[is_scalar]) for is_scalar in are_scalars], lengths)
        noise = uniform(scalars[-1], index) if format.rounding == "stochastic" else None
        if format.wide is not None:
            result = by_wide(*operands, wide=format.wide)
            return split_terms(result, format.base, format.terms, noise)
        longer = by_network(operation, operands, format.base, terms)
        return networks.shorten(longer, noise) if noise is not None else longer

    return body


def _calls(
    operation: str,
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    formats: str,
    keys: Sequence[Tensor],
    outputs: Sequence[Sequence[Tensor]],
) -> Iterator[tuple[Hashable, Callable[[], Body], Call]]:
    """What each tensor of a list asks of the kernels."""
    rest, more_keys = iter(terms), iter(keys)
    names = formats.split()
    count = len(lengths) // len(names)
    for i, (name, output) in enumerate(zip(names, outputs, strict=True)):
        own = tuple(lengths[i * count : (i + 1) * count])
        block = list(itertools.islice(rest, sum(own)))
        format = Format.from_name(name)
        shaped = output[0].dim() > 0
        are_scalars = tuple([shaped and x.dim() == 0 for x in block])
        vectors = [x for x, is_scalar in zip(block, are_scalars, strict=True) if not is_scalar]
        scalars = [x for x, is_scalar in zip(block, are_scalars, strict=True) if is_scalar]
        if format.rounding == "stochastic":
            scalars.append(next(more_keys))
        make = functools.partial(_body, operation, own, are_scalars, format)
        yield (operation, own, are_scalars, name), make, Call(vectors, scalars, output)


def _outputs(terms: Sequence[Tensor], lengths: Sequence[int], formats: str) -> list[list[Tensor]]:
    names = formats.split()
    count = len(lengths) // len(names)
    sizes = [sum(lengths[i : i + count]) for i in range(0, len(lengths), count)]
    operands = zip(regroup(terms, sizes), map(Format.from_name, names), strict=True)
    return [empty_terms(own, format.base, format.terms) for own, format in operands]


@opaque(
    lambda operation, terms, lengths, formats, keys: [
        *itertools.chain(*_outputs(terms, lengths, formats))
    ],
    lays_out=True,
)
def evaluate(
    operation: str,
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    formats: str,
    keys: Sequence[Tensor],
) -> list[Tensor]:
    """One elementwise operation on each of a list of tensors, in formats of their own.

    `terms` holds the operands of the first, one after the other, then those of the second, and so
    on; `lengths` their numbers of terms; `formats` names, with spaces between; `keys` one key for
    each format that rounds stochastically.
    """
    outputs = _outputs(terms, lengths, formats)
    run(_calls(operation, terms, lengths, formats, keys, outputs))
    return list(itertools.chain(*outputs))


@opaque(
    lambda operation, targets, terms, lengths, formats, keys: None,
    mutates=("targets",),
)
def evaluate_(
    operation: str,
    targets: Sequence[Tensor],
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    formats: str,
    keys: Sequence[Tensor],
) -> None:
    """The same, written into the terms of the targets, which may be among the operands."""
    outputs = regroup(targets, [Format.from_name(name).terms for name in formats.split()])
    run(_calls(operation, terms, lengths, formats, keys, outputs))
