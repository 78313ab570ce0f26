"""Everything else: a parameter computes as its leading term, a value is refused."""

from __future__ import annotations

from typing import Any

import torch

from mcftensor.dispatch.operands import expansions, leading
from mcftensor.dispatch.table import implements
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operation on leading terms, where only parameters take part and none is written to.

    Raises:
        NotImplementedError: an expansion in the value role takes part, or one is to be mutated.
    """
    found = expansions((args, kwargs))
    written = [
        x
        for argument, given in _arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in expansions(given)
    ]
    if not written and all(x.role == "parameter" for x in found):
        return func(*leading(args), **leading(kwargs))
    reason = "it would write to an expansion" if written else "it has no kernel for values"
    shapes = ", ".join(f"{x.format.name} {tuple(x.shape)}" for x in found)
    raise NotImplementedError(
        f"{func}: not available on expansions ({shapes}): {reason}, and terms are never dropped "
        "in silence. Compute on mcf.as_plain(x, torch.float64) and come back with "
        "mcf.as_expansion(result, x.format), or copy_() the result into x"
    )


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    schema = func._schema.arguments
    given = list(zip(schema, args, strict=False))
    return given + [(a, kwargs[a.name]) for a in schema if a.name in kwargs]


@implements(
    aten.isnan.default,
    aten.isinf.default,
    aten.isposinf.default,
    aten.isneginf.default,
    aten.sign.default,
    aten.signbit.default,
)
def of_leading_term(func: Any, x: MCFTensor) -> Any:
    """The leading term alone decides these."""
    return func(x.components[0])


@implements(aten.is_pinned, aten.is_same_size, aten.sym_size, aten.sym_stride)
def metadata(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Questions about memory and shape, which all terms answer alike."""
    return func(*leading(args), **leading(kwargs))
