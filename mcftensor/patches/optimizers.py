"""What `torch.optim` does before an expansion is asked, and its steps over expansions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mcftensor.patches.table import by_name, patch, row
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.deferred import deferring

as_loaded: list[Callable[[Tensor, Tensor, Any], Tensor]] = []
"""Functions of a parameter, a state of it that is being loaded, and the state's name; they give the
state that torch is to cast to the dtype of the parameter."""

# States of another shape than their parameter, which otherwise stay in the dtype they were saved
# in: those of Adafactor meet means of gradients.
_AS_GRADIENTS = ("row_var", "col_var")


@patch(
    "torch.optim.Optimizer._process_value_according_to_param_policy",
    why="`load_state_dict` gives each state the dtype of its parameter, which is the base of an "
    "expansion; hooks on loading are those of single optimizers.",
    loss="states of another dtype do not become expansions when an optimizer loads them; they are "
    "rounded to the base, and so are numbers of float32 such as NAdam's mu_product.",
    takes=("param", "value", "key"),
)
@by_name
def _by_way_of_hooks(process: Callable[[], Tensor], given: dict[str, Any]) -> Tensor:
    p, name = given["param"], given.get("key")
    if isinstance(p, MCFTensor) and given["value"].shape != p.shape and name not in _AS_GRADIENTS:
        return given["value"].to(process().device)
    for function in as_loaded:
        given["value"] = function(p, given["value"], name)
    return process()


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


# --------------------------------------------------------------------------------------- steps
#
# The kernels of a step are opaque to the compiler, so that it has nothing to make faster, and a
# graph of some thousand calls of them takes it minutes. These steps break graphs by themselves,
# over plain parameters too; here the break comes before a parameter has been looked at.


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

    waiting_step = deferring()(step)  # within which results may wait

    def choose(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = (p for group in self.param_groups for p in group["params"])
        if any(isinstance(p, MCFTensor) for p in parameters):
            return untraced(waiting_step, self, *args, **kwargs)
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
