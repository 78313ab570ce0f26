"""Megatron-Core's distributed checkpoints, `--ckpt-format torch_dist`.

Layout: a folder of `torch.distributed.checkpoint`, `.metadata` and `*.distcp`, in which a weight
is under its name and the states of its optimizer are under `optimizer.state.STATE.NAME`: `exp_avg`,
`exp_avg_sq`, and the master weight as `fp32_param` or, of the distributed optimizer's
`fully_reshardable` kind, `param`, of float32 or int16 (what bfloat16 lacks, as Transformer Engine
keeps it). `chained_0.` may stand before. The folder of the run may be given, whose
`latest_checkpointed_iteration.txt` says which is the last. Read: Megatron-Core 0.20.

Names are Megatron's own, and layers that it stacks are one tensor. States of the kind
`dp_reshardable` are parts of buffers without names, and the files of `distrib_optim.pt` are such
buffers; neither can be read without the model: save with
`--dist-ckpt-optim-fully-reshardable`. The count of steps is among pickled arguments, which are not
read: give `step`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mcftensor.checkpoint.bridge.distcp import Folder
from mcftensor.checkpoint.bridge.entries import Contents, Entry, Request
from mcftensor.checkpoint.bridge.transformer_engine import with_master
from mcftensor.checkpoint.checkpoint_error import CheckpointError, some

_LATEST = "latest_checkpointed_iteration.txt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OF_OPTIMIZER = re.compile(r".*optimizer\.")
_MASTERS = ("fp32_param", "param")


def last_iteration(path: Path) -> Path | None:
    """Of the folder of a run, that of its last checkpoint."""
    if not (path / _LATEST).is_file():
        return None
    last = (path / _LATEST).read_text(encoding="utf-8").strip()
    return path / (f"iter_{int(last):07}" if last.isdigit() else last)


def is_legacy(path: Path) -> bool:
    """Whether it is what `--ckpt-format torch` writes."""
    return any((last_iteration(path) or path).glob("mp_rank_*/model_optim_rng.pt"))


def refuse_legacy(path: Path, request: Request) -> Contents:
    """Say how one that is read is made of it."""
    raise CheckpointError(
        f"{path} is a checkpoint of Megatron's --ckpt-format torch, which is not read; start the "
        "training script with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER, which "
        "makes one of it that is"
    )


def matches(folder: Folder) -> bool:
    """Whether it is Megatron's: it has states, which lie in no dict."""
    return any(len(keys) == 1 and _OF_OPTIMIZER.match(keys[0]) for keys in folder.paths.values())


def read(path: Path, folder: Folder, request: Request) -> Contents:
    """Weights as their masters, and the moments of their optimizer."""
    entries = folder.tensors
    weights = {name: x for name, x in entries.items() if not _OF_OPTIMIZER.match(name)}
    contents = Contents("Megatron-Core", dict(weights))
    states: dict[str, dict[str, Entry]] = {}
    for name, x in entries.items():
        match = _STATE.fullmatch(name)
        parameter = match[2] if match else None
        weight = weights.get(parameter) if parameter else None
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
    if request.optimizer:
        contents.states = dict(states)
    if request.optimizer and contents.states:
        if request.step is None:
            raise CheckpointError(
                f"{path}: how many steps were taken is not said where it can be read; give step, "
                "which is the iteration, or optimizer=False for the weights alone"
            )
        for state in contents.states.values():
            state["step"] = float(request.step)
    return contents
