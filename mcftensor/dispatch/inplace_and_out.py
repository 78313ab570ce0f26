"""The forms of an operation that write into a tensor: `x.name_()` and `name(..., out=x)`.

They run the functional form and copy its results, so that all terms are written, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES
from mcftensor.dispatch import storage_formats
from mcftensor.dispatch.default_handler import compute
from mcftensor.dispatch.operands import expansions, leaves, mapped, plainly
from mcftensor.dispatch.registry import TABLE, Handler
from mcftensor.dispatch.schemas import without_results, written_to
from mcftensor.dispatch.store import assign_tree, require_no_grad
from mcftensor.kernels.without_float64 import widest
from mcftensor.passes.operators import OPERATORS
from mcftensor.tensor import GradientTensor, MCFTensor
from mcftensor.tensor.implicit_rounding import rounding

aten = torch.ops.aten


def by_functional_form(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out an aten operator that writes, by its functional form.

    Operators on storage formats run directly, on decoded numbers.
    """
    if storage_formats.are_numbers((args, kwargs)):
        return storage_formats.on_numbers(func, args, kwargs)
    targets = written_to(func, args, kwargs)
    new, inputs, options = without_results(func, args, kwargs)
    if not expansions((inputs, options)):
        return compute(func, *args, **kwargs)
    if expansions(targets):
        inputs, options = as_values((inputs, options))
    elif new not in TABLE:  # the functional form would round to the format first
        return compute(func, *args, **kwargs)
    values = [x for x in expansions((inputs, options)) if x.acts_as == "value"]
    written = assign_tree(func, targets, new(*inputs, **options), values)
    return written if func._schema.returns else None


def evaluate_into(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """Run a function whose `out` has expansions, by its functional form."""
    require_no_grad(func.__name__, (args, kwargs, out))
    args, kwargs = as_values((args, kwargs))
    return assign_tree(func.__name__, out, func(*args, **kwargs))


def as_values(inputs: Any) -> Any:
    """Return parameters as values, so that what is written gets all their terms."""
    return mapped(
        lambda x: (
            MCFTensor.of(x.components, x.format, writes=x._count) if isinstance(x, MCFTensor) else x
        ),
        inputs,
    )


def takes_all_terms(target: Tensor, operands: Any) -> bool:
    """Return whether a plain target gets all terms of parameters, as an average of weights does.

    A write into a dtype wider than their terms, to which no gradients flow, is no forward pass.
    """
    found = expansions(operands)
    if not target.is_floating_point() or not any(x.acts_as == "parameter" for x in found):
        return False
    if any(isinstance(x, GradientTensor) for x in found):
        return False
    tensors = [x for x in leaves(operands) if isinstance(x, Tensor)]
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (target, *tensors))
    is_wider = all(target.dtype.itemsize > x._format.dtype.itemsize for x in found)
    return is_wider and not is_recorded


# --------------------------------------------------------------------------- onto plain tensors

# These round once by themselves.
_ALONE = ("copy_", "_foreach_copy_", "fill_", "set_")


def computes_into(func: Any) -> bool:
    """Return whether an operator computes the value that it writes to its first argument, or to
    `out`.
    """
    name = func.overloadpacket.__name__
    return (
        func.namespace == "aten"
        and (name.endswith("_") or (name in OPERATORS and func._overloadname.endswith("out")))
        and name not in _ALONE
        and not name.startswith("_fused_")
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def onto_plain(handler: Handler) -> Handler:
    """Return a handler of an operator that writes, and rounds plain targets only once.

    It runs PyTorch's own operation in a dtype that represents all operands.
    """

    def onto(func: Any, *args: Any, **kwargs: Any) -> Any:
        written = kwargs.get("out", args[0])
        targets = written if isinstance(written, (list, tuple)) else (written,)
        if any(isinstance(x, MCFTensor) for x in targets):
            return handler(func, *args, **kwargs)
        if targets and all(takes_all_terms(x, (args, kwargs)) for x in targets):
            args, kwargs = as_values((args, kwargs))
        elif "out" in kwargs:
            return handler(func, *args, **kwargs)
        wide = _wide_for(targets, args, kwargs)
        if wide is None:
            return handler(func, *args, **kwargs)
        for x in targets:
            rounding(func, expansions((args, kwargs)), x)
        return _in_dtype(func, wide, args, kwargs)

    return onto


def _wide_for(
    targets: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    """Return the dtype in which to compute an operation on values that writes to plain tensors.

    Return None if handlers compute as many bits in the formats of the values.
    """
    found = expansions((args, kwargs))
    if not targets or not found:
        return None
    dtype = targets[0].dtype
    if not dtype.is_floating_point or any(
        x.dtype != dtype or x.layout != torch.strided for x in targets
    ):
        return None
    if any(x.acts_as == "parameter" for x in found):
        return None
    if all(isinstance(x, GradientTensor) for x in found):
        if all(x._format.dtype == dtype for x in found):
            return None
    else:
        are_stored = all(x._format.arithmetic == "numbers" for x in found)
        if dtype.itemsize == 2 or (dtype.itemsize == 4 and are_stored):
            return None
    precision = max(map(_precision, found))
    if dtype.itemsize <= 4 and precision <= BASES[torch.float32].precision:
        return torch.float32
    wide = widest(targets[0].device)
    fits = dtype.itemsize <= wide.itemsize and precision <= BASES[wide].precision
    return wide if fits else None


def _precision(x: MCFTensor) -> int:
    is_gradient = isinstance(x, GradientTensor)
    return BASES[x._format.dtype].precision if is_gradient else x._format.precision


def _in_dtype(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    copies: dict[int, Tensor] = {}

    def widen(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided:
            return x
        if id(x) not in copies:
            copies[id(x)] = _widened(x, dtype)
        return copies[id(x)]

    func(*mapped(widen, args), **mapped(widen, kwargs))
    for x in written_to(func, args, kwargs):
        if copies[id(x)] is not x:
            x.copy_(plainly(copies[id(x)], x.dtype))
    return kwargs.get("out", args[0]) if func._schema.returns else None


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(x, GradientTensor):
        return x._component0.to(dtype)
    return x._collapsed(dtype) if isinstance(x, MCFTensor) else x.to(dtype)
