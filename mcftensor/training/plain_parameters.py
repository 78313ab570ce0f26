"""Parameters that are trained in plain 16 bits in a model of expansions."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mcftensor.arithmetic.base_types import NARROW
from mcftensor.checkpoint.loaded_expansions import rounded
from mcftensor.convert import converted_modules, left_expansions, left_plain
from mcftensor.patches.optimizers import has_expansions, parameters_of
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.dtensor import format_of
from mcftensor.training.conversion_count import latest_conversion
from mcftensor.training.saturation import callers_level

_over_expansions: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped expansions."""
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers, and the latest conversion of a module when they were looked at."""
_told: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()


class PlainParameterWarning(UserWarning):
    """An optimizer steps parameters that are plain where expansions were, or are around them.

    They are of 16 bits in a model of expansions: they were frozen when `as_expansion` was called
    with it, or were added since. Or they were rounded when `load_state_dict` gave them expansions,
    and `as_expansion` was not called afterwards; or `as_plain` made them plain in the middle of a
    training. Raised once for each parameter, before the first
    step on it, and by `collage`.
    """


def warn_of_plain_parameters(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Name them; those that an override leaves plain are meant to be so."""
    if torch.compiler.is_compiling():
        return
    _warn_of_rounded_parameters(optimizer)
    if _checked.get(optimizer) != latest_conversion():
        _warn_of_left_expansions(optimizer)
    plain = [p for p in parameters_of(optimizer) if not isinstance(p, MCFTensor) and _is_narrow(p)]
    if not plain:
        return
    told = _told.setdefault(optimizer, set())
    new = [p for p in plain if id(p) not in told]
    if not new:
        return
    told.update(map(id, new))
    names = {id(p): name for m in converted_modules() for name, p in m.named_parameters()}
    meant = {id(p) for m in converted_modules() for p in left_plain(m)}
    new = [p for p in new if id(p) in names and id(p) not in meant]
    if new:
        shown = [names[id(p)] for p in new]
        others = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        warnings.warn(
            f"{type(optimizer).__name__}: parameters of a model of expansions are plain "
            f"{new[0].dtype}, where small updates are lost: {', '.join(shown[:3])}{others}. They "
            "were frozen when the model was converted, or are new. Call mcf.as_expansion(model) "
            "again, which converts just these, or leave them as they are by overrides",
            PlainParameterWarning,
            stacklevel=callers_level(),
        )


def _warn_of_rounded_parameters(optimizer: Optimizer) -> None:
    found = rounded(parameters_of(optimizer))
    if found:
        first, p, format = found[0]
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(
            f"{type(optimizer).__name__}: {first}{others} were loaded from expansions in "
            f"{format.name} and are plain {p.dtype}, so they were rounded, and the run that was "
            "saved goes on with other bits. To go on with all terms, call mcf.as_expansion(model) "
            "after load_state_dict, or before it; if plain weights are meant, mcf.as_plain(model)",
            PlainParameterWarning,
            stacklevel=callers_level(),
        )


def _warn_of_left_expansions(optimizer: Optimizer) -> None:
    """Of parameters that became plain since the optimizer was made or stepped."""
    had_expansions = optimizer in _over_expansions or "_collage" in optimizer.__dict__
    names = left_expansions() if had_expansions else {}
    plain = [(names[id(p)], p) for p in parameters_of(optimizer) if id(p) in names]
    plain = [(name, p) for name, p in plain if format_of(p) is None]
    if has_expansions(optimizer):
        _over_expansions.add(optimizer)
    _checked[optimizer] = latest_conversion()
    if plain:
        others = f" and {len(plain) - 1} more" if len(plain) > 1 else ""
        warnings.warn(
            f"{type(optimizer).__name__} has stepped expansions, and {plain[0][0]}{others} are "
            f"plain {plain[0][1].dtype} since mcf.as_plain(model), which converts in place. To "
            "export a model in training, convert a copy: mcf.as_plain(copy.deepcopy(model)). To go "
            "on with plain weights, make the optimizer anew",
            PlainParameterWarning,
            stacklevel=callers_level(),
        )


def _is_narrow(p: Tensor) -> bool:
    return p.dtype in NARROW and p.requires_grad and format_of(p) is None


register_optimizer_step_pre_hook(warn_of_plain_parameters)
