"""Tensor objects that get the contents of others."""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.patches.table import row

_HOOKS = [
    row(
        f"torch.Tensor.{name}",
        why="Hooks of a parameter are to stay when it becomes an expansion, and `swap_tensors` "
        "takes them away.",
        loss="parameters that are converted lose hooks of this kind; register them afterwards.",
        when="mcf.as_expansion(module)",
        kind=object,
    )
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
]


def exchange(x: Tensor, new: Tensor) -> None:
    """Give the tensor object x the contents of new; its hooks stay."""
    kept = {each.attribute: each.found_in(x) for each in _HOOKS}
    torch.utils.swap_tensors(x, new)
    for name, hooks in kept.items():
        if hooks is not None:
            setattr(x, name, hooks)
