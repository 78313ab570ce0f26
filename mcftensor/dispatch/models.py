"""The functions of models, in which parameters compute as their leading terms.

They would do so operator by operator, each of them seen by dispatch, in the backward pass too.
Here the leading terms are taken once, before PyTorch's own code, which then sees plain tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcftensor.dispatch import structure
from mcftensor.dispatch.table import SHORTCUTS, implements
from mcftensor.operators import is_bare
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten
_alias = aten.alias.default

# What changes none of its arguments. Embeddings may, and see dispatch only once as they are.
FUNCTIONS: set[Callable[..., Any]] = {
    *(F.linear, F.bilinear, F.layer_norm, F.group_norm, F.rms_norm, F.prelu),
    *(F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm, torch.mv),
    *(Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm, Tensor.matmul, Tensor.mm, Tensor.mv),
}


class _Asked(threading.local):
    """Whether the next alias is to be one of the leading term, in this thread."""

    leading = False


_asked = _Asked()


@implements(aten.alias.default)  # autograd, AOTAutograd
def alias(func: Any, x: MCFTensor) -> Tensor:
    """An alias of all terms, or for `compute` of the leading one alone."""
    if not _asked.leading:
        return structure.view(func, x)
    _asked.leading = False
    return x._term0.detach()


def _leading_term(x: MCFTensor) -> Tensor:
    """An alias of the leading term, a view of x to autograd: it has the derivative of one, and
    shares the count of changes, by which one between the two passes is noticed."""
    _asked.leading = True
    try:
        return _alias(x)
    finally:
        _asked.leading = False


def compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of parameters and plain tensors; NotImplemented of other operands,
    and where anything but eager PyTorch looks on."""
    if "out" in kwargs or not is_bare():
        return NotImplemented
    with_grad = torch.is_grad_enabled()
    plain: list[Any] = []
    with torch._C.DisableTorchFunctionSubclass():
        for x in (*args, *kwargs.values()):
            if not isinstance(x, MCFTensor):
                plain.append(x)
            elif x._role != "parameter":
                return NotImplemented
            else:
                plain.append(_leading_term(x) if with_grad else x._term0)
        count = len(args)
        return func(*plain[:count], **dict(zip(kwargs, plain[count:], strict=True)))


SHORTCUTS.update(dict.fromkeys(FUNCTIONS, compute))
