"""Explicit rescaling of tensors and gradients by their size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.scaled import is_scaled
from mcftensor.scaling.scaled_numbers import by_size


class _Rescale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.backward_too = backward
        return _balanced(x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (_balanced(gradient) if ctx.backward_too else gradient), None, None


def _balanced(x: Tensor) -> Tensor:
    return by_size(x, x.format, "rescale") if is_scaled(x) else x.clone()


def rescale(x: Tensor) -> Tensor:
    """Return the same numbers with an exponent chosen by their size.

    The data then has a root mean square in [1, 2), or lower if the largest number would not fit.
    Gradients pass unchanged. Plain tensors are copied.

    *Error*: none, except for numbers that were or become subnormal in the data.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 1.5]), mcf.scaling.scaled(torch.float16))
        >>> y = x * 2.0**-12 * x
        >>> (x * 0.001).components[0]
        tensor([1.0244, 1.5361], dtype=torch.float16)
        >>> mcf.scaling.rescale(y)
        MCFTensor([0.0002, 0.0005], format=scaled(float16), exponent=-12)
    """
    return _Rescale.apply(x, True, False)


def rescale_grad(x: Tensor) -> Tensor:
    """Return x; its gradient is rescaled in backward as by `rescale`.

    Layer norms, attention and losses rescale gradients by themselves. `rescale_grad` is for long
    paths without any of them.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 1.5]), mcf.scaling.scaled(torch.float16))
        >>> x.requires_grad_() is x
        True
        >>> (mcf.scaling.rescale_grad(x) * torch.tensor([1e-9, 2e-9])).sum().backward()
        >>> x.grad.components[0]
        tensor([1.0742, 2.1484], dtype=torch.float16)
    """
    return _Rescale.apply(x, False, True)
