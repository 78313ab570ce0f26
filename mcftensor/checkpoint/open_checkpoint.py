"""Checkpoints, in memory or in files, read tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading, some
from mcftensor.checkpoint.pickle_checks import unpickled
from mcftensor.checkpoint.safetensors_files import (
    DELTA_KEY,
    Lazy,
    files_in,
    is_safetensors,
    open_safetensors,
    opened,
)
from mcftensor.checkpoint.state_dicts import from_terms, names_of_terms

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

# As Hugging Face names them, in the order in which it looks for them.
IN_FOLDERS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)

# Keys under which training scripts store the state dict of the model.
_NESTED = (
    *("state_dict", "model_state_dict", "model_state", "model", "module"),
    *("network", "net", "weights", "params"),
)


def tensors(checkpoint: Checkpoint, side: str) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint by name, each read at its access."""
    if isinstance(checkpoint, Mapping):
        return state_dict_in(checkpoint, side)
    if isinstance(checkpoint, (str, os.PathLike)):
        terms = _read(Path(checkpoint))
        names = names_of_terms(terms)
        return Lazy(names, lambda name: from_terms({n: terms[n] for n in names[name]})[name])
    raise TypeError(
        f"audit: {side} is a {type(checkpoint).__name__}; give a state dict, as of "
        "module.state_dict(), or a path"
    )


def shapes(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint without their data, on the meta device, by name."""
    terms = _read(path)
    return {name: like_in(terms, name) for name in names_of_terms(terms)}


def state_dict_in(content: object, source: object) -> dict[str, Tensor]:
    """Return the tensors of a state dict, or of the state dict nested in it."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{source} holds a {type(content).__name__} where a state dict belongs"
        )
    nested = [key for key in _NESTED if _holds_tensors(content.get(key))]
    if len(nested) == 1:
        return state_dict_in(content[nested[0]], f"{source}[{nested[0]!r}]")
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
    """Open the checkpoint that a path stands for: a file, an index, or a folder with either."""
    with reading(path):
        if path.is_dir():
            for name in IN_FOLDERS:
                if (path / name).is_file():
                    return _read(path / name)
            raise CheckpointError(
                f"the folder {path} holds none of {', '.join(IN_FOLDERS)}; name the file itself"
            )
        return in_shards(path) if path.suffix == ".json" else _read_file(path)


def _read_file(path: Path) -> Mapping[str, Tensor]:
    with reading(path):
        if is_safetensors(path):
            file, metadata = open_safetensors(path, "audit")
            return opened(path, verify=False).terms if DELTA_KEY in metadata else file
        return state_dict_in(unpickled(path), path)


def in_shards(index: Path) -> Lazy:
    """Open several files with an index, one file at a time."""
    files = files_in(index, json.loads(index.read_text(encoding="utf-8")))
    opened: dict[str, Mapping[str, Tensor]] = {}

    def shard(name: str) -> Mapping[str, Tensor]:
        file = files[name]
        if file not in opened:
            opened.clear()  # The last shard goes before the next one comes.
            opened[file] = _read_file(index.parent / file)
        if name not in opened[file]:
            raise CheckpointError(f"{index} says that {name} is in {file}, which does not hold it")
        return opened[file]

    return Lazy(
        sorted(files, key=lambda name: files[name]),  # Shard by shard.
        lambda name: shard(name)[name],
        lambda name: like_in(shard(name), name),
    )


def like_in(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor without data, in the dtype and shape of a named one."""
    return tensors.like(name) if isinstance(tensors, Lazy) else tensors[name].to("meta")
