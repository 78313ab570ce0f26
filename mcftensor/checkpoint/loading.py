"""Expansions from safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mcftensor.checkpoint.digests import KEY, digest, unsealed
from mcftensor.checkpoint.errors import CheckpointError, reading, some
from mcftensor.checkpoint.reading import open_safetensors
from mcftensor.checkpoint.shards import files_in, index_of
from mcftensor.checkpoint.state_dicts import from_terms, is_sharded, joined, ties
from mcftensor.tensor import MCFTensor

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
) -> dict[str, Tensor]: ...
@overload
def load_file(
    path: FilePath, model: nn.Module, *, strict: bool = ..., verify: bool = ..., tails: bool = ...
) -> tuple[list[str], list[str]]: ...
def load_file(
    path: FilePath,
    model: nn.Module | None = None,
    *,
    device: Device | None = None,
    strict: bool = True,
    verify: bool = True,
    tails: bool = True,
) -> dict[str, Tensor] | tuple[list[str], list[str]]:
    """Load a safetensors file, by `save_file` or any other program, into a model or a state dict.

    What the model holds decides what its tensors become. Expansions load into expansions of the
    same format as they are, into other formats and plain parameters with one rounding, and plain
    tensors into expansions likewise. All is read and checked before the first tensor of the model
    changes: a call that raises leaves the model as it was.

    Args:
        path: a safetensors file; the index of one that is divided, or what it would be called if it
            were not; or a folder that holds `model.safetensors.index.json` or `model.safetensors`.
        model: the module whose parameters and buffers are loaded, where they are.
        device: where tensors are put that are loaded without a model, by default the CPU.
        strict: whether names in only one of file and model are an error.
        verify: whether digests are checked, which files of `save_file` hold, and whether terms
            belong together.
        tails: whether terms after the leading one are taken. This and `verify` are as in
            `from_terms`, for files in which another program has changed terms.

    Returns:
        With a model, the names that the file lacks and those that the model lacks; without one,
        tensors and expansions by name. Those that were tied are the same object.

    Raises:
        CheckpointError: a file that is missing, damaged, altered, or no safetensors file; terms
            that make no expansion, or do not belong together; names, shapes or kinds that differ
            from those of the model.
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
    path = Path(path)
    with reading(path):
        state_dict = _read(path, verify, tails)
    if model is not None:
        return _load(model, state_dict, strict, path)
    device = "cpu" if device is None else device
    moved = {id(x): x.to(device) for x in state_dict.values()}
    return {name: moved[id(x)] for name, x in state_dict.items()}


# --------------------------------------------------------------------------------- the file


_Content = tuple[dict[str, Tensor], dict[str, str], str | None]
"""Terms by name, names that stand for the tensor of another one, and the digest of both."""


def _read(path: Path, verify: bool, tails: bool) -> dict[str, Tensor]:
    """All of a checkpoint, checked."""
    if path.is_dir():
        path = path / "model.safetensors"
    if index_of(path).is_file():
        path = index_of(path)
    terms, tied, seal = (_read_shards if path.suffix == ".json" else _read_file)(path, verify)
    state_dict = joined(terms, tails, verify, known=verify and seal is not None)
    for alias, name in tied.items():
        if alias in state_dict or name not in state_dict:
            raise CheckpointError(f"{path} says that {alias} is tied to {name}, which cannot be")
    return state_dict | {alias: state_dict[name] for alias, name in tied.items()}


def _read_file(path: Path, verify: bool) -> _Content:
    with path.open("rb") as start:
        if start.read(2) == b"PK":
            raise CheckpointError(
                f"{path} is a file of torch.save; load it with torch.load(path, weights_only=True)"
            )
    file, metadata = open_safetensors(path, "load_file")
    terms = dict(file)
    if KEY not in metadata:
        if verify and any('"crc32": "' in text for text in metadata.values()):
            raise CheckpointError(f"{path} is damaged: its digests are not under {KEY}")
        return terms, {}, None
    sealed = json.loads(metadata[KEY])
    if verify:
        digests = unsealed(path, sealed)["tensors"]
        altered = [name for name, x in terms.items() if digests.get(name) != digest(name, x)]
        altered += [name for name in digests if name not in terms]
        if altered:
            raise CheckpointError(
                f"{path} is damaged, or was altered: the digests of {some(altered)} are not what "
                "it says. verify=False reads it all the same"
            )
    return terms, sealed["tied"], sealed["crc32"]


def _read_shards(index: Path, verify: bool) -> _Content:
    content = json.loads(index.read_text(encoding="utf-8"))
    files = files_in(index, content)
    metadata = content.get("metadata")
    seal, seals = None, {}
    if isinstance(metadata, dict) and KEY in metadata:
        sealed = metadata[KEY]
        seal, seals = sealed["crc32"], sealed["shards"]
        if verify:
            unsealed(index, sealed | {"weight_map": files})
    terms: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for file in dict.fromkeys(files.values()):
        shard, its_ties, its_seal = _read_file(index.parent / file, verify)
        if verify and seals.get(file) != (its_seal if seals else None):
            raise CheckpointError(
                f"{index.parent / file} is not the file that {index} was written for"
            )
        named = {name: None for name, place in files.items() if place == file}
        missing = [name for name in named if name not in shard]
        if missing:
            raise CheckpointError(
                f"{index} says that {some(missing)} is in {file}, which does not hold it"
            )
        terms |= {name: x for name, x in shard.items() if name in named}
        tied |= its_ties
    return terms, tied, seal


# -------------------------------------------------------------------------------- the model


def _load(
    model: nn.Module, state_dict: dict[str, Tensor], strict: bool, path: Path
) -> tuple[list[str], list[str]]:
    own = from_terms(model.state_dict())
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
    for name, x in own.items():  # which need not be said, as of other state dicts
        if name in state_dict and isinstance(state_dict[name], MCFTensor) and type(x) is Tensor:
            state_dict[name] = x.new_empty(x.shape, device="cpu").copy_(state_dict[name])
    result = model.load_state_dict(state_dict, strict=False)
    return result.missing_keys, result.unexpected_keys


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
    if (new.is_floating_point(), new.is_complex()) != (old.is_floating_point(), old.is_complex()):
        raise CheckpointError(
            f"load_file: {name} is of {new.dtype} in {path}, and of {old.dtype} in the model"
        )


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
