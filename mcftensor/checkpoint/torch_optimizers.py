"""Training checkpoints with state dicts of a model and of an optimizer of PyTorch.

The states of any checkpoint can be read as a state dict that an optimizer loads.

Layouts, each with two results of `state_dict()`:

- one file of torch.save, `{"model": ..., "optimizer": ...}` under any names, also as Lightning
  writes them, `{"state_dict": ..., "optimizer_states": [...]}`;
- a folder with weights and `optimizer.pt` (transformers' Trainer) or `optimizer.bin` (Accelerate);
- a folder with weights and `optimizer.safetensors`, which `convert_checkpoint` writes: states as
  `state.PARAMETER.NAME`, the names of `torch.distributed.checkpoint.state_dict`, where a parameter
  may be its number in the optimizer; everything else as JSON among the metadata.

`bridge/master_weights.py` reads optimizers with states that complete their weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mcftensor.checkpoint.checkpoint_error import CheckpointError, some
from mcftensor.checkpoint.entries import (
    LIKE_PARAMETERS,
    Contents,
    Entry,
    Group,
    Request,
    entries_in,
    entry_of,
)
from mcftensor.checkpoint.open_checkpoint import is_of_optimizer, opened
from mcftensor.checkpoint.safetensors_files import sealed, unsealed
from mcftensor.wings import wing_or_none

BESIDE = ("optimizer.safetensors", "optimizer.pt", "optimizer.bin")
"""The possible names of the file of optimizer states in a folder of weights."""

_METADATA = "optimizer"
_PREFIX = "state."


def add(contents: Contents, state_dict: Any, source: object, request: Request) -> None:
    """Add the result of an optimizer's `state_dict()`."""
    if not is_of_optimizer(state_dict):
        raise CheckpointError(f"{source} is no state dict of an optimizer")
    contents.groups = [dict(group) for group in state_dict["param_groups"]]
    for i, state in state_dict["state"].items():
        contents.states[i] = {
            key: entry_of(f"{key} of parameter {i}", x) if isinstance(x, Tensor) else x
            for key, x in state.items()
        }
    if bridge := wing_or_none("bridge"):
        bridge.complete(contents, request.parameters)
    if not request.optimizer:
        contents.states, contents.groups = {}, None


# ---------------------------------------------------------------------- optimizer.safetensors


def state_name(parameter: Any, key: str) -> str:
    """Return the name of a state in `optimizer.safetensors`."""
    return f"{_PREFIX}{parameter}.{key}"


def metadata_of(contents: Contents) -> dict[str, str]:
    """Return everything of an optimizer but tensors as JSON; raise CheckpointError if JSON cannot
    store it.
    """
    values = {
        str(i): {key: x for key, x in state.items() if not hasattr(x, "read")}
        for i, state in contents.states.items()
    }
    groups = [
        {key: x.item() if isinstance(x, Tensor) else x for key, x in group.items()}
        for group in contents.groups or []
    ]
    content = {"values": values, "param_groups": groups if contents.groups is not None else None}
    try:
        return {_METADATA: json.dumps(sealed(content))}
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer holds more than tensors, numbers and texts ({error}); "
            "optimizer=False leaves its states out"
        ) from error


def add_own(contents: Contents, path: Path, request: Request) -> None:
    """Add the states of `optimizer.safetensors`."""
    if not request.optimizer:
        return
    stored = opened(path, request.verify)
    told = json.loads(stored.metadata.get(_METADATA, "null"))
    if request.verify:
        told = unsealed(path, told)
    contents.groups = groups = told["param_groups"]
    numbers = {str(i): i for group in groups or [] for i in group["params"]}
    for i, values in told["values"].items():
        contents.states[numbers.get(i, i)] = dict(values)
    for name, entry in entries_in(stored, request).items():
        i, _, key = name.removeprefix(_PREFIX).rpartition(".")
        if numbers.get(i, i) not in contents.states:
            raise CheckpointError(f"{path} holds {name}, which is the state of no parameter")
        contents.states[numbers.get(i, i)][key] = entry


# ---------------------------------------------------------------------- into an optimizer


