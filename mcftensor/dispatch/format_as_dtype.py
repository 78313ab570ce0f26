"""A format in place of a dtype: `x.to(format)`, `torch.zeros(3, dtype=format)`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import leaves, value_of
from mcftensor.dispatch.system import PRECISION, WIDE, serves
from mcftensor.dispatch.torch_functions import converted
from mcftensor.formats import PLAIN, Format, named
from mcftensor.kernels.columns import is_transformed
from mcftensor.kernels.without_float64 import PAIR, widest, without
from mcftensor.passes.format_conversion import number_terms
from mcftensor.tensor.components import any_format_of, format_of, on_local
from mcftensor.tensor.tensor import MCFTensor, of_numbers
from mcftensor.wings import wing


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
        return on_local(value_of, x, format)
    format.require(x)
    if is_transformed(x) or (torch.is_grad_enabled() and x.requires_grad):
        if format_of(x) is not None:
            raise ValueError(
                f"to: an expansion in {x.format.name} of shape {tuple(x.shape)} requires grad, and "  # type: ignore[attr-defined]
                f"gradients do not pass into {format.name}; convert x.detach()"
            )
        return converted(x, PLAIN[x.dtype], format)
    return on_local(value_of, x.detach(), format)


def in_place_of_dtype(
    found: Format, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function of PyTorch that was given a format: `x.to(format)`, or one with
    `dtype=format`.

    Functions with `dtype=` are computed in float64, or in float32 terms without it, and converted.

    Raises:
        TypeError: any other use of a format, or a result that float64 cannot represent.
    """
    options = dict(kwargs)
    format = options.pop("dtype", None)
    if func is Tensor.to:
        x, *others = args
        if format is None:
            format, *others = others
        return cast(x, format, *others, **options)
    name = getattr(func, "__name__", str(func)).strip("_")
    if format is found:
        is_made_of = any(isinstance(x, Tensor) for x in leaves(args))
        if not is_made_of or format.precision <= PRECISION or "like" in name or "new_" in name:
            requires_grad = options.pop("requires_grad", False)
            made = cast(_result(func, name, format, args, options), format)
            return made.requires_grad_() if requires_grad else made
    raise TypeError(
        f"{name}: {found.name} is a format, which cannot stand here; convert a tensor by "
        f"x.to({found!r}), and a tensor or a module by mcf.as_expansion(x, {found!r})"
    )


def _result(
    func: Any, name: str, format: Format, args: tuple[Any, ...], options: dict[str, Any]
) -> Tensor:
    """Return a result in float64; without it in float32 terms, if it has no more bits than they.

    Evenly spaced numbers are computed in longer formats.

    Raises:
        NotImplementedError: there is no float64, and the result would be rounded to float32.
    """
    tensors = [x for x in leaves(args) if isinstance(x, Tensor)]
    given = options.get("device") or (tensors[0].device if tensors else torch.get_default_device())
    device = torch.device(given)
    if name in ("arange", "linspace") and not serves(format, device):
        return wing("wide").SPACED[name](format, *args, **options)
    if name in ("tensor", "as_tensor") and not tensors:
        return of_numbers(*args).to(device)
    stem = name.removeprefix("new_").removesuffix("_like")
    filled = [options.pop("fill_value")] if "fill_value" in options else []
    if stem in ("full", "scalar_tensor"):
        *others, number = *args, *filled
        source, terms = number_terms(number, device)
        made = [func(*others, x.item(), dtype=x.dtype, **options) for x in terms]
        return made[0] if len(made) == 1 else MCFTensor.of(made, named(source))
    if widest(device) == WIDE:
        whole: Tensor = func(*args, dtype=WIDE, **options)
        return whole
    single = functools.partial(func, dtype=torch.float32, **options)
    if stem in ("zeros", "ones", "empty", "eye"):
        return single(*args)
    if stem in ("rand", "randn"):
        drawn = value_of(single(*args), named(PAIR))
        return drawn.uniform_() if stem == "rand" else drawn.normal_()
    if tensors and tensors[0].is_floating_point():
        return func(value_of(tensors[0], named(PAIR)), *args[1:], **options)
    raise without(f"{name} with a format for a dtype")


Format._in_place_of_dtype = staticmethod(in_place_of_dtype)
