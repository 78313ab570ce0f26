"""The stages of a call of PyTorch on expansions; README.md lists them in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from mcftensor.dispatch import conversions as conversions
from mcftensor.dispatch import defer as defer
from mcftensor.dispatch import format_as_dtype as format_as_dtype
from mcftensor.dispatch.default_handler import compute
from mcftensor.dispatch.dtype_in_step import narrowly
from mcftensor.dispatch.foreach import foreach
from mcftensor.dispatch.inplace_and_out import (
    by_functional_form,
    computes_into,
    evaluate_into,
    onto_plain,
)
from mcftensor.dispatch.registry import FAMILIES, IN_STEP, SHORTCUTS, TABLE, Handler, handler_of
from mcftensor.dispatch.schemas import functional
from mcftensor.dispatch.torch_functions import WHOLE, evaluate_whole
from mcftensor.formats import Format
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import keep_from_compilers
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.step_tensors import PendingTensor
from mcftensor.tensor.tensor import number_in

_without_function: Any = torch._C._disabled_torch_function_impl


def torch_function(
    cls: type,
    func: Any,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Carry out a function of PyTorch on arguments with an expansion among them."""
    if len(types) > 1 and any(issubclass(kind, (Format, PendingTensor)) for kind in types):
        return NotImplemented  # the other class handles it
    if func in _ARE_COMPLEX and not kwargs:  # optimizers ask it of every parameter
        return False
    is_eager = not is_compiling()
    if is_eager:
        for x in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(x, MCFTensor) and x._has_rules:
                return _without_function(func, types, args, kwargs or {})
        shortcut = IN_STEP.get(func)
        if shortcut is None or current_step() is None:
            shortcut = SHORTCUTS.get(func)
        if shortcut is not None:
            result = shortcut(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
    if is_eager and args and not isinstance(args[0], MCFTensor):
        args = conversions.for_plain_target(func, args)
    args = conversions.with_wide_inputs(func, args)
    if not kwargs and func not in WHOLE and func not in _BEFORE_TORCH:
        return _without_function(func, types, args)
    kwargs = kwargs or {}
    if "dtype" in kwargs and is_eager and current_step() is not None:
        result = narrowly(func, args, kwargs)
        if result is not NotImplemented:
            return result
    out = kwargs.get("out")
    if out is not None and not isinstance(func, OpOverload) and _holds_expansion(out):
        inputs = {name: x for name, x in kwargs.items() if name != "out"}
        if _holds_expansion((args, inputs)):
            return evaluate_into(func, args, inputs, out)
    with torch._C.DisableTorchFunctionSubclass():
        if func in _BEFORE_TORCH:
            return _BEFORE_TORCH[func](*args, **kwargs)
        if "dtype" in kwargs and args:
            args = (conversions.plain_with_gradient(args[0], kwargs["dtype"]), *args[1:])
        if func in WHOLE and _has_value((args, kwargs)):
            return evaluate_whole(func, *args, **kwargs)
        return func(*args, **kwargs)


def torch_dispatch(
    cls: type,
    func: Any,
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Carry out one of PyTorch's operators on arguments with an expansion among them."""
    if PendingTensor in types:
        return NotImplemented
    for x in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(x, list):
            x = next((y for y in x if isinstance(y, MCFTensor) and y._has_rules), None)
        if isinstance(x, MCFTensor) and x._has_rules:
            rules: Any = x._format.rules
            return rules.carry_out(func, args, kwargs or {})
    return _handler(func)(func, *args, **(kwargs or {}))


@functools.lru_cache(maxsize=4096)
def _handler(func: Any) -> Handler:
    own = TABLE.get(func) or TABLE.get(func.name())
    if own is None and func.namespace == "prims":
        own = _of_prims(func)
    own = own or FAMILIES.get(func.namespace)
    found = handler_of(func, own, foreach, FAMILIES["view"])
    handler = found or (by_functional_form if functional(func) else compute)
    return onto_plain(handler) if computes_into(func) else handler


def _of_prims(func: Any) -> Handler | None:
    """Return a handler that calls aten's operator of the same name and arguments, or None.

    Forward derivatives call prims, the building blocks of PyTorch's references.
    """
    if func is torch.ops.prims.convert_element_type.default:
        return lambda func, x, dtype: x.to(dtype)
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__, None)
    if packet is None or any(x.alias_info is not None for x in func._schema.returns):
        return None
    wanted = [a.type for a in func._schema.arguments]
    for name in packet.overloads():
        given = getattr(packet, name)._schema
        required = [a.type for a in given.arguments if not a.has_default_value()]
        if required == wanted and not given.is_mutable:
            return lambda func, *args: packet(*args)
    return None


def _where(condition: Tensor, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    """Return torch.where. Numbers become expansions, since torch rounds them before dispatch."""
    expansions = [x for x in (input, other) if isinstance(x, MCFTensor) and not x._has_rules]
    if not expansions:
        chosen = () if input is None else (input, other)
        return torch.where(condition, *chosen, **kwargs)
    format, role = expansions[0].format, expansions[0].role
    input, other = (
        number_in(x, format, role) if isinstance(x, (int, float)) else x for x in (input, other)
    )
    return torch.where(condition, input, other, **kwargs)


_ARE_COMPLEX = {torch.is_complex, Tensor.is_complex}

# torch rounds numbers, or gradients, to the base dtype.
_BEFORE_TORCH: dict[Any, Callable[..., Any]] = {
    **conversions.BEFORE_TORCH,
    torch.where: _where,
    Tensor.where: lambda input, condition, other: _where(condition, input, other),
}


def _holds_expansion(tree: Any) -> bool:
    return any(isinstance(x, MCFTensor) and not x._has_rules for x in tree_leaves(tree))


def _has_value(tree: Any) -> bool:
    return any(
        isinstance(x, MCFTensor) and not x._has_rules and x.acts_as == "value"
        for x in tree_leaves(tree)
    )


MCFTensor.__torch_function__ = classmethod(torch_function)  # type: ignore[assignment]
MCFTensor.__torch_dispatch__ = classmethod(torch_dispatch)  # type: ignore[assignment]
keep_from_compilers(torch_function)
keep_from_compilers(torch_dispatch)
