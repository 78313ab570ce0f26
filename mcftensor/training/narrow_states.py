"""States that an optimizer keeps in 16 bits beside parameters that are expansions."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from mcftensor.tensor.sharded import format_of

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class NarrowStateWarning(UserWarning):
    """An optimizer keeps states in 16 bits beside parameters that are expansions.

    Raised after its first step, of plain states of another shape than their parameter, as
    preconditioners are: what they sum or average needs more. States that a step makes of the dtype
    of its parameters are wider; these were made before it, in 16 bits by name, or of sharded
    parameters.
    """


def _warn_after_first_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """What has the shape of its parameter is an expansion, or plain because a mode says so."""
    if torch.compiler.is_compiling() or optimizer in _seen or not optimizer.state:
        return
    _seen.add(optimizer)
    found = {
        name: x.dtype
        for p, state in optimizer.state.items()
        if isinstance(p, Tensor) and format_of(p) and isinstance(state, dict)
        for name, value in state.items()
        for x in tree_leaves(value)
        if type(x) is Tensor and x.dtype in (torch.bfloat16, torch.float16) and x.shape != p.shape
    }
    if found:
        names = ", ".join(f"{name} ({str(dtype)[6:]})" for name, dtype in sorted(found.items()))
        warnings.warn(
            f"{type(optimizer).__name__} keeps states in 16 bits beside parameters that are "
            f"expansions: {names}. What they sum or average loses small changes. If it has an "
            "option for their dtype, give float32",
            NarrowStateWarning,
            stacklevel=2,
        )


register_optimizer_step_post_hook(_warn_after_first_step)
