"""Formats that only store numbers: operations work on the numbers, and give plain tensors.

What moves elements keeps the format, and what writes into such a tensor stores with one rounding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from mcftensor.dispatch.operands import (
    computes_plainly,
    expansions,
    leading,
    only_stores,
    require_castable,
)
from mcftensor.dispatch.registry import Handler
from mcftensor.dispatch.writing import written_to
from mcftensor.tensor.tensor import MCFTensor


def of_terms(handler: Handler) -> Handler:
    """A handler that works on terms, and so leaves other components to `on_numbers`."""

    def on_terms(func: Any, *args: Any, **kwargs: Any) -> Any:
        if _are_among((args, kwargs)):
            return on_numbers(func, args, kwargs)
        return handler(func, *args, **kwargs)

    return on_terms


def _are_among(operands: Any) -> bool:
    return any(only_stores(x._format) for x in expansions(operands))


def on_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on numbers as plain tensors; those that it writes to are stored again."""
    if computes_plainly((*args, *kwargs.values())):
        return func(*leading(args), **leading(kwargs))
    written = {id(x): x for _, x in written_to(func, args, kwargs) if _are_among([x])}
    (args, kwargs), copies = decoded((args, kwargs))
    result = func(*args, **kwargs)
    originals = {}
    for i, x in written.items():
        require_castable(copies[i].dtype, x)
        x.copy_(copies[i])
        originals[id(copies[i])] = x
    return tree_map(lambda x: originals.get(id(x), x), result)


def decoded(tree: Any) -> tuple[Any, dict[int, Tensor]]:
    """The arguments with numbers in the place of what only stores them, and these numbers by the
    id of what stores them."""
    numbers: dict[int, Tensor] = {}

    def decode(x: Any) -> Any:
        if not (isinstance(x, MCFTensor) and only_stores(x._format)):
            return x
        if id(x) not in numbers:
            numbers[id(x)] = plain_numbers(x)
        return numbers[id(x)]

    return tree_map(decode, tree), numbers


def plain_numbers(x: MCFTensor) -> Tensor:
    """What is stored, as a plain tensor."""
    return x._collapsed(x._format.result.dtype)
