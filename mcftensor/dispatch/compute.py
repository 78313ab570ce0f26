"""Everything else: a parameter computes as its leading term, a value on all its terms."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from mcftensor.dispatch import float64, long, stored
from mcftensor.dispatch.operands import (
    common_format,
    expansions,
    leading,
    only_stores,
    with_leading,
)
from mcftensor.dispatch.registry import implements
from mcftensor.dispatch.writing import written_to
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operation on leading terms, where only parameters take part and none is written to.

    Otherwise it is evaluated on all terms: in float64, or beyond 48 bits by an algorithm of its
    own.
    """
    if not kwargs and not func._schema.is_mutable:
        plain = with_leading(args)
        if plain is not None:
            return _plainly(func, args, kwargs, plain)
    found = expansions((args, kwargs))
    writes = func._schema.is_mutable and any(
        isinstance(x, MCFTensor) for _, x in written_to(func, args, kwargs)
    )
    if not writes and all(x.role == "parameter" for x in found):
        return _plainly(func, args, kwargs)
    if func.namespace == "mcftensor":
        raise TypeError(f"{func}: takes the terms of expansions, and got an expansion")
    format = common_format(str(func), found)
    if only_stores(format):
        return stored.on_numbers(func, args, kwargs)
    if format.precision > float64.PRECISION:
        return long.by_algorithm(func, format, *args, **kwargs)
    return float64.in_float64(func, format, *args, **kwargs)


def _plainly(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: list[Any] | None = None
) -> Any:
    """The operation on leading terms; in float32 where PyTorch has it not in 16 bits.

    Some decompositions say so by a NotImplementedError, as QR, others by a bare RuntimeError, as
    the pseudo-inverse.
    """
    try:
        return func(*(leading(args) if plain is None else plain), **leading(kwargs))
    except RuntimeError as error:
        base = expansions((args, kwargs))[0].dtype
        missing = isinstance(error, NotImplementedError) or func._opname.startswith("linalg_")
        if base.itemsize > 2 or not missing:
            raise

        def cast(dtype: torch.dtype, new: torch.dtype) -> Any:
            return lambda x: x.to(new) if isinstance(x, torch.Tensor) and x.dtype == dtype else x

        args, kwargs = tree_map(cast(base, torch.float32), leading((args, kwargs)))
        return tree_map(cast(torch.float32, base), func(*args, **kwargs))


@implements(
    aten.isnan.default,  # x.isnan
    aten.isinf.default,  # x.isinf
    aten.isposinf.default,  # x.isposinf
    aten.isneginf.default,  # x.isneginf
    aten.signbit.default,  # x.signbit, torch.copysign beyond 48 bits
)
def of_leading_term(func: Any, x: MCFTensor) -> Any:
    """The leading term alone decides these."""
    return func(x.components[0])


@implements(
    aten.is_pinned,  # x.is_pinned, x.pin_memory
    aten.is_same_size,  # torch.autograd.grad
)
def metadata(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Questions about memory and shape, which all terms answer alike."""
    return func(*leading(args), **leading(kwargs))
