"""State dicts in folders of `torch.distributed.checkpoint`: Megatron-Core's, torchtitan's, others'.

*Megatron-Core*, `--ckpt-format torch_dist`. A weight is under its name, and the states of its
optimizer are under `optimizer.state.STATE.NAME`: `exp_avg`, `exp_avg_sq`, and the master weight as
`fp32_param` or, of the distributed optimizer's `fully_reshardable` kind, `param`, of float32 or
int16 (the rest of the bfloat16, as in Transformer Engine). `chained_0.` may stand before. The
folder of the run may be given, whose `latest_checkpointed_iteration.txt` says which is the last.
Names are Megatron's own, and layers that it stacks are one tensor. States of the kind
`dp_reshardable` are parts of buffers without names, and the files of `distrib_optim.pt` are such
buffers; neither can be read without the model: save with `--dist-ckpt-optim-fully-reshardable`.
The count of steps is among pickled arguments, which are not read: give `step`. Read:
Megatron-Core 0.20.

*torchtitan*. A folder, or the last of its folders `step-N`, has weights at the top, or under
`model`, and under `optimizer` the result of `get_optimizer_state_dict` with
`flatten_optimizer_state_dict`: `state.NAME.STATE` and `param_groups.NAME.OPTION`. `get_state_dict`
nests the same, `state` by name and `param_groups` as a list, under keys that a script chooses.
Other entries, such as schedulers and data loaders, are ignored. Read: torchtitan 0.3.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mcftensor.bridge.distcp import METADATA, Folder, folder_at
from mcftensor.bridge.master_weights import with_master
from mcftensor.checkpoint.checkpoint_error import CheckpointError, some
from mcftensor.checkpoint.entries import Contents, Entry, Group, Request

_LATEST = "latest_checkpointed_iteration.txt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OF_OPTIMIZER = re.compile(r".*optimizer\.")
_MASTERS = ("fp32_param", "param")
_MODELS = ("model", "state_dict", "model_state_dict", "model_state")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")


def last_in(path: Path) -> Path | None:
    """Return the folder of `torch.distributed.checkpoint` that a path stands for."""
    steps = {
        int(match[1]): file.parent
        for file in path.glob(f"step-*/{METADATA}")
        if (match := re.fullmatch(r"step-(\d+)", file.parent.name))
    }
    if (path / METADATA).is_file():
        return path
    return _last_iteration(path) or (steps[max(steps)] if steps else None)


def _last_iteration(path: Path) -> Path | None:
    if not (path / _LATEST).is_file():
        return None
    last = (path / _LATEST).read_text(encoding="utf-8").strip()
    return path / (f"iter_{int(last):07}" if last.isdigit() else last)


def read(path: Path, request: Request) -> Contents:
    """Read weights, and the states of their optimizer; Megatron's are not in a nested dict."""
    path = last_in(path) or path
    folder = folder_at(path, request.verify)
    keys = folder.paths.values()
    is_megatron = any(len(path) == 1 and _OF_OPTIMIZER.match(path[0]) for path in keys)
    return (_read_megatron if is_megatron else _read_nested)(path, folder, request)


def is_legacy(path: Path) -> bool:
    """Whether it is what `--ckpt-format torch` of Megatron writes."""
    return any((_last_iteration(path) or path).glob("mp_rank_*/model_optim_rng.pt"))


def refuse_legacy(path: Path, request: Request) -> Contents:
    """Raise CheckpointError, with instructions to convert the checkpoint to a readable one."""
    raise CheckpointError(
        f"{path} is a checkpoint of Megatron's --ckpt-format torch, which is not read; start the "
        "training script with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER, which "
        "makes one of it that is"
    )


def _read_megatron(path: Path, folder: Folder, request: Request) -> Contents:
    entries = folder.tensors
    weights = {name: x for name, x in entries.items() if not _OF_OPTIMIZER.match(name)}
    contents = Contents("Megatron-Core", dict(weights))
    states: dict[str, dict[str, Entry]] = {}
    for name, x in entries.items():
        match = _STATE.fullmatch(name)
        weight = weights.get(match[2]) if match else None
        if match and weight and weight.shape == x.shape:
            states.setdefault(weight.name, {})[match[1]] = x
        elif match or (name not in weights and x.shape):
            raise CheckpointError(
                f"{name} is of shape {tuple(x.shape)}, and the weight "
                f"{f'of {tuple(weight.shape)}' if weight else 'is missing'}; save the optimizer "
                "with --dist-ckpt-optim-fully-reshardable"
            )
    masters = {name: key for name, state in states.items() for key in _MASTERS if key in state}
    without = [name for name in states if name not in masters]
    if masters and without:
        raise CheckpointError(f"{some(without)} have states and no master weight, as others have")
    for name, key in masters.items():
        contents.weights[name] = with_master(weights[name], states[name].pop(key))
    if request.optimizer and states:
        if request.step is None:
            raise CheckpointError(
                f"{path}: how many steps were taken is not said where it can be read; give step, "
                "which is the iteration, or optimizer=False for the weights alone"
            )
        contents.states = {
            name: {**state, "step": float(request.step)} for name, state in states.items()
        }
    return contents


def _read_nested(path: Path, folder: Folder, request: Request) -> Contents:
    paths = folder.paths
    first = {keys[0] for keys in paths.values()}
    is_nested = len(first) == 1 and all(len(keys) > 1 for keys in paths.values())
    if is_nested and not first & {*_MODELS, *_OPTIMIZERS}:  # a script has saved one object
        paths = {name: keys[1:] for name, keys in paths.items()}
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
    options: dict[Any, Group] = {}
    for name, keys in paths.items() if request.optimizer else ():
        if keys[0] not in _OPTIMIZERS or len(keys) == 1:
            continue
        kind, _, rest = ".".join(map(str, keys[1:])).partition(".")
        owner, _, key = rest.rpartition(".")
        x = folder.tensors.get(name)
        if kind == "state":
            contents.states.setdefault(owner, {})[key] = x or folder.objects[name]()
        elif kind == "param_groups":
            options.setdefault(owner, {})[key] = x.read() if x else folder.objects[name]()
    unknown = [name for name in contents.states if name not in weights]
    if unknown:
        raise CheckpointError(f"{path} has states of {some(unknown)}, and no such weights")
    contents.groups = _groups(options)
    return contents


def _groups(options: dict[Any, Group]) -> list[Group] | None:
    """Return groups of parameters, from the options of each group or of each parameter."""
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