def state_dict_for(
    optimizer: Optimizer, model: nn.Module, contents: Contents, strict: bool, path: Path
) -> dict[str, Any]:
    """Return a state dict for `optimizer.load_state_dict`, read and checked as a whole."""
    if not contents.states and contents.groups is None:
        raise CheckpointError(f"load_file: {path} holds no states of an optimizer")
    own = optimizer.state_dict()
    places = _places(optimizer, model, contents, path)
    trained = [i for i, p in places.values() if p.requires_grad]
    given = {places[i][0]: state for i, state in contents.states.items() if i in places}
    unknown = [str(i) for i in contents.states if i not in places]
    missing = [i for i in trained if i not in given] if given else []
    if strict and (unknown or missing):
        names = {i: name for name, (i, _) in places.items()}
        raise CheckpointError(
            f"load_file: the states of {some(unknown)} in {path} are of no parameter of the "
            "optimizer. strict=False leaves them out"
            if unknown
            else f"load_file: {path} has no states of {some(str(names[i]) for i in missing)}. "
            "strict=False has the optimizer make them anew"
        )
    parameters = {i: (str(name), p) for name, (i, p) in places.items()}
    state = {i: _read(*parameters[i], x, path) for i, x in given.items()}
    groups = own["param_groups"]
    theirs = {places[i][0]: group for i, group in contents.group_of().items() if i in places}
    for group in groups:
        of_it = [theirs[i] for i in group["params"] if i in theirs]
        if any(_restored(group, x) != _restored(group, of_it[0]) for x in of_it):
            raise CheckpointError(
                f"load_file: parameters of one group of the optimizer are in several in {path}, "
                "with other hyperparameters; make it as the one that was saved"
            )
        group.update(_restored(group, of_it[0]) if of_it else {})
    return {"state": state, "param_groups": groups}


def load_states(optimizer: Optimizer, state_dict: dict[str, Any], path: Path) -> None:
    """Have an optimizer load them, or leave it as it was."""
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        optimizer.load_state_dict(state_dict)
    except Exception as error:
        # Some look at their states once they have them.
        vars(optimizer).update(before)
        raise CheckpointError(
            f"load_file: {type(optimizer).__name__} does not take the states of {path} "
            f"({type(error).__name__}: {error}); they are those of another optimizer"
        ) from error


def _places(
    optimizer: Optimizer, model: nn.Module, contents: Contents, path: Path
) -> dict[Any, tuple[int, Tensor]]:
    """Return the number of each parameter in the optimizer and the parameter, by its saved name."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(p): i for i, p in enumerate(own)}
    theirs = contents.parameters()
    if theirs and not all(isinstance(i, str) for i in theirs):
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        if lengths != [len(group["params"]) for group in contents.groups or []]:
            raise CheckpointError(
                f"load_file: the groups of the optimizer have {lengths} parameters, and those in "
                f"{path} others; make it as the one that was saved"
            )
        return {i: (place, p) for place, (i, p) in enumerate(zip(theirs, own, strict=True))}
    named = model.named_parameters(remove_duplicate=False)
    return {name: (numbers[id(p)], p) for name, p in named if id(p) in numbers}


def _read(name: str, p: Tensor, state: dict[str, Any], path: Path) -> dict[str, Any]:
    for key, x in state.items():
        if isinstance(x, Entry) and key in LIKE_PARAMETERS and x.shape != p.shape:
            raise CheckpointError(
                f"load_file: {key} of parameter {name} is of shape {tuple(x.shape)} in {path}, and "
                f"the parameter of {tuple(p.shape)}"
            )
    return {key: x.read() if isinstance(x, Entry) else x for key, x in state.items()}


def _restored(own: Group, theirs: Group) -> Group:
    """Return the hyperparameters that a group takes from the checkpoint."""
    known = {key: x for key, x in theirs.items() if key != "params" and key in own}
    known |= {key: x for key, x in theirs.items() if key == "initial_lr"}  # by schedulers
    return {key: _like(own.get(key), x) for key, x in known.items()}


def _like(own: Any, x: Any) -> Any:
    if isinstance(own, Tensor):
        return torch.as_tensor(x, dtype=own.dtype, device=own.device)
    return tuple(x) if isinstance(own, tuple) and isinstance(x, list) else x
