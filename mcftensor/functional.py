"""Functions on expansions that have no counterpart in torch, and log-probabilities of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.dispatch.operands import common_format, common_role, expansions
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.logits.log_probabilities import log_softmax, logsumexp, selective_log_softmax
from mcftensor.logits.logit_losses import cross_entropy, kl_div
from mcftensor.tensor.tensor import number_in

__all__ = [
    "cross_entropy",
    "fma",
    "kl_div",
    "log_softmax",
    "logsumexp",
    "selective_log_softmax",
]


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
        if has_dimensions and has_float64(device):
            return torch.scalar_tensor(operand, dtype=torch.float64, device=device)
        return number_in(operand, format, role, device)

    return torch.addcmul(entered(z), entered(x), entered(y))
