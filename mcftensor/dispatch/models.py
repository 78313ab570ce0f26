"""The functions of models without gradients: parameters compute as their leading terms.

They would do so operator by operator, each of them seen by dispatch. Where nobody looks on, neither
autograd nor a compiler nor a tracer, PyTorch's own code is given the leading terms at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from mcftensor.dispatch.operands import with_leading
from mcftensor.dispatch.registry import SHORTCUTS
from mcftensor.kernels.opaque import is_bare

# What changes none of its arguments. Embeddings may, and see dispatch only once as they are.
FUNCTIONS: set[Callable[..., Any]] = {
    # nn.Linear, nn.LayerNorm, and the other modules of these names
    *(F.linear, F.bilinear, F.layer_norm, F.group_norm, F.rms_norm, F.prelu),
    *(F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    # x @ weight, torch.matmul, x.mm
    *(torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm, torch.mv),
    *(Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm, Tensor.matmul, Tensor.mm, Tensor.mv),
}


def at_once(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of parameters and plain tensors; NotImplemented of other operands,
    and where anything but eager PyTorch looks on."""
    if "out" in kwargs or torch.is_grad_enabled() or not is_bare() or _is_watched():
        return NotImplemented
    plain = with_leading((*args, *kwargs.values()))
    if plain is None:
        return NotImplemented
    count = len(args)
    return func(*plain[:count], **dict(zip(kwargs, plain[count:], strict=True)))


def _is_watched() -> bool:
    """Whether tangents are carried on, a graph is traced, or casts of parameters are kept."""
    return (
        forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._is_any_autocast_enabled()
    )


SHORTCUTS.update(dict.fromkeys(FUNCTIONS, at_once))
