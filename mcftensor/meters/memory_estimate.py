"""What a model would take in training, before anything is allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from mcftensor.convert import Overrides, as_expansion
from mcftensor.formats import Format, default_format
from mcftensor.formats.defaults import format_of_weights
from mcftensor.meters.memory_summary import Summary, summary
from mcftensor.tensor.dtensor import format_of
from mcftensor.training.collage import Mode, collage

MakeOptimizer = Callable[[Any], Optimizer]


def estimate(
    model: nn.Module,
    mode: Mode | None = "plus",
    *,
    format: Format | str | None = None,
    overrides: Overrides | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer = AdamW,
    released: bool = False,
) -> Summary:
    """Say what a model would take in training, were it converted and given an optimizer.

    The model itself stays as it is: what is counted is a copy without data. It may be on the meta
    device, so that a model can be asked about that no machine here holds. Activations are not
    counted.

    Args:
        model: a module that is not converted, or one that is, whose formats are then kept.
        mode: as of `collage`; None for what the optimizer makes.
        format: as of `as_expansion`.
        overrides: as of `as_expansion`.
        lr: as of `as_expansion`; weights on the meta device have no size that it would go by.
        optimizer: a class, or a function of the parameters that makes an optimizer.
        released: whether `step_in_backward` is to be used, so that no gradients are held.

    Returns:
        The table of `summary`, all of it predicted.

    Raises:
        TypeError: `model` is no module.
        ValueError: what `as_expansion` and `collage` refuse.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(32_768, 32_768, bias=False)
        >>> mcf.meters.estimate(model)
        Summary(12.00 GiB, 12.00 bytes a parameter)
        >>> mcf.meters.estimate(model, "compact", format=mcf.bf16i8, released=True)
        Summary(5.06 GiB, 5.06 bytes a parameter)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"estimate: got {type(model).__name__}; give a module")
    by_size = {} if format else _by_size(model, lr)
    model = as_expansion(without_data(model), format, overrides={**(overrides or {}), **by_size})
    made = optimizer(model.parameters())
    if mode is not None:
        collage(made, mode)
    return summary(model, made, released=released)


def _by_size(model: nn.Module, lr: float | None) -> dict[str, Format]:
    """The formats of weights that do not go by their shape, which a copy without data does."""
    named = list(model.named_parameters())
    if any(format_of(p) for _, p in named):
        return {}
    formats = {name: format_of_weights(p, lr) for name, p in named if p.requires_grad}
    shapes = {name: p.shape for name, p in named}
    return {name: f for name, f in formats.items() if f != default_format(shapes[name])}


def without_data(model: nn.Module) -> nn.Module:
    """A copy on the meta device; the data of parameters and buffers is not copied on the way."""
    known: dict[int, Any] = {}
    for p in model.parameters():
        known[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, known)
