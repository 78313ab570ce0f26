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

OF_TERMS: set[Handler] = set()
"""Handlers that work on terms, and so on no other components."""


def of_terms(handler: Handler) -> Handler:
    """Mark a handler as one of these."""
    OF_TERMS.add(handler)
    return handler


def are_among(operands: Any) -> bool:
    """Whether some operand only stores numbers."""
    return any(only_stores(x._format) for x in expansions(operands))


def on_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on numbers as plain tensors; those that it writes to are stored again."""
    if computes_plainly((*args, *kwargs.values())):
        return func(*leading(args), **leading(kwargs))
    written = {id(x): x for _, x in written_to(func, args, kwargs) if are_among([x])}
    copies: dict[int, Tensor] = {}

    def decoded(x: Any) -> Any:
        if not (isinstance(x, MCFTensor) and only_stores(x._format)):
            return x
        if id(x) not in copies:
            copies[id(x)] = plain_numbers(x)
        return copies[id(x)]

    result = func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
    originals = {}
    for i, x in written.items():
        require_castable(copies[i].dtype, x)
        x.copy_(copies[i])
        originals[id(copies[i])] = x
    return tree_map(lambda x: originals.get(id(x), x), result)


def plain_numbers(x: MCFTensor) -> Tensor:
    """What is stored, as a plain tensor."""
    return x._collapsed(x._format.result.dtype)


def decoded(tree: Any) -> Any:
    """The arguments with numbers in the place of what only stores them."""
    return tree_map(
        lambda x: plain_numbers(x) if isinstance(x, MCFTensor) and only_stores(x._format) else x,
        tree,
    )
