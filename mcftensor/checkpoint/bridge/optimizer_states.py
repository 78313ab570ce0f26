"""States of a checkpoint as a state dict that an optimizer loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mcftensor.checkpoint.bridge.entries import LIKE_PARAMETERS, Contents, Entry
from mcftensor.checkpoint.bridge.torch_optimizers import restored
from mcftensor.checkpoint.checkpoint_error import CheckpointError, some


def state_dict_for(
    optimizer: Optimizer, model: nn.Module, contents: Contents, strict: bool, path: Path
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, all of it read and checked."""
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
        if any(restored(group, x) != restored(group, of_it[0]) for x in of_it):
            raise CheckpointError(
                f"load_file: parameters of one group of the optimizer are in several in {path}, "
                "with other hyperparameters; make it as the one that was saved"
            )
        group.update(restored(group, of_it[0]) if of_it else {})
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
    """For what the checkpoint calls a parameter, its number in the optimizer, and itself."""
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
