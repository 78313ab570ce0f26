"""Checkpoints, in memory or in files, read tensor by tensor."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.errors import CheckpointError, reading, some
from mcftensor.checkpoint.extras import extra
from mcftensor.checkpoint.shards import files_in
from mcftensor.checkpoint.state_dicts import from_terms, names_of_terms

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

# As Hugging Face names them, in the order in which it looks for them.
_IN_FOLDERS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)

# Where training scripts keep the state dict of the model, beside that of the optimizer.
_NESTED = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "network",
    "net",
    "weights",
    "params",
)


def tensors(checkpoint: Checkpoint, side: str) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint by name, each read when it is asked for."""
    if isinstance(checkpoint, Mapping):
        return _state_dict(checkpoint, side)
    if isinstance(checkpoint, (str, os.PathLike)):
        return _Whole(_read(Path(checkpoint)))
    raise TypeError(
        f"audit: {side} is a {type(checkpoint).__name__}; give a state dict, as of "
        "module.state_dict(), or a path"
    )


def _state_dict(content: object, source: object) -> dict[str, Tensor]:
    """The tensors of a state dict, or of the one that is nested in it."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{source} holds a {type(content).__name__} where a state dict belongs"
        )
    nested = [key for key in _NESTED if _holds_tensors(content.get(key))]
    if len(nested) == 1:
        return _state_dict(content[nested[0]], f"{source}[{nested[0]!r}]")
    if nested:
        raise CheckpointError(
            f"{source} holds several state dicts, {some(nested)}; save one by itself"
        )
    found = {
        name: x for name, x in content.items() if isinstance(name, str) and isinstance(x, Tensor)
    }
    if not found:
        keys = some([repr(key) for key in content]) if content else "none"
        raise CheckpointError(f"{source} holds no state dict; its keys: {keys}")
    return found


def _holds_tensors(content: object) -> bool:
    return isinstance(content, Mapping) and any(
        isinstance(x, Tensor) or _holds_tensors(x) for x in content.values()
    )


def _read(path: Path) -> Mapping[str, Tensor]:
    """What a path stands for: a file, an index, or a folder that holds one of these."""
    with reading(path):
        if path.is_dir():
            for name in _IN_FOLDERS:
                if (path / name).is_file():
                    return _read(path / name)
            raise CheckpointError(
                f"the folder {path} holds none of {', '.join(_IN_FOLDERS)}; name the file itself"
            )
        return _Shards(path) if path.suffix == ".json" else _read_file(path)


def _read_file(path: Path) -> Mapping[str, Tensor]:
    with reading(path):
        with path.open("rb") as file:
            head = file.read(9)
        # A safetensors file starts with the length of its header in eight bytes; that is JSON.
        if path.suffix == ".safetensors" or head[4:] == b"\0\0\0\0{":
            return SafetensorsFile(path, "audit")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of pickle protocols, which are no concern here.
            # Before torch 1.6 files were no zip archives, and such cannot be mapped.
            is_zip = head[:2] == b"PK"
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        return _state_dict(content, path)


class _Lazy(Mapping[str, Tensor]):
    """Tensors that are read when they are asked for."""

    names: Mapping[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's own would read the tensor.


class SafetensorsFile(_Lazy):
    """A safetensors file as it is: each term by itself."""

    def __init__(self, path: Path, caller: str) -> None:
        with reading(path):
            safetensors = extra("safetensors", caller)
            self.path = path
            self.file = safetensors.safe_open(path, framework="pt", device="cpu")
            self.names = dict.fromkeys(self.file.keys())
            self.metadata: dict[str, str] = self.file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        with reading(self.path):
            tensor: Tensor = self.file.get_tensor(name)
            return tensor


class _Shards(_Lazy):
    """Several files and the index that says what is where; one of them is open at a time."""

    names: dict[str, str]

    def __init__(self, index: Path) -> None:
        files = files_in(index, json.loads(index.read_text(encoding="utf-8")))
        self.index = index
        self.names = dict(sorted(files.items(), key=lambda item: item[1]))  # Shard by shard.
        self.open: tuple[str, Mapping[str, Tensor]] = "", {}

    def __getitem__(self, name: str) -> Tensor:
        file = self.names[name]
        if self.open[0] != file:
            self.open = "", {}  # The last shard goes before the next one comes.
            self.open = file, _read_file(self.index.parent / file)
        shard = self.open[1]
        if name not in shard:
            raise CheckpointError(
                f"{self.index} says that {name} is in {file}, which does not hold it"
            )
        return shard[name]


class _Whole(_Lazy):
    """Expansions of which the terms are stored."""

    def __init__(self, terms: Mapping[str, Tensor]) -> None:
        self.terms = terms
        self.names = names_of_terms(terms)

    def __getitem__(self, name: str) -> Tensor:
        terms = {term: self.terms[term] for term in self.names[name]}
        whole: Tensor = from_terms(terms)[name]
        return whole
