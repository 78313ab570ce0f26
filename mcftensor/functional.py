"""Functions that have no counterpart in torch, and log-probabilities of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcftensor import wings
from mcftensor.dispatch.operands import common_format, common_role, expansions
from mcftensor.kernels.without_float64 import is_long_int, widest
from mcftensor.operators import own_functions
from mcftensor.tensor.tensor import number_in

if TYPE_CHECKING:
    from mcftensor.reproducible import (
        cross_entropy,
        kl_div,
        log_softmax,
        logsumexp,
        selective_log_softmax,
    )

__all__ = [
    "cbrt",
    "cospi",
    "cross_entropy",
    "fma",
    "gamma",
    "kl_div",
    "log_softmax",
    "logsumexp",
    "selective_log_softmax",
    "sinpi",
]


_OF_LOGITS = ("cross_entropy", "kl_div", "log_softmax", "logsumexp", "selective_log_softmax")
__getattr__ = wings.names_of_wings(__name__, dict.fromkeys(_OF_LOGITS, "reproducible"))


def fma(x: Tensor | float, y: Tensor | float, z: Tensor | float) -> Tensor:
    """Return x * y + z, rounded once at the end.

    Args:
        x: an expansion, a plain tensor or a number. One of the three operands is an expansion.
        y: the same; operands broadcast.
        z: the same.

    Returns:
        An expansion, or a plain tensor if parameters meet plain tensors. The error is stated in
        `expansion.fma`.

    Raises:
        TypeError: no operand is an expansion.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 2.0]), mcf.fp32x2)
        >>> mcf.fma(x, 0.1, 3)
        MCFTensor([3.1000, 3.2000], format=fp32x2)
    """
    operands = (x, y, z)
    found = expansions(operands)
    if not found:
        raise TypeError(
            "fma: no operand is an expansion; make one with mcf.as_expansion, or use mcf.eft.fma "
            "on plain tensors"
        )
    format, role = common_format("fma", operands), common_role(operands)
    device, has_dimensions = found[0].device, any(e.dim() for e in found)

    def entered(operand: Tensor | float) -> Tensor:
        if isinstance(operand, Tensor):
            return operand
        if has_dimensions and widest(device) == torch.float64 and not is_long_int(operand):
            return torch.scalar_tensor(operand, dtype=torch.float64, device=device)
        return number_in(operand, format, role, device)

    return torch.addcmul(entered(z), entered(x), entered(y))


def _real(name: str, x: Tensor) -> Tensor:
    """Return x, or raise TypeError unless it is a real floating tensor in one process."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {found}; give an expansion or a real floating tensor")
    if hasattr(x, "_local_tensor"):
        raise TypeError(f"{name}: got a DTensor; call it with x.to_local()")
    return x


def sinpi(x: Tensor) -> Tensor:
    """Return the sine of pi x, element by element.

    The argument is reduced without rounding, so integers give zero and `0.5` gives 1, at any size.

    Args:
        x: an expansion, or a plain floating tensor.

    Returns:
        A tensor of the format, or dtype, and shape of x. It is differentiable. A parameter gives a
        plain tensor, from its leading term, and a storage format a plain tensor of its numbers.

    *Error*: (2^(1 - n) + 2^-6) u^n of the result, for n terms of float32 or float64. For other
    formats and plain tensors, that of one rounding, and 2^-20 of it.

    *Special values*: a zero result has the sign of x; infinities give NaN (C23, Annex F).

    Raises:
        TypeError: x is not a real floating tensor, or is a DTensor.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([0.5, 1.0, 1 / 6], dtype=torch.float64), mcf.fp64x2)
        >>> mcf.functional.sinpi(x)
        MCFTensor([1.0000, 0.0000, 0.5000], format=fp64x2)
    """
    return own_functions.sinpi(_real("sinpi", x))


def cospi(x: Tensor) -> Tensor:
    """Return the cosine of pi x, element by element.

    Arguments, result, error and exceptions are those of `sinpi`. *Special values*: a zero result is
    +0; infinities give NaN.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.functional.cospi(torch.tensor([0.0, 0.5, 1.0, 1e30]))
        tensor([ 1.,  0., -1.,  1.])
    """
    return own_functions.cospi(_real("cospi", x))


def cbrt(x: Tensor) -> Tensor:
    """Return the cube root, with the sign of x, element by element.

    Arguments, result, error and exceptions are those of `sinpi`. *Special values*: zeros,
    infinities and NaN are returned unchanged. The gradient at zero is infinite.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([-27.0, 2.0]), mcf.fp32x2)
        >>> mcf.functional.cbrt(x)
        MCFTensor([-3.0000,  1.2599], format=fp32x2)
    """
    return own_functions.cbrt(_real("cbrt", x))


def gamma(x: Tensor) -> Tensor:
    """Return the gamma function, element by element.

    Arguments, result, error and exceptions are those of `sinpi`. *Special values*: infinity of its
    sign at a zero, NaN at negative integers and at -infinity (C23, Annex F).

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([5.0, 0.5]), mcf.fp32x2)
        >>> mcf.functional.gamma(x)
        MCFTensor([24.0000,  1.7725], format=fp32x2)
    """
    return own_functions.gamma(_real("gamma", x))
