"""Training checkpoints: the state dict of a model and that of an optimizer of PyTorch's.

Layouts, of which `state_dict()` makes the halves:

- one file of torch.save, `{"model": ..., "optimizer": ...}` under any names, also as Lightning
  writes them, `{"state_dict": ..., "optimizer_states": [...]}`;
- a folder with weights and `optimizer.pt` (transformers' Trainer) or `optimizer.bin` (Accelerate);
- a folder with weights and `optimizer.safetensors`, which `convert_checkpoint` writes: states as
  `state.PARAMETER.NAME`, the names of `torch.distributed.checkpoint.state_dict`, where a parameter
  may be its number in the optimizer; everything else as JSON among the metadata.

Optimizers that keep what completes their weights are those of `master_weights.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.bridge.entries import Contents, Group, Request, entries_in, entry_of
from mcftensor.checkpoint.bridge.master_weights import complete
from mcftensor.checkpoint.bridge.weight_files import of_state_dict, require_whole
from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading, some
from mcftensor.checkpoint.digests import sealed, unsealed
from mcftensor.checkpoint.open_checkpoint import state_dict_in, unpickled
from mcftensor.checkpoint.safetensors_files import opened

BESIDE = ("optimizer.safetensors", "optimizer.pt", "optimizer.bin")
"""What the states of an optimizer are called in a folder of weights."""

_METADATA = "optimizer"
_PREFIX = "state."


def read_file(path: Path, request: Request) -> Contents:
    """One file with both, or with either."""
    if request.verify:
        require_whole(path)
    content = unpickled(path)
    contents = of_state_dict("torch.save", _weights_in(content, path), request)
    found = _optimizers_in(content)
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds the states of {len(found)} optimizers, {some(found)}; save one by itself"
        )
    for name, state_dict in found.items():
        add(contents, state_dict, f"{path}[{name!r}]", request)
    return contents


def add_beside(contents: Contents, folder: Path, request: Request) -> None:
    """The states that lie beside weights in a folder, if there are any."""
    for path in (folder / name for name in BESIDE):
        if not path.is_file():
            continue
        with reading(path):
            if path.suffix == ".safetensors":
                _add_own(contents, path, request)
            else:
                if request.verify:
                    require_whole(path)
                add(contents, unpickled(path), path, request)
        return


def add(contents: Contents, state_dict: Any, source: object, request: Request) -> None:
    """What an optimizer's `state_dict()` has returned."""
    if not _is_of_optimizer(state_dict):
        raise CheckpointError(f"{source} is no state dict of an optimizer")
    contents.groups = [dict(group) for group in state_dict["param_groups"]]
    for i, state in state_dict["state"].items():
        contents.states[i] = {
            key: entry_of(f"{key} of parameter {i}", x) if isinstance(x, Tensor) else x
            for key, x in state.items()
        }
    complete(contents, request.parameters)
    if not request.optimizer:
        contents.states, contents.groups = {}, None


def _weights_in(content: object, path: Path) -> Mapping[str, Tensor]:
    if isinstance(content, Mapping):
        content = {
            key: x
            for key, x in content.items()
            if not (_is_of_optimizer(x) or key in ("optimizer_states", "lr_schedulers"))
        }
    return state_dict_in(content, path)


def _optimizers_in(content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        return {}
    found = {key: x for key, x in content.items() if _is_of_optimizer(x)}
    several = content.get("optimizer_states")
    if isinstance(several, list):
        found |= {f"optimizer_states[{i}]": x for i, x in enumerate(several)}
    return found


def _is_of_optimizer(content: Any) -> bool:
    return isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys()


# ---------------------------------------------------------------------- optimizer.safetensors


def state_name(parameter: Any, key: str) -> str:
    """Under what name a state is in `optimizer.safetensors`."""
    return f"{_PREFIX}{parameter}.{key}"


def metadata_of(contents: Contents) -> dict[str, str]:
    """What of an optimizer is no tensor, as a text; CheckpointError for what JSON does not hold."""
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


def _add_own(contents: Contents, path: Path, request: Request) -> None:
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
    known = request.verify and stored.seal is not None
    for name, entry in entries_in(stored.terms, request, known).items():
        i, _, key = name.removeprefix(_PREFIX).rpartition(".")
        if numbers.get(i, i) not in contents.states:
            raise CheckpointError(f"{path} holds {name}, which is the state of no parameter")
        contents.states[numbers.get(i, i)][key] = entry


def restored(own: Group, theirs: Group) -> Group:
    """Hyperparameters that a group of an optimizer takes from that of a checkpoint."""
    known = {key: x for key, x in theirs.items() if key != "params" and key in own}
    known |= {key: x for key, x in theirs.items() if key == "initial_lr"}  # by schedulers
    return {key: _like(own.get(key), x) for key, x in known.items()}


def _like(own: Any, x: Any) -> Any:
    if isinstance(own, Tensor):
        return torch.as_tensor(x, dtype=own.dtype, device=own.device)
    return tuple(x) if isinstance(own, tuple) and isinstance(x, list) else x
