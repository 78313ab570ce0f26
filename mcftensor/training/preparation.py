"""`prepare`: a model and an optimizer that exist, converted by one call."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from mcftensor.convert import Overrides
from mcftensor.formats import Format
from mcftensor.training.collage import Mode
from mcftensor.training.format_change import TrainingConversion

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


def prepare(
    model: M,
    optimizer: Opt,
    mode: Mode | None = "plus",
    format: Format | str | None = None,
    *,
    overrides: Overrides | None = None,
) -> tuple[M, Opt]:
    """Convert a model and its optimizer in place, and return both.

    `prepare` does what `as_expansion(model, format, overrides=overrides)` and
    `collage(optimizer, mode)` do together. It also converts the states of an optimizer that has
    already stepped. Model, parameters and optimizer remain the same objects, so parameter groups
    and learning-rate schedulers keep working. Parameters of the optimizer that are not in the model
    remain plain.

    Args:
        model: the module. Call `prepare` before `DistributedDataParallel` or `fully_shard`.
        optimizer: any `torch.optim.Optimizer` over parameters of the model.
        mode: a mode of `collage`. If None, the optimizer keeps its mode, or creates its states in
            the format of each parameter.
        format: the format of the parameters, or its name, as for `as_expansion`.
        overrides: a dict from patterns of names to formats, as for `as_expansion`; None keeps a
            tensor unchanged.

    Returns:
        The model and the optimizer that were given.

    Raises:
        TypeError: not a module and an optimizer; an invalid format; an optimizer that wraps
            another one.
        ValueError: an override that matches nothing; an unknown mode; an optimizer without a
            parameter that becomes an expansion; a number beyond the range of the format.
        RuntimeError: the call is inside a step; a sharded model; a parameter that a graph, a view
            or a weak reference holds.

    A call that raises leaves model and optimizer unchanged.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> model, optimizer = mcf.prepare(model, optimizer)
        >>> model.weight.format, model.bias.format
        (mcf.bf16x2, mcf.bf16x3)

        Norms and biases that remain float32, for a model that runs under `torch.autocast`:

        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> vectors = {name: None for name, p in model.named_parameters() if p.dim() < 2}
        >>> model, optimizer = mcf.prepare(model, optimizer, overrides=vectors)
        >>> model.bias.dtype
        torch.float32
    """
    TrainingConversion("prepare", model, optimizer, format, mode, overrides).carry_out()
    return model, optimizer
