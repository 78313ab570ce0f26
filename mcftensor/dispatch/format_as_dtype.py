"""A format in place of a dtype: `x.to(format)`, `torch.zeros(3, dtype=format)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.default_handler import PRECISION
from mcftensor.dispatch.in_float64 import WIDE
from mcftensor.dispatch.operands import is_wrapped, leaves, value_of
from mcftensor.dispatch.torch_functions import narrowed
from mcftensor.formats import Format
from mcftensor.tensor.dtensor import any_format_of, format_of, on_local


def cast(
    x: Tensor,
    format: Format,
    non_blocking: bool = False,
    copy: bool = False,
    *,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Return a tensor as a value of a format, rounded once; gradients of plain tensors pass
    through.

    Raises:
        ValueError: an expansion in another format that requires grad.
    """
    if format.arithmetic == "plain":
        return x.to(format.dtype, non_blocking, copy, memory_format=memory_format)
    own = any_format_of(x)
    if own is format:
        return x.clone() if copy else x
    if format.rules is not None:
        return format.rules.convert(x, format)
    if own is not None and own.rules is not None:
        x = x.to(WIDE)  # plain, and its gradient is rounded by the rules
    if not x.is_floating_point():
        x = x.to(WIDE)
    format.require(x)
    if is_wrapped(x) or (torch.is_grad_enabled() and x.requires_grad):
        if format_of(x) is not None:
            raise ValueError(
                f"to: an expansion in {x.format.name} of shape {tuple(x.shape)} requires grad, and "  # type: ignore[attr-defined]
                f"gradients do not pass into {format.name}; convert x.detach()"
            )
        return narrowed(x.to(WIDE), format)
    return on_local(value_of, x.detach(), format)


def in_place_of_dtype(
    found: Format, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function of PyTorch that was given a format: `x.to(format)`, or one with
    `dtype=format`.

    Functions with `dtype=` are computed in float64 and converted.

    Raises:
        TypeError: any other use of a format, or a result that float64 cannot represent.
    """
    options = dict(kwargs)
    format = options.pop("dtype", None)
    if func is Tensor.to:
        x, *others = args
        return cast(x, others.pop(0) if format is None else format, *others, **options)
    name = getattr(func, "__name__", str(func)).strip("_")
    if format is found:
        is_made_of = any(isinstance(x, Tensor) for x in leaves(args))
        if not is_made_of or format.precision <= PRECISION or "like" in name or "new_" in name:
            requires_grad = options.pop("requires_grad", False)
            made = cast(func(*args, dtype=WIDE, **options), format)
            return made.requires_grad_() if requires_grad else made
    raise TypeError(
        f"{name}: {found.name} is a format, which cannot stand here; convert a tensor by "
        f"x.to({found!r}), and a tensor or a module by mcf.as_expansion(x, {found!r})"
    )


Format._in_place_of_dtype = staticmethod(in_place_of_dtype)
