"""Which layout a checkpoint has, and who reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcftensor.checkpoint.bridge import (
    deepspeed,
    distcp,
    megatron,
    torch_optimizers,
    torchtitan,
    weights,
    zero,
)
from mcftensor.checkpoint.bridge.entries import Contents, Request
from mcftensor.checkpoint.errors import CheckpointError, reading
from mcftensor.checkpoint.reading import IN_FOLDERS, is_safetensors
from mcftensor.checkpoint.shards import index_of


@dataclass(frozen=True)
class Layout:
    """One way to store a checkpoint."""

    matches: Callable[[Path], bool]
    read: Callable[[Path, Request], Contents]


def _in_folder(path: Path) -> Path | None:
    return next((path / name for name in IN_FOLDERS if (path / name).is_file()), None)


def _read_folder(path: Path, request: Request) -> Contents:
    contents = read_checkpoint(_in_folder(path) or path, request)
    torch_optimizers.add_beside(contents, path, request)
    return contents


def _distributed(path: Path) -> Path | None:
    """The folder of `torch.distributed.checkpoint` that a path stands for."""
    found = path if (path / distcp.METADATA).is_file() else None
    return found or megatron.last_iteration(path) or torchtitan.last_step(path)


def _read_distributed(path: Path, request: Request) -> Contents:
    path = _distributed(path) or path
    folder = distcp.folder_at(path, request.verify)
    reader = megatron if megatron.matches(folder) else torchtitan
    return reader.read(path, folder, request)


LAYOUTS = (
    Layout(lambda path: path.is_dir() and _in_folder(path) is not None, _read_folder),
    Layout(deepspeed.matches, deepspeed.read),
    Layout(lambda path: zero.folder_of(path) is not None, zero.read),
    Layout(megatron.is_legacy, megatron.refuse_legacy),
    Layout(lambda path: _distributed(path) is not None, _read_distributed),
    Layout(lambda path: path.suffix == ".json", weights.read_shards),
    Layout(lambda path: path.is_file() and is_safetensors(path), weights.read_safetensors),
    Layout(lambda path: path.is_file(), torch_optimizers.read_file),
)
"""The first that matches reads."""


def read_checkpoint(path: Path, request: Request) -> Contents:
    """What a path stands for: a file, an index, or a folder."""
    with reading(path):
        if index_of(path).is_file():
            path = index_of(path)
        for layout in LAYOUTS:
            if layout.matches(path):
                contents = layout.read(path, request)
                contents.require_fitting_moments(request.parameters)
                return contents
        if path.is_dir():
            raise CheckpointError(
                f"the folder {path} holds none of {', '.join(IN_FOLDERS)}, and is no checkpoint of "
                "DeepSpeed, Megatron (torch_dist) or torch.distributed.checkpoint; "
                "name the file itself"
            )
        raise CheckpointError(f"cannot read {path}: No such file or directory")
