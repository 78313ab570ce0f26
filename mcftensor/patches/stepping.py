"""Steps of torch's optimizers over expansions: results in them may wait, and `torch.compile` runs
them as they are.

The kernels of a step are opaque to the compiler, so that it has nothing to make faster, and a graph
of some thousand calls of them takes it minutes. These steps break graphs by themselves, over plain
parameters too; here the break comes before a parameter has been looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from mcftensor.patches.table import row
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.deferred import deferring


@torch._disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler
def untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns that compilers do not look into."""
    return function(*args, **kwargs)


def _deferring(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A step within which results may wait."""
    with deferring():
        return step(*args, **kwargs)


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
        parameters = (p for group in self.param_groups for p in group["params"])
        if any(isinstance(p, MCFTensor) for p in parameters):
            return untraced(_deferring, step, self, *args, **kwargs)
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
        why="Within it results wait; compiled, it runs as it is: there is nothing to make faster.",
        loss="It is slower, and torch.compile traces it over expansions, which may take minutes.",
        change=_unless_over_expansions,
    )
