"""Optimizers whose steps reach nothing: their parameters are no longer those of the model."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mcftensor.convert import converted_modules
from mcftensor.patches.optimizers import parameters_of
from mcftensor.tensor import MCFTensor
from mcftensor.training.saturation import callers_level
from mcftensor.training.step_in_backward import StepInBackward

_WINDOW = 8
"""Parameters of each group that a step looks at, in turn; the first step looks at all."""

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class DetachedParameterWarning(UserWarning):
    """An optimizer steps parameters that the model no longer has, or none that has a gradient.

    Programs that make parameters anew, as loaders do that cast them, leave the old ones to the
    optimizer. Raised once for each optimizer that has expansions, before a step.
    """


def _warn_of_detached(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _told:
        return
    number = _steps.get(optimizer)
    _steps[optimizer] = 0 if number is None else number + 1
    looked_at = list(_looked_at(optimizer, number))
    gone = [p for p in looked_at if _is_gone(p)]
    if any(p.grad is not None for p in looked_at):  # others have theirs by now
        gone += [p for p in looked_at if _is_left(p)]
    if gone:
        found = f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} no longer in the module"
    elif _has_gradients(optimizer, args, kwargs) or not _of_modules(optimizer):
        return
    else:
        found = f"none of its parameters has a gradient: {_names(_of_modules(optimizer))}"
    _told.add(optimizer)
    warnings.warn(
        f"{type(optimizer).__name__}: {found}. The step does not train a model whose parameters "
        "were made anew since, as by setattr(module, name, nn.Parameter(...)). Write to parameters "
        "in place, or convert with mcf.as_expansion(model) and make the optimizer again",
        DetachedParameterWarning,
        stacklevel=callers_level(),
    )


def _looked_at(optimizer: Optimizer, number: int | None) -> Iterator[Tensor]:
    if number is None:
        return parameters_of(optimizer)
    lists = [group["params"] for group in optimizer.param_groups]
    windows = (
        params[start : start + _WINDOW]
        for params in lists
        if params
        for start in [number % -(-len(params) // _WINDOW) * _WINDOW]
    )
    return itertools.chain.from_iterable(windows)


def _of_modules(optimizer: Optimizer) -> list[Tensor]:
    """Its parameters that have a name: those of modules that were converted."""
    return [p for p in parameters_of(optimizer) if _holder(p) is not None]


def _holder(p: Any) -> Any:
    """The module that had a parameter when it was converted, if it lives, and the name there."""
    held = _held(p)
    owner = None if held is None else held[0]()
    return None if held is None or owner is None else (owner, held[1])


def _held(p: Any) -> Any:
    """The reference to that module, and the name; None for a copy of what was converted."""
    held = p._holder if isinstance(p, MCFTensor) else None
    return None if held is None or held[2] != id(p) else held


def _is_left(p: Tensor) -> bool:
    """Whether the module that had it lives no longer, and no gradient comes from elsewhere."""
    held = _held(p)
    return p.grad is None and held is not None and held[0]() is None


def _is_gone(p: Any) -> bool:
    """Whether the module that had it when it was converted, which lives, has it no longer."""
    held = _holder(p)
    if held is None or held[0]._parameters.get(held[1]) is p:
        return False
    for module in [held[0], *converted_modules()]:  # it may have moved, as parametrizations do it
        for part in module.modules():
            for name, own in part._parameters.items():
                if own is p:
                    vars(p)["_holder"] = weakref.ref(part), name, id(p)
                    return False
    return True


def _has_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether a gradient is there, or will be by a closure, or was and has stepped."""
    if any(p.grad is not None for p in parameters_of(optimizer)):
        return True
    closures = [x for x in (*args[1:], *kwargs.values()) if callable(x)]
    hooks = optimizer._optimizer_step_pre_hooks.values()
    released = any(isinstance(getattr(hook, "__self__", None), StepInBackward) for hook in hooks)
    return bool(closures) or released


def _names(parameters: Iterable[Tensor]) -> str:
    """The first three, as their modules call them."""
    paths = {
        id(part): f"{path}." if path else ""
        for module in converted_modules()
        for path, part in module.named_modules()
    }
    held = [own for own in map(_held, parameters) if own is not None]
    shown = [paths.get(id(reference()), "") + name for reference, name, _ in held]
    others = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + others


register_optimizer_step_pre_hook(_warn_of_detached)
