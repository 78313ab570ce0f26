"""Tensors in scaled formats: construction, data and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from mcftensor.scaling.scaled_format import ScaledFormat, of_dtype
from mcftensor.tensor.components import wrapper
from mcftensor.tensor.tensor import MCFTensor


class _InScaledFormats(type(MCFTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, x: object) -> bool:
        return is_scaled(x)


class ScaledTensor(MCFTensor, metaclass=_InScaledFormats):
    """MCFTensors whose format is a `ScaledFormat`; no object has this class itself.

    The numbers are `data · 2^exponent`, and
    `mcf.as_expansion(x, mcf.scaling.scaled(torch.float16))` makes these tensors. Shape, strides,
    device and dtype are the data's; `components` are the data, the tail if the format has one, and
    the exponent. Operations follow the rules of unit scaling, which this folder's modules list by
    operator: results are scaled again, and so are gradients.

    Views share the exponent of their base. A write to the whole tensor sets the exponent. A write
    to a part can only raise it, and then shifts the data of the rest. Copies have their exponent.

    Args:
        components: the data, and the tail if the format has one, as plain tensors of one shape.
        exponent: s, as a 0-d int32 tensor.
        format: their format; by default the format of the data's dtype.

    Raises:
        TypeError: components do not match the format.
        ValueError: the number of components is wrong, or their shapes differ.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1e-6, 2e-6]), mcf.scaling.scaled(torch.float16))
        >>> x @ x
        MCFTensor(5.0022e-12, format=scaled(float16), exponent=-40)
        >>> mcf.as_plain(x, torch.float64)
        tensor([1.0002e-06, 2.0005e-06], dtype=torch.float64)
        >>> isinstance(x, mcf.scaling.ScaledTensor), type(x) is mcf.MCFTensor
        (True, True)
    """

    _format: ScaledFormat

    @staticmethod
    def __new__(  # type: ignore[misc]
        cls, components: Sequence[Tensor], exponent: Tensor, format: ScaledFormat | None = None
    ) -> MCFTensor:
        """Make an MCFTensor from components, which are checked."""
        if format is None:
            data, *tail = [x.dtype for x in components]
            format = of_dtype(data, tail[0] if tail else None)
        return MCFTensor([*components, exponent], format)

    def __init__(
        self, components: Sequence[Tensor], exponent: Tensor, format: ScaledFormat | None = None
    ) -> None:
        pass

    @property
    def format(self) -> ScaledFormat:
        """The format of the data."""
        return self._format


def is_scaled(x: object) -> TypeGuard[ScaledTensor]:
    """Whether a tensor has a scaled format."""
    return isinstance(x, MCFTensor) and x._has_rules


def is_all(x: ScaledTensor) -> bool:
    """Whether a tensor covers all elements that share its exponent."""
    base = x._base_components
    return base is None or base[0].numel() == x.numel()


def made_of(
    data: Sequence[Tensor],
    exponent: Tensor,
    format: ScaledFormat,
    base: tuple[Tensor, ...] | None = None,
) -> ScaledTensor:
    """Return an unchecked tensor of data and an exponent; for a view, `base` is the base's data."""
    made = wrapper(MCFTensor, data[0], format)
    made._hold((*data, exponent), format, "value", own=False)
    if base is not None:
        made.__dict__["_base_components"] = base
    return made  # type: ignore[return-value]


def each_made_of(data: Sequence[Any], exponent: Tensor, format: ScaledFormat, *base: Any) -> Any:
    """Return `made_of` data, or a list for lists of data."""
    if isinstance(data[0], Tensor):
        return made_of(data, exponent, format, *base)
    return [made_of(piece, exponent, format, *base) for piece in zip(*data, strict=True)]


def _rebuilt(
    components: tuple[Tensor, ...],
    exponent: Tensor,
    rounding: Literal["nearest", "stochastic"],
    requires_grad: bool,
    is_param: bool,
) -> Any:
    """Rebuild tensors from pickles that were written when scaled tensors had a class."""
    dtype, tail = components[0].dtype, components[1].dtype if len(components) > 1 else None
    made = MCFTensor([*components, exponent], of_dtype(dtype, tail, rounding))
    if is_param:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuilt])
