"""The dtype of an expansion within an optimizer's step: the dtype of its decoded number.

States that optimizers create with `p.dtype` then have the bits of the parameter, conversions to it
round nothing, and workarounds for 16-bit parameters stay off. The step is the step over float32. A
conversion to this dtype is the identity there, and a conversion to the base dtype rounds. A tensor
created in the base dtype, `torch.zeros_like(p, dtype=torch.bfloat16)`, is plain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from mcftensor.dispatch.operands import expansions, is_float, mapped, plainly, template
from mcftensor.dispatch.registry import IN_STEP
from mcftensor.tensor import GradientTensor, MCFTensor


def _dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _of_numbers(args[0]) if args[0].is_inside_step else NotImplemented


def _of_numbers(x: MCFTensor) -> torch.dtype:
    return x._format.dtype_of_numbers(x._component0.device)


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `x.to(dtype)`, `x.to(device, dtype)`, `x.to(other)`, and their keywords."""
    x, *rest = args
    if isinstance(x, MCFTensor) and not x.is_inside_step:
        return NotImplemented
    if "tensor" in kwargs:
        rest = [kwargs["tensor"], *rest]
        kwargs = {name: value for name, value in kwargs.items() if name != "tensor"}
    if rest and isinstance(rest[0], Tensor):
        rest = [rest[0].device, rest[0].dtype, *rest[1:]]
    if not isinstance(x, MCFTensor):
        return x.to(*rest, **kwargs)
    given = [y for y in (*rest, *kwargs.values()) if isinstance(y, torch.dtype)]
    wide = _of_numbers(x)
    is_narrow = x._format.dtype != wide
    if is_narrow and given == [x._format.dtype]:
        return x._collapsed(x._format.dtype).to(*rest, **kwargs)
    # A gradient tensor may have fewer bits than its dtype.
    if is_narrow and isinstance(x, GradientTensor) and given:
        return x._component0.to(*rest, **kwargs)
    if given == [wide]:  # as torch, which sees the base, knows the identity
        rest = [x._format.dtype if y in given else y for y in rest]
        kwargs = {name: x._format.dtype if y in given else y for name, y in kwargs.items()}
    with torch._C.DisableTorchFunctionSubclass():
        return x.to(*rest, **kwargs)


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `x.type(dtype)` and `x.type_as(other)`; strings keep torch's meaning."""
    wanted = (*args[1:], *kwargs.values())[:1]
    if not wanted or isinstance(wanted[0], str):
        return NotImplemented
    dtype = wanted[0].dtype if isinstance(wanted[0], Tensor) else wanted[0]
    return _to(Tensor.to, (args[0], dtype), {})


def narrowly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the plain result of a function that is given the base dtype of an expansion in a step.

    Return NotImplemented for other calls.
    """
    dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
    found = [
        x for x in expansions((args, kwargs)) if x.is_inside_step and x._format.dtype in dtypes
    ]
    if not found or _of_numbers(found[0]) in dtypes:
        return NotImplemented
    dtype = found[0]._format.dtype
    if func.__name__.startswith("new_") or func.__name__.endswith("_like"):
        source, *rest = args or [kwargs["input"]]
        named = {name: x for name, x in kwargs.items() if name != "input"}
        return func(template(source), *rest, **named)
    args, kwargs = mapped(lambda x: None if x is dtype else x, (args, kwargs))
    return tree_map(
        lambda x: plainly(x, dtype) if is_float(x) else x,
        func(*args, **kwargs),
    )


def _register(func: Any, dtype: torch.dtype) -> None:
    IN_STEP[func] = lambda func, args, kwargs: _to(func, (args[0], dtype), kwargs)


IN_STEP[Tensor.dtype.__get__] = _dtype  # type: ignore[attr-defined]
IN_STEP[Tensor.to] = _to
IN_STEP[Tensor.type] = IN_STEP[Tensor.type_as] = _type
_register(Tensor.float, torch.float32)
_register(Tensor.double, torch.float64)
_register(Tensor.half, torch.float16)
_register(Tensor.bfloat16, torch.bfloat16)

# These functions accept the dtype as a positional argument, too.
for _func in (F.softmax, F.log_softmax, F.softmin, torch.norm):
    IN_STEP[_func] = narrowly
for _name in ("softmax", "log_softmax"):
    IN_STEP[getattr(torch, _name)] = IN_STEP[getattr(Tensor, _name)] = narrowly
