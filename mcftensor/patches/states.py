"""States that an optimizer saves and loads.

States of a run over other parameters are converted to the formats of this run. If the parameters
have the same format, their states load unchanged, even in another dtype, which some optimizers
create within a step. Expansions among the states of a parameter tell the two cases apart. If there
are none, and states would change, an entry of the state dict does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mcftensor.formats import Format
from mcftensor.patches.optimizers import has_expansions, parameters_of
from mcftensor.patches.table import by_name, calls, patch
from mcftensor.tensor.components import format_of

FORMATS = "mcftensor_formats"
"""The key of a state dict for the formats of parameters, by their numbers."""


class _Thread(threading.local):
    resumed: frozenset[int] = frozenset()  # identities of parameters


_thread = _Thread()


@patch(
    "torch.optim.Optimizer._process_value_according_to_param_policy",
    why="`load_state_dict` casts each state to the dtype of its parameter, for an expansion the "
    "dtype of the leading term. PyTorch's hooks on loading belong to single optimizers.",
    loss="states of another dtype do not become expansions when an optimizer loads them; they are "
    "rounded to the base type, and float32 scalars such as NAdam's mu_product are rounded too.",
    takes=("param", "value", "key"),
)
@by_name
def _by_way_of_hooks(process: Callable[[], Tensor], given: dict[str, Any]) -> Tensor:
    p, x = given["param"], given["value"]
    own, its = format_of(p), format_of(x)
    in_blocks = its is not None and bool(its.shared)  # which is only a state's
    if own and (x.shape != p.shape or id(p) in _thread.resumed or in_blocks):
        return x.to(process().device)
    given["value"] = made = calls.as_loaded(p, x, given.get("key"))
    if own and format_of(made):  # the format of a state may have another dtype than its parameter
        return made.to(p.device)
    return process()


@patch(
    "torch.optim.Optimizer.load_state_dict",
    why="Whether a loaded state keeps its dtype depends on the other states of its parameter, and "
    "torch loads them one by one.",
    loss="states that an optimizer creates in another dtype than its parameters, as Kron of "
    "pytorch_optimizer does, become expansions when it loads them.",
    takes=("self", "state_dict"),
)
@by_name
def _looking_at_all(load: Callable[[], None], given: dict[str, Any]) -> None:
    if not has_expansions(given["self"]):
        return load()

    def look(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        said = state_dict.get(FORMATS, {})
        _thread.resumed = frozenset(
            id(p)
            for i, p, format, states in _over_expansions(optimizer, state_dict)
            if said.get(i) == format.name or _tell(states, format)
        )

    outer = _thread.resumed
    try:
        with given["self"].register_load_state_dict_pre_hook(look):
            return load()
    finally:
        _thread.resumed = outer


@patch(
    "torch.optim.Optimizer.state_dict",
    why="Some states do not show that their parameters were expansions, and loading would change "
    "them. The state dict records it.",
    loss="if no state of a parameter is an expansion, states created in another dtype become "
    "expansions when the optimizer loads them.",
    takes=("self",),
)
@by_name
def _saying_formats(save: Callable[[], Any], given: dict[str, Any]) -> Any:
    if not has_expansions(given["self"]):
        return save()
    calls.when_saved(given["self"])

    def say(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        formats = {
            i: format.name
            for i, p, format, states in _over_expansions(optimizer, state_dict)
            if not _tell(states, format) and _would_change(p, states)
        }
        if formats:
            state_dict[FORMATS] = formats

    with given["self"].register_state_dict_post_hook(say, prepend=True):
        return save()


def _over_expansions(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, Tensor, Format, dict[Any, Any]]]:
    """Return the expansion parameters, with their numbers, formats and states in a state dict."""
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, p in zip(numbers, parameters_of(optimizer), strict=False):
        format, states = format_of(p), state_dict["state"].get(i)
        if format is not None and isinstance(states, dict):
            yield i, p, format, states


def _tell(states: dict[Any, Any], format: Format) -> bool:
    """Return whether the states belong to a parameter in a format."""
    return any(format_of(x) in (format, format.of_states) for x in tree_leaves(states))


def _would_change(p: Tensor, states: dict[Any, Any]) -> bool:
    """Return whether loading them as states of another run would change some."""
    return any(
        isinstance(x, Tensor) and x.shape == p.shape and x.dtype != p.dtype
        for name, state in states.items()
        if name != "step"  # which torch leaves as it is
        for x in tree_leaves(state)
    )
