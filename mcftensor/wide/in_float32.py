"""Operations without float64: in float32 terms, or in float32 where it holds enough."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from mcftensor.dispatch.default_handler import in_machine_type
from mcftensor.dispatch.operands import value_of
from mcftensor.dispatch.schemas import written_to
from mcftensor.dispatch.system import PRECISION_OF_FLOAT32
from mcftensor.formats import Format
from mcftensor.kernels.without_float64 import without
from mcftensor.tensor import MCFTensor
from mcftensor.wide.beyond_float64 import by_algorithm


def in_float32_terms(
    func: Any,
    format: Format,
    found: list[MCFTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation by its algorithm in float32 terms, and round its results once.

    Without an algorithm, formats that float32 serves are evaluated in it.

    Raises:
        NotImplementedError: there is no algorithm for a longer format.
    """
    terms = max(2, *(len(x._format.components) for x in found))
    asked = kwargs.get("dtype")
    options = {name: x for name, x in kwargs.items() if name != "dtype"}
    try:
        result = by_algorithm(func, Format(torch.float32, terms), *args, **options)
    except NotImplementedError as error:
        if format.precision <= PRECISION_OF_FLOAT32:
            return in_machine_type(func, format, found, args, kwargs)
        shapes = ", ".join(f"{x._format.name} {tuple(x.shape)}" for x in found)
        raise without(f"{func} on expansions ({shapes})") from error
    if any(result is x for x in written_to(func, args, kwargs)):
        return result

    def narrow(x: Any) -> Any:
        if not isinstance(x, MCFTensor):
            return x
        if asked not in (None, format.dtype):
            return x._collapsed(asked)
        return x if x._format is format else value_of(x, format, found)

    return tree_map(narrow, result)
