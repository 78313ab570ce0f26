"""Steps of single parameters, and a test whether they equal a step of the whole optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from mcftensor.patches.objects import HOSTS
from mcftensor.training.shadow import options_of, plain_step, trial_of, trying


def step_alone(optimizer: Optimizer, chosen: Mapping[int, Sequence[Tensor]]) -> None:
    """Take the step of an optimizer for some parameters, by their groups, without its hooks.

    Changes that it makes to the groups, such as a count of steps, are undone; the final step, after
    all gradients are used, makes them once.
    """
    groups = optimizer.param_groups
    hooks = {name: x for name, x in vars(optimizer).items() if name in _HOOKS}
    try:
        optimizer.param_groups = [{**groups[g], "params": list(ps)} for g, ps in chosen.items()]
        for name, x in hooks.items():  # the step of a base class may call hooks, too
            setattr(optimizer, name, type(x)())
        plain_step(optimizer)(optimizer)
    finally:
        optimizer.param_groups = groups
        vars(optimizer).update(hooks)
        for host in list(HOSTS):
            host.after_step(p for ps in chosen.values() for p in ps)


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def why_inseparable(optimizer: Optimizer) -> str | None:
    """Return why steps of single parameters differ from a step of the optimizer.

    None if they are equal or cannot be tried.

    Copies of the optimizer step over small tensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it searches along a line through all parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True keeps its steps in a graph"
    try:
        together = _trial(optimizer, lambda trial: plain_step(trial)(trial))
    except Exception:  # noqa: BLE001 (it may want a closure, sparse gradients, or anything)
        return None
    try:
        apart = _trial(optimizer, _one_by_one)
    except Exception as error:  # noqa: BLE001
        return f"without gradients it raises {type(error).__name__}: {error}"
    if _are_equal(together, apart):
        return None
    return "its update of a parameter depends on the gradients of others, or on their order"


def _trial(
    optimizer: Optimizer, take: Callable[[Optimizer], None]
) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Return parameters, states and groups after some steps of a copy over separate tensors."""
    distinct = {repr(options_of(group)): g for g, group in enumerate(optimizer.param_groups)}
    stand_ins: dict[int, list[Tensor]] = {
        g: [torch.nn.Parameter(_drawn(i)) for i in range(2)] for g in distinct.values()
    }
    trial = trial_of(optimizer, stand_ins)
    parameters = [p for group in stand_ins.values() for p in group]
    with trying(parameters):
        for step in range(3):
            for i, p in enumerate(parameters):
                p.grad = _drawn(10 * step + i + 2)
            take(trial)
    states = [*(trial.state.pop(p, None) for p in parameters), *trial.state.values()]
    noted = [{k: v for k, v in g.items() if k != "params"} for g in trial.param_groups]
    return parameters, states, noted


def _drawn(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), device="cpu")


def _one_by_one(trial: Optimizer) -> None:
    for g, group in reversed(list(enumerate(trial.param_groups))):
        for p in reversed(group["params"]):
            step_alone(trial, {g: [p]})
            p.grad = None
    plain_step(trial)(trial)


def _are_equal(x: Any, y: Any) -> bool:
    """Return whether two trees are equal, to the bit."""
    (leaves, structure), (others, its_structure) = tree_flatten(x), tree_flatten(y)
    if structure != its_structure:
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b or bool(a == b)
        for a, b in zip(leaves, others, strict=True)
    )
