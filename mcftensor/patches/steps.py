"""Steps of torch's optimizers over expansions, which `torch.compile` runs as they are.

The kernels of a step are opaque to the compiler, so that it has nothing to make faster, and a graph
of some thousand calls of them takes it minutes. These steps break graphs by themselves, over plain
parameters too; here the break comes before a parameter has been looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from mcftensor.patches.table import row
from mcftensor.tensor import MCFTensor

around_steps: list[Callable[[Optimizer], AbstractContextManager[Any]]] = []
"""Contexts that each step is taken in, over plain parameters too."""


@torch._disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler
def untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns that compilers do not look into."""
    return function(*args, **kwargs)


def breaks_graphs(optimizer: Optimizer) -> bool:
    """Whether compiled code ends at a step in any case, so that hooks of it may be left out too."""
    return getattr(type(optimizer).step, "_breaks_graphs", False)


def _unless_over_expansions(step: Any) -> Any:
    """A step that compilers see only where it is over plain parameters."""
    if getattr(step, "hooked", False):  # an optimizer of the class has been made
        hooked: Any = Optimizer.profile_hook_step(_unless_over_expansions(step.__wrapped__))
        hooked.hooked = True
        return hooked

    def choose(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in around_steps:
                stack.enter_context(context(self))
            parameters = (p for group in self.param_groups for p in group["params"])
            if any(isinstance(p, MCFTensor) for p in parameters):
                return untraced(step, self, *args, **kwargs)
            return step(self, *args, **kwargs)

    # Nor is the choice compiled, to which every parameter would be an input.
    chosen = torch._disable_dynamo(choose, recursive=False)
    # What is beneath two decorators stays the step without its graph break, to compile as a whole.
    functools.update_wrapper(chosen, getattr(step, "__wrapped__", step))
    chosen._breaks_graphs = True  # type: ignore[attr-defined]
    return chosen


# Adafactor, Muon and optimizers of other packages break no graph: they can be traced as a whole.
_BREAKING = [
    *("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
]
if "step" in vars(torch.optim.AdamW):  # one was made before; else it has the step of Adam
    _BREAKING.append("AdamW")
for _optimizer in _BREAKING:
    row(
        f"torch.optim.{_optimizer}.step",
        why="Compiled, a step over expansions runs as it is: there is nothing to make faster.",
        loss="torch.compile traces such steps over expansions, which may take minutes.",
        change=_unless_over_expansions,
    )
