"""Checkpoints, in memory or in files, opened in one way and read tensor by tensor.

State dicts of weights: safetensors and files of torch.save, whole or in several files with an index
as transformers writes them, `model.safetensors.index.json` and `pytorch_model.bin.index.json`.
float32 weights of mixed precision are these: the model's under torch.amp, and the output of
DeepSpeed's `zero_to_fp32.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading, some
from mcftensor.checkpoint.pickle_checks import require_whole, unpickled
from mcftensor.checkpoint.safetensors_files import (
    DELTA_KEY,
    KEY,
    Lazy,
    Stored,
    is_safetensors,
    open_safetensors,
    unsealed,
)
from mcftensor.checkpoint.state_dicts import joined, names_of_terms
from mcftensor.wings import wing

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
        return _numbers_in(Path(checkpoint))
    raise TypeError(
        f"audit: {side} is a {type(checkpoint).__name__}; give a state dict, as of "
        "module.state_dict(), or a path"
    )


def shapes(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint without their data, on the meta device, by name."""
    numbers = _numbers_in(path)
    return {name: numbers.like(name) for name in numbers}


def _numbers_in(path: Path) -> Lazy:
    terms = opened(path, verify=False).terms
    names = names_of_terms(terms)
    return Lazy(
        names,
        lambda name: joined(terms, names[name], tails=True, verify=True),
        lambda name: like_in(terms, name),
    )


def like_in(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor without data, in the dtype and shape of a named one."""
    return tensors.like(name) if isinstance(tensors, Lazy) else tensors[name].to("meta")


def opened(path: Path, verify: bool, above: tuple[Path, ...] = ()) -> Stored:
    """Open a file, the files of an index, or a folder with either.

    An incremental file is opened with all that it is based on; `above` are the files that name this
    one as their base.
    """
    with reading(path):
        if path.is_dir():
            for name in IN_FOLDERS:
                if (path / name).is_file():
                    return opened(path / name, verify)
            raise CheckpointError(
                f"the folder {path} holds none of {', '.join(IN_FOLDERS)}; name the file itself"
            )
        if path.suffix == ".json":
            stored = _open_shards(path, verify)
        elif is_safetensors(path):
            stored = open_safetensors(path, verify)
        else:
            stored = _open_pickle(path, verify)
        if DELTA_KEY in stored.metadata:
            stored = wing("serving").put_together(path, stored, verify, above)
        for alias, name in stored.tied.items():
            if alias in stored.terms or name not in stored.terms:
                raise CheckpointError(
                    f"{path} says that {alias} is tied to {name}, which cannot be"
                )
        return stored


def _open_pickle(path: Path, verify: bool) -> Stored:
    content = unpickled(path, verify)
    weights = state_dict_in(content, path)
    found = {key: x for key, x in content.items() if is_of_optimizer(x)}
    several = content.get("optimizer_states")  # as Lightning has it
    if isinstance(several, list):
        found |= {f"optimizer_states[{i}]": x for i, x in enumerate(several)}
    return Stored("torch.save", weights, optimizers=found)


def _open_shards(index: Path, verify: bool) -> Stored:
    """Open several files with an index, one file at a time."""
    content = json.loads(index.read_text(encoding="utf-8"))
    files = files_in(index, content)
    metadata = content.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    sealed = metadata.get(KEY)
    if verify and sealed is not None:
        unsealed(index, sealed | {"weight_map": files})
    kinds = {file: is_safetensors(index.parent / file) for file in dict.fromkeys(files.values())}
    held: dict[str, Stored] = {}

    def shard(file: str) -> Stored:
        if file not in held:
            held.clear()  # The last shard goes before the next one comes.
            path = index.parent / file
            with reading(path):
                if kinds[file]:
                    opened = open_safetensors(path, verify)
                else:
                    opened = _open_pickle(path, verify=False)  # it was checked with the index
            seal = sealed and sealed["shards"].get(file)
            if verify and seal != (sealed and opened.seal):
                raise CheckpointError(f"{path} is not the file that {index} was written for")
            missing = [x for x, its in files.items() if its == file and x not in opened.terms]
            if missing:
                raise CheckpointError(
                    f"{index} says that {some(missing)} is in {file}, which does not hold it"
                )
            held[file] = opened
        return held[file]

    tied: dict[str, str] = {}
    for file, is_own_kind in kinds.items() if verify or sealed is not None else ():
        if verify and not is_own_kind:
            require_whole(index.parent / file)
        if is_own_kind:
            tied |= shard(file).tied
    terms = Lazy(
        sorted(files, key=lambda name: files[name]),  # Shard by shard.
        lambda name: shard(files[name]).terms[name],
        lambda name: like_in(shard(files[name]).terms, name),
    )
    layout = "safetensors" if all(kinds.values()) else "torch.save in shards"
    return Stored(layout, terms, tied, seal=sealed and sealed["crc32"])


def files_in(index: Path, content: Any) -> dict[str, str]:
    """Return the file, in the folder of the index, of each tensor.

    Raises:
        CheckpointError: a file is missing.
    """
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise CheckpointError(f"{index} is no index of a checkpoint: it has no weight_map of names")
    names = dict.fromkeys(files.values())
    foreign = [f for f in names if f in ("", ".", "..") or set(f) & {"/", "\\", ":", "\0"}]
    if foreign:
        raise CheckpointError(
            f"{index} names {some(map(repr, foreign))}; shards are files in the folder of the index"
        )
    missing = [f for f in names if not (index.parent / f).is_file()]
    if missing:
        raise CheckpointError(f"shards that {index} names are missing: {some(missing)}")
    return files


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
    """Whether it is a state dict of weights, or a dict with one."""
    return (
        isinstance(content, Mapping)
        and not is_of_optimizer(content)
        and any(isinstance(x, Tensor) or _holds_tensors(x) for x in content.values())
    )


def is_of_optimizer(content: Any) -> bool:
    """Whether it is a state dict of an optimizer."""
    return isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys()
