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

from mcftensor.tensor.dtensor import format_of
from mcftensor.training.conversion_count import latest_conversion
from mcftensor.training.saturation import callers_level
from mcftensor.training.state_names import SECOND_MOMENTS

_seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that have stepped, and the latest conversion of a module by then."""


class NarrowStateWarning(UserWarning):
    """An optimizer keeps states in 16 bits beside parameters that are expansions.

    Raised after its first step, and after the first one since a module was converted. It is raised
    of plain states of another shape than their parameter, as preconditioners are: what they sum or
    average needs more. States that a step makes of the dtype of its parameters are wider; these
    were made before it, in 16 bits by name, or of sharded parameters. It is also raised of plain
    second moments without a mode of `collage`: they are left from a run in plain 16 bits, where
    they never decay.
    """


def _warn_after_first_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """What has the shape of its parameter is an expansion, or plain because a mode says so, or from
    before its parameter was converted."""
    if torch.compiler.is_compiling() or not optimizer.state:
        return
    latest = latest_conversion()
    if _seen.get(optimizer) == latest:
        return
    _seen[optimizer] = latest
    has_mode = "_collage" in optimizer.__dict__
    found = {
        (name, x.shape == p.shape): x.dtype
        for p, state in optimizer.state.items()
        if isinstance(p, Tensor) and format_of(p) and isinstance(state, dict)
        for name, value in state.items()
        for x in tree_leaves(value)
        if type(x) is Tensor and x.dtype in (torch.bfloat16, torch.float16)
        if x.shape != p.shape or (name in SECOND_MOMENTS and not has_mode)
    }
    if found:
        told = ", ".join(
            f"{name} ({str(dtype)[6:]})" for (name, _), dtype in sorted(found.items(), key=str)
        )
        repairs = {
            False: "If it has an option for their dtype, give float32",
            True: "They are from before mcf.as_expansion(model): call mcf.collage(optimizer, "
            "'plus'), which converts states that exist",
        }
        kinds = sorted({is_like for _, is_like in found})
        warnings.warn(
            f"{type(optimizer).__name__} keeps states in 16 bits beside parameters that are "
            f"expansions: {told}. What they sum or average loses small changes. "
            + ". ".join(repairs[kind] for kind in kinds),
            NarrowStateWarning,
            stacklevel=callers_level(),
        )


register_optimizer_step_post_hook(_warn_after_first_step)
