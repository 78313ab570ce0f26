"""What `torch.optim` looks up, or does, before an expansion is asked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mcftensor.patches.table import patch, row
from mcftensor.tensor import MCFTensor

as_loaded: list[Callable[[Tensor, Tensor, Any], Tensor]] = []
"""Functions of a parameter, a state of it that is being loaded, and the state's name; they give the
state that torch is to cast to the dtype of the parameter."""


def _with_expansions(types: list[type]) -> list[type]:
    types.append(MCFTensor)  # in place: others have imported the list
    return types


for _module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
    row(
        f"{_module}._foreach_supported_types",
        why="Optimizers and clipping choose foreach kernels by default, as on CUDA, for types of "
        "parameters that are listed.",
        loss="over expansions they take their for-loop, unless foreach=True or fused=True says "
        "otherwise.",
        change=_with_expansions,
        kind=list,
    )


@patch(
    "torch.optim.Optimizer._process_value_according_to_param_policy",
    why="`load_state_dict` gives each state the dtype of its parameter, which is the base of an "
    "expansion; hooks on loading are those of single optimizers.",
    loss="states of another dtype do not become expansions when an optimizer loads them; they are "
    "rounded to the base.",
    takes=("param", "value", "key"),
)
def _by_way_of_hooks(process: Callable[..., Tensor]) -> Callable[..., Tensor]:
    bind = inspect.signature(process).bind

    @functools.wraps(process)
    def processed(*args: Any, **kwargs: Any) -> Tensor:
        call = bind(*args, **kwargs)
        given = call.arguments
        for function in as_loaded:
            given["value"] = function(given["param"], given["value"], given.get("key"))
        return process(*call.args, **call.kwargs)

    return processed


def _after_the_plan(initialize: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(initialize, "_asks_plan"):
        return initialize

    @functools.wraps(initialize)
    def init_group(self: Optimizer, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        plan = self.__dict__.get("_collage")
        if plan is not None:
            plan.make_states(self, initialize, group, *args, **kwargs)
        return initialize(self, group, *args, **kwargs)

    init_group._asks_plan = True  # type: ignore[attr-defined]
    return init_group


_MAKES_STATES = row(
    "torch.optim.Adam._init_group",
    why="A Collage mode converts states one by one as they are made, so that the first step needs "
    "no more memory than the others. The classes of such optimizers are changed, not the objects: "
    "compilers look there, and copies of an optimizer are without its mode.",
    loss="states are converted at the end of the first step, which needs memory for both kinds.",
    when="mcf.collage(optimizer, mode)",
    change=_after_the_plan,
)


def have_states_made_by_plan(cls: type[Optimizer]) -> None:
    """Let optimizers of this class that have a plan have it make their states."""
    owner = next((base for base in cls.__mro__ if "_init_group" in vars(base)), None)
    if owner is None:  # of torch's own, LBFGS and SparseAdam never had it
        _MAKES_STATES.found_in(torch.optim.Adam)
    else:
        _MAKES_STATES.install(owner)
