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

import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcftensor.checkpoint.bridge.entries import Contents, Entry, Request
from mcftensor.checkpoint.bridge.transformer_engine import with_master
from mcftensor.checkpoint.errors import CheckpointError, reading
from mcftensor.checkpoint.safetensors import DTYPES
from mcftensor.formats import PLAIN

_LATEST = "latest_checkpointed_iteration.txt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MASTERS = ("fp32_param", "param")


def matches(path: Path) -> bool:
    """Whether a folder is one of these."""
    return (path / ".metadata").is_file() or (path / _LATEST).is_file()


def read(path: Path, request: Request) -> Contents:
    """Weights as their masters, and the moments of their optimizer."""
    if not (path / ".metadata").is_file():
        last = (path / _LATEST).read_text(encoding="utf-8").strip()
        path = path / (f"iter_{int(last):07}" if last.isdigit() else last)
    with reading(path / ".metadata"), (path / ".metadata").open("rb") as file:
        found = _Unpickler(file).load()
        places = {(i.fqn, i.offset): place for i, place in found.storage_data.items()}
        kinds = found.state_dict_metadata.items()
        entries = {
            name: _entry(name, kind, path, places, request.verify)
            for name, kind in kinds
            if isinstance(kind, TensorStorageMetadata)
        }
    weights = {name: x for name, x in entries.items() if not re.match(r".*optimizer\.", name)}
    contents = Contents("Megatron-Core", weights)
    for name, x in entries.items():
        match = _STATE.fullmatch(name)
        if match is None:
            continue
        key, parameter = match.groups()
        weight = weights.get(parameter)
        if weight is None or weight.shape != x.shape:
            raise CheckpointError(
                f"{name} is of shape {tuple(x.shape)}, and the weight "
                f"{f'of {tuple(weight.shape)}' if weight else 'is missing'}; save the optimizer "
                "with --dist-ckpt-optim-fully-reshardable"
            )
        if key in _MASTERS:
            contents.weights[parameter] = with_master(weight, x)
        elif request.optimizer:
            contents.states.setdefault(parameter, {})[key] = x
    if request.optimizer and contents.states:
        if request.step is None:
            raise CheckpointError(
                f"{path}: how many steps were taken is not said where it can be read; give step, "
                "which is the iteration, or optimizer=False for the weights alone"
            )
        for state in contents.states.values():
            state["step"] = float(request.step)
    return contents


# ------------------------------------------------------------ torch.distributed.checkpoint


def _entry(name: str, kind: Any, path: Path, places: dict[Any, Any], verify: bool) -> Entry:
    parts = [(chunk, places.get((name, chunk.offsets))) for chunk in kind.chunks]
    if sum(chunk.sizes.numel() for chunk, _ in parts) != kind.size.numel():
        raise CheckpointError(f"the parts of {name} in {path} do not make a tensor of {kind.size}")

    def read() -> Tensor:
        x = torch.empty(kind.size, dtype=kind.properties.dtype)
        for chunk, place in parts:
            if place is None or getattr(place, "transform_descriptors", None):
                raise CheckpointError(f"a part of {name} in {path} is missing, or is compressed")
            part = _part(path / place.relative_path, place, verify)
            if part.shape != chunk.sizes or part.dtype != x.dtype:
                raise CheckpointError(f"a part of {name} in {path} is not what .metadata says")
            where = zip(chunk.offsets, chunk.sizes, strict=True)
            x[tuple(slice(start, start + size) for start, size in where)] = part
        return x

    return Entry(name, PLAIN[kind.properties.dtype], kind.size, read)


def _part(file: Path, place: Any, verify: bool) -> Tensor:
    if file.name != place.relative_path:
        raise CheckpointError(f"{file} is not in the folder of its .metadata")
    with reading(file), file.open("rb") as opened:
        opened.seek(place.offset)
        content = io.BytesIO(opened.read(place.length))
        if verify and zipfile.ZipFile(content).testzip() is not None:
            raise CheckpointError(
                f"{file} is damaged, or was altered: a tensor does not have the CRC-32 that is "
                "said. verify=False reads it all the same"
            )
        content.seek(0)
        x: Tensor = torch.load(content, map_location="cpu", weights_only=True)
        return x


_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)),
    "collections": ("OrderedDict",),
}
"""What `.metadata` is made of."""


class _Unpickler(pickle.Unpickler):
    """Reads what `.metadata` holds, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that `.metadata` may hold."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        # Where it was saved, and classes of Megatron's own, whose attributes are enough.
        if module == "pathlib" or module.startswith("megatron."):
            return _Ignored
        raise CheckpointError(f".metadata holds a {module}.{name}, which is not unpickled")


class _Ignored:
    def __init__(self, *args: Any) -> None:
        """Whatever it was."""
