"""Conversions in which PyTorch would drop terms: to another tensor, and of gradients.

PyTorch sees only the dtype of another tensor, and rounds a gradient that comes back from a wider
dtype to the base dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from mcftensor.arithmetic.base_types import NARROW
from mcftensor.dispatch.format_as_dtype import cast
from mcftensor.dispatch.operands import expansions, mapped
from mcftensor.dispatch.torch_functions import FUNCTIONS, converted, evaluate_whole
from mcftensor.formats import PLAIN
from mcftensor.kernels.columns import is_wrapped
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.implicit_rounding import holds


def _is_recorded(x: Any) -> TypeGuard[MCFTensor]:
    """Return whether gradients flow to a tensor that is a value."""
    return (
        isinstance(x, MCFTensor)
        and not x._has_rules
        and x.acts_as == "value"
        and (is_wrapped(x) or (torch.is_grad_enabled() and x.requires_grad))
    )


def plain_with_gradient(x: Any, dtype: Any) -> Any:
    """Return a value to which gradients flow as a plain tensor, so that they keep all terms.

    Return any other x as it is, and x for its own dtype or one without gradients.
    """
    is_other = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if not is_other or not _is_recorded(x) or dtype == x.dtype:
        return x
    return converted(x, x.format, PLAIN[dtype])


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Handle `x.to(...)` and `x.type_as(other)`. A value as the argument stands for its format.

    A storage format stands for the dtype in which it computes.
    """
    other = kwargs.get("tensor", args[0] if args else None)
    if isinstance(other, MCFTensor) and other.acts_as == "value":
        rest = args[0 if "tensor" in kwargs else 1 :]
        options = {name: given for name, given in kwargs.items() if name != "tensor"}
        format = other._format.result
        if _is_recorded(x) and x.dtype != other.dtype:
            return converted(x, x.format, format).to(other.device, *rest, **options)
        if not isinstance(x, MCFTensor) or not (x.requires_grad or x.dtype == other.dtype):
            return cast(x.to(other.device), format, *rest, **options)
    for given in (*args, *kwargs.values()):
        x = plain_with_gradient(x, given.dtype if isinstance(given, Tensor) else given)
    return x.to(*args, **kwargs)


def _type(x: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    return plain_with_gradient(x, dtype).type(dtype, **kwargs)


def _float_power(x: Any, exponent: Any, **kwargs: Any) -> Tensor:
    """Return `torch.float_power`, in formats that float64 does not hold without a conversion."""
    found = [y for y in (x, exponent) if isinstance(y, MCFTensor) and y.acts_as == "value"]
    if not all(holds(torch.float64, y.format) for y in found):
        return torch.pow(x, exponent, **kwargs)
    return torch.float_power(
        plain_with_gradient(x, torch.float64),
        plain_with_gradient(exponent, torch.float64),
        **kwargs,
    )


def _pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Return `nn.utils.rnn.pad_sequence`, which torch writes into a plain tensor."""
    longest = max(map(len, sequences))
    like = next(x for x in sequences if isinstance(x, MCFTensor))
    rows = []
    for x in sequences:
        padding = like.new_full((longest - len(x), *x.shape[1:]), padding_value)
        rows.append(torch.cat([x, padding] if padding_side == "right" else [padding, x]))
    return torch.stack(rows, 0 if batch_first else 1)


def _pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return `torch._pack_padded_sequence`: steps of sequences, selected by the packed places."""
    places = torch.arange(x.shape[0] * x.shape[1], device="cpu").view(x.shape[:2])
    packed, sizes = torch._pack_padded_sequence(places, lengths, batch_first)
    return x.flatten(0, 1)[packed.to(x.device)], sizes


def _pad_packed_sequence(
    x: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return `torch._pad_packed_sequence`, by the places of steps."""
    places, lengths = torch._pad_packed_sequence(
        torch.arange(len(x), device="cpu"), sizes, batch_first, -1, total_length
    )
    places = places.to(x.device)
    padding = (places < 0).view(*places.shape, *[1] * (x.dim() - 1))
    return x[places.clamp(min=0)].masked_fill(padding, padding_value), lengths


def _method(name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda x, **kwargs: getattr(plain_with_gradient(x, dtype), name)(**kwargs)


def _softmin(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Handle `F.softmin`, which rounds -x to a dtype that is given."""
    dtype = None if dtype == input.dtype else dtype
    x = plain_with_gradient(-input, dtype)
    if isinstance(x, MCFTensor) and x.acts_as == "value":
        made: Tensor = evaluate_whole(F.softmax, x, dim, _stacklevel, dtype=dtype)
        return made
    return F.softmax(x, dim, _stacklevel, dtype)


BEFORE_TORCH: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.type_as: _to,
    Tensor.type: _type,
    Tensor.double: _method("double", torch.float64),
    Tensor.float: _method("float", torch.float32),
    Tensor.half: _method("half", torch.float16),
    Tensor.bfloat16: _method("bfloat16", torch.bfloat16),
    torch.float_power: _float_power,
    Tensor.float_power: _float_power,
    F.softmin: _softmin,
    torch._C._nn.pad_sequence: _pad_sequence,
    torch._pack_padded_sequence: _pack_padded_sequence,
    torch._pad_packed_sequence: _pad_packed_sequence,
}


_PRODUCTS = FUNCTIONS | {torch.einsum, torch.functional.einsum, torch.addmv, torch.dot}


def with_wide_inputs(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a product of values in storage formats, with 16-bit inputs in
    float32.

    Products have float32 results, and PyTorch's gradient multiplies theirs by the inputs.
    """
    if func not in _PRODUCTS or not torch.is_grad_enabled():
        return args
    found = [x for x in expansions(args) if not x._has_rules]
    if not any(x._format.arithmetic == "numbers" and x.acts_as == "value" for x in found):
        return args
    return mapped(
        lambda x: x.float() if type(x) in (Tensor, Parameter) and x.dtype in NARROW else x, args
    )


def for_plain_target(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a function that may write to a plain tensor, as `plain.add_(x)` does.

    Values that the plain tensor holds are converted first, and their gradients keep all terms.
    """
    target = args[0]
    if not torch.is_grad_enabled() or not isinstance(target, Tensor):
        return args
    name = getattr(func, "__name__", "")
    is_operator = name.endswith("__")
    if not (name.startswith("__i") or name == "__setitem__" if is_operator else name.endswith("_")):
        return args
    return mapped(
        lambda x: (
            plain_with_gradient(x, target.dtype)
            if isinstance(x, MCFTensor) and holds(target.dtype, x._format)
            else x
        ),
        args,
    )
