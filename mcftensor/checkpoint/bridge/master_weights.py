"""Weights that a state of an optimizer completes: which state, and who puts the two together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcftensor.checkpoint.bridge import flashoptim, optimi, transformer_engine
from mcftensor.checkpoint.bridge.entries import Contents, Entry, Group
from mcftensor.checkpoint.checkpoint_error import CheckpointError

MASTERS: dict[str, Callable[[Entry, dict[str, Any], Group], tuple[Entry, dict[str, Any]]]] = {
    transformer_engine.KEY: transformer_engine.master,
    flashoptim.KEY: flashoptim.master,
    "exp_avg::quantized": flashoptim.master,  # which may be without a correction
    "momentum_buffer::quantized": flashoptim.master,
    optimi.KEY: optimi.master,
}
"""By the state that tells the layout."""


def complete(contents: Contents, parameters: list[str] | None) -> None:
    """Put whole weights in the place of narrow ones, and take what completed them from the states.

    States then go by the names of their parameters.
    """
    completing = {
        i: MASTERS[key] for i, state in contents.states.items() for key in MASTERS if key in state
    }
    if not completing:
        return
    names = _names(contents, parameters)
    groups = contents.group_of()
    states = {}
    for i, state in contents.states.items():
        if i not in names:
            raise CheckpointError(f"the states of parameter {i} are in no group of the optimizer")
        name = names[i]
        if name not in contents.weights:
            raise CheckpointError(f"{name} has states and no weight; its name is another there")
        states[name] = state
        if i in completing:
            weight = contents.weights[name]
            contents.weights[name], states[name] = completing[i](weight, state, groups[i])
    contents.states = states
    for group in contents.groups or []:
        group["params"] = [names[i] for i in group["params"]]


def _names(contents: Contents, parameters: list[str] | None) -> dict[Any, str]:
    """The names of the parameters that an optimizer numbers."""
    numbers = contents.parameters()
    if all(isinstance(i, str) for i in numbers):
        return {i: i for i in numbers}
    groups = contents.groups or []
    if parameters is None and all("param_names" in group for group in groups):
        parameters = [name for group in groups for name in group["param_names"]]
    if parameters is None and len(groups) == 1:
        parameters = [e.name for e in contents.weights.values() if e.format.dtype.is_floating_point]
    if parameters is None or len(parameters) != len(numbers):
        raise CheckpointError(
            f"the optimizer numbers its {len(numbers)} parameters, in {len(groups)} groups, and "
            f"which of the {len(contents.weights)} weights these are is not said; give parameters, "
            "their names in the order in which the optimizer got them, as of "
            "model.named_parameters()"
        )
    return dict(zip(numbers, parameters, strict=True))
