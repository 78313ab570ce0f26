"""State dicts that `torch.distributed.checkpoint` saved: torchtitan's, and those of other scripts.

Layout: a folder of `torch.distributed.checkpoint`, or one of them called `step-N`, of which the
last is read. torchtitan has weights at the top, or under `model`, and under `optimizer` what
`get_optimizer_state_dict` gives with `flatten_optimizer_state_dict`: `state.NAME.STATE` and
`param_groups.NAME.OPTION`. `get_state_dict` nests the same, `state` by name and `param_groups` as a
list, under keys that a script chooses. What else there is, as of schedulers and loaders of data, is
left where it is. Read: torchtitan 0.3.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mcftensor.checkpoint.bridge.distcp import METADATA, Folder
from mcftensor.checkpoint.bridge.entries import Contents, Group, Request
from mcftensor.checkpoint.checkpoint_error import CheckpointError, some

_MODELS = ("model", "state_dict", "model_state_dict", "model_state")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")

Keys = tuple[Any, ...]


def last_step(path: Path) -> Path | None:
    """Of a folder of `step-N`, the last that was finished."""
    steps = {
        int(match[1]): file.parent
        for file in path.glob(f"step-*/{METADATA}")
        if (match := re.fullmatch(r"step-(\d+)", file.parent.name))
    }
    return steps[max(steps)] if steps else None


def read(path: Path, folder: Folder, request: Request) -> Contents:
    """Weights, and the states of their optimizer by name."""
    paths = _below_one_key(folder.paths)
    nested = any(keys[0] in _MODELS and len(keys) > 1 for keys in paths.values())
    weights = {
        ".".join(map(str, keys[nested:])): folder.tensors[name]
        for name, keys in paths.items()
        if name in folder.tensors and (keys[0] in _MODELS if nested else len(keys) == 1)
    }
    if not weights:
        raise CheckpointError(
            f"{path} holds no weights, neither at the top nor under {' or '.join(_MODELS)}"
        )
    contents = Contents("torch.distributed.checkpoint", weights)
    if not request.optimizer:
        return contents
    options: dict[Any, Group] = {}
    for name, keys in paths.items():
        if keys[0] not in _OPTIMIZERS or len(keys) == 1:
            continue
        kind, _, rest = ".".join(map(str, keys[1:])).partition(".")
        owner, _, key = rest.rpartition(".")
        if kind == "state":
            x = folder.tensors.get(name)
            contents.states.setdefault(owner, {})[key] = x or folder.objects[name]()
        elif kind == "param_groups":
            read = folder.tensors[name].read if name in folder.tensors else folder.objects[name]
            options.setdefault(owner, {})[key] = read()
    unknown = [name for name in contents.states if name not in weights]
    if unknown:
        raise CheckpointError(f"{path} has states of {some(unknown)}, and no such weights")
    contents.groups = _groups(options)
    return contents


def _below_one_key(paths: dict[str, Keys]) -> dict[str, Keys]:
    """Without the key that all is under, as a script has it that saves one object."""
    first = {keys[0] for keys in paths.values()}
    if len(first) != 1 or first & {*_MODELS, *_OPTIMIZERS}:
        return paths
    if any(len(keys) == 1 for keys in paths.values()):
        return paths
    return {name: keys[1:] for name, keys in paths.items()}


def _groups(options: dict[Any, Group]) -> list[Group] | None:
    """Groups of parameters, of options of each group or of each parameter."""
    groups: list[Group] = []
    for name, its_options in options.items():
        if "params" in its_options:
            groups.append(its_options)
            continue
        for group in groups:
            if {**its_options, "params": group["params"]} == group:
                group["params"].append(name)
                break
        else:
            groups.append({**its_options, "params": [name]})
    return groups or None
