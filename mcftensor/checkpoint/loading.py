"""Checkpoints into models and optimizers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading, some
from mcftensor.checkpoint.entries import Contents, Request, entries_in
from mcftensor.checkpoint.open_checkpoint import IN_FOLDERS, opened
from mcftensor.checkpoint.pickle_checks import unpickled
from mcftensor.checkpoint.safetensors_files import Stored, index_of
from mcftensor.checkpoint.state_dicts import from_terms, is_sharded, ties
from mcftensor.checkpoint.torch_optimizers import (
    BESIDE,
    add,
    add_own,
    load_states,
    state_dict_for,
)
from mcftensor.tensor.components import any_format_of
from mcftensor.wings import wing_or_none

FilePath = str | os.PathLike[str]
Device = torch.device | str | int


@overload
def load_file(
    path: FilePath,
    model: None = ...,
    *,
    device: Device | None = ...,
    verify: bool = ...,
    tails: bool = ...,
    parameters: Iterable[str] | None = ...,
) -> dict[str, Tensor]: ...
@overload
def load_file(
    path: FilePath,
    model: nn.Module,
    *,
    optimizer: Optimizer | None = ...,
    strict: bool = ...,
    verify: bool = ...,
    tails: bool = ...,
    parameters: Iterable[str] | None = ...,
    step: int | None = ...,
) -> tuple[list[str], list[str]]: ...
def load_file(
    path: FilePath,
    model: nn.Module | None = None,
    *,
    optimizer: Optimizer | None = None,
    device: Device | None = None,
    strict: bool = True,
    verify: bool = True,
    tails: bool = True,
    parameters: Iterable[str] | None = None,
    step: int | None = None,
) -> dict[str, Tensor] | tuple[list[str], list[str]]:
    """Load a checkpoint, by `save_file` or another program, into a model or a state dict.

    The tensors of the model keep their formats. Expansions load unchanged into expansions of the
    same format, and with one rounding into other formats and plain parameters. Plain tensors load
    into expansions with one rounding, too. Everything is read and checked before the first tensor
    of the model changes: a call that raises leaves the model unchanged.

    Args:
        path: a safetensors file; the index of a file in shards, or the name of the whole file; a
            folder with `model.safetensors.index.json` or `model.safetensors`; or any other layout
            that `convert_checkpoint` reads.
        model: the module whose parameters and buffers are loaded, on their devices.
        optimizer: an optimizer of its parameters, constructed like the saved one, that loads the
            states and its hyperparameters. States of expansion parameters become expansions in
            the format of the parameter.
        device: the device of tensors that are loaded without a model, by default the CPU.
        strict: whether names in only one of file and model are an error.
        verify: whether to check the digests in files of `save_file`, and whether terms belong
            together.
        tails: whether terms after the leading one are loaded. This and `verify` are as in
            `from_terms`, for files in which another program has changed terms.
        parameters: as in `convert_checkpoint`; `step` likewise.

    Returns:
        With a model, the names missing in the file and the names missing in the model; without
        a model, tensors and expansions by name. Tied tensors are the same object.

    Raises:
        CheckpointError: a file that is missing, damaged, altered, or of an unknown layout;
            terms that make no expansion, or do not belong together; names, shapes or kinds that
            differ from the model's.
        ImportError: safetensors is not installed.

    Examples:
        >>> import tempfile, torch, mcftensor as mcf
        >>> model, plain = mcf.as_expansion(torch.nn.Linear(3, 2)), torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mcf.save_file(model, f"{folder}/model.safetensors")
        ...     mcf.load_file(f"{folder}/model.safetensors", plain)  # rounded to float32 once
        ...     list(mcf.load_file(f"{folder}/model.safetensors"))
        ([], [])
        ['bias', 'weight']
    """
    if model is not None and device is not None:
        raise ValueError("load_file: device is for loading without a model; move the model itself")
    if optimizer is not None and model is None:
        raise ValueError("load_file: an optimizer is loaded with the model of its parameters")
    path = Path(path)
    names = None if parameters is None else list(parameters)
    with reading(path):
        contents = read_checkpoint(path, Request(optimizer is not None, names, step, verify, tails))
        state_dict = {name: entry.read() for name, entry in contents.weights.items()}
        state_dict |= {alias: state_dict[name] for alias, name in contents.tied.items()}
    if model is not None:
        _require_fit(model, state_dict, strict, path)
        if optimizer is not None:
            load_states(optimizer, state_dict_for(optimizer, model, contents, strict, path), path)
        result = model.load_state_dict(state_dict, strict=False)
        return result.missing_keys, result.unexpected_keys
    if device is not None:
        moved = {id(x): x.to(device) for x in state_dict.values()}
        state_dict = {name: moved[id(x)] for name, x in state_dict.items()}
    return state_dict


def read_checkpoint(path: Path, request: Request) -> Contents:
    """Read the checkpoint that a path stands for: a file, an index, or a folder, of any layout."""
    with reading(path):
        if index_of(path).is_file():
            path = index_of(path)
        if path.is_dir() and not any((path / name).is_file() for name in IN_FOLDERS):
            bridge = wing_or_none("bridge")
            reader = bridge and bridge.reader_of(path)
            if reader is None:
                raise CheckpointError(
                    f"the folder {path} holds none of {', '.join(IN_FOLDERS)}, and is no "
                    "checkpoint of DeepSpeed, Megatron (torch_dist) or "
                    "torch.distributed.checkpoint; name the file itself"
                )
            contents: Contents = reader(path, request)
        else:
            stored = opened(path, request.verify)
            if stored.layout == "torch.save":
                stored = dataclasses.replace(stored, tied=ties(stored.terms))
            contents = Contents(stored.layout, entries_in(stored, request), tied=stored.tied)
            _add_states(contents, stored, path, request)
        contents.require_known(request.parameters)
        contents.require_fitting_moments(request.parameters)
        return contents


def _add_states(contents: Contents, stored: Stored, path: Path, request: Request) -> None:
    """Add the states in the same file as the weights, or in the same folder, if there are any."""
    if len(stored.optimizers) > 1:
        raise CheckpointError(
            f"{path} holds the states of {len(stored.optimizers)} optimizers, "
            f"{some(stored.optimizers)}; save one by itself"
        )
    for name, state_dict in stored.optimizers.items():
        add(contents, state_dict, f"{path}[{name!r}]", request)
    beside = next((path / name for name in BESIDE if (path / name).is_file()), None)
    if beside is None:
        return
    with reading(beside):
        if beside.suffix == ".safetensors":
            add_own(contents, beside, request)
        else:
            add(contents, unpickled(beside, request.verify), beside, request)


# -------------------------------------------------------------------------------- the model


def _require_fit(model: nn.Module, state_dict: dict[str, Tensor], strict: bool, path: Path) -> None:
    """Check all that is to be loaded, and give tied tensors all their names."""
    own = from_terms(model.state_dict(keep_vars=True))
    for name, x in own.items():
        if name in state_dict:
            _require_loadable(name, state_dict[name], x, path)
    tied: dict[str, list[str]] = {}
    for alias, name in ties(own).items():
        tied.setdefault(name, [name]).append(alias)
    for names in tied.values():
        _tie(state_dict, names, path)
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    if strict and (missing or unexpected):
        lone = {"the model has": missing, f"{path} has": unexpected}
        raise CheckpointError(
            "load_file: "
            + "; ".join(f"only {side} {some(names)}" for side, names in lone.items() if names)
            + ". strict=False loads what both have"
        )


def _require_loadable(name: str, new: Tensor, old: Any, path: Path) -> None:
    if is_lazy(old):
        return
    obstacle = None
    if not isinstance(old, Tensor):
        obstacle = f"a {type(old).__name__}; leave it out of the file"
    elif is_sharded(old):
        obstacle = (
            "a DTensor; load before the model is sharded, or use torch.distributed.checkpoint"
        )
    elif old.is_meta:
        obstacle = "on the meta device; give it memory first, with module.to_empty(device='cpu')"
    if obstacle:
        raise CheckpointError(f"load_file: cannot load {name} of {path}: the model's is {obstacle}")
    if new.shape != old.shape:
        raise CheckpointError(
            f"load_file: {name} is of shape {tuple(new.shape)} in {path}, and of "
            f"{tuple(old.shape)} in the model"
        )
    if _kind(new) != _kind(old):
        raise CheckpointError(
            f"load_file: {name} is of {new.dtype} in {path}, and of {old.dtype} in the model"
        )


def _kind(x: Tensor) -> tuple[bool, bool]:
    return (True, False) if any_format_of(x) else (x.is_floating_point(), x.is_complex())


def _tie(state_dict: dict[str, Tensor], names: list[str], path: Path) -> None:
    """Have all names of one tensor of the model where the file has some of them."""
    present = [name for name in names if name in state_dict]
    if not present:
        return
    first, x = present[0], state_dict[present[0]]
    for name in present[1:]:
        y = state_dict[name]
        if x is not y and not (type(x) is type(y) and torch.equal(x, y)):
            raise CheckpointError(
                f"load_file: {first} and {name} are tied in the model, and differ in {path}"
            )
    state_dict.update(dict.fromkeys(names, x))
