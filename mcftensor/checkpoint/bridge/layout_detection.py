"""Which layout a checkpoint has, and who reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcftensor.checkpoint.bridge import torch_optimizers, weight_files
from mcftensor.checkpoint.bridge.entries import Contents, Layout, Request
from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading
from mcftensor.checkpoint.open_checkpoint import IN_FOLDERS, is_safetensors
from mcftensor.checkpoint.shards import index_of


def _in_folder(path: Path) -> Path | None:
    return next((path / name for name in IN_FOLDERS if (path / name).is_file()), None)


def _read_folder(path: Path, request: Request) -> Contents:
    contents = read_checkpoint(_in_folder(path) or path, request)
    torch_optimizers.add_beside(contents, path, request)
    return contents


FILES = (
    Layout(lambda path: path.suffix == ".json", weight_files.read_shards),
    Layout(lambda path: path.is_file() and is_safetensors(path), weight_files.read_safetensors),
    Layout(lambda path: path.is_file(), torch_optimizers.read_file),
    Layout(lambda path: _in_folder(path) is not None, _read_folder),
)
"""Those of this library and of files; the first that matches reads."""


def _layouts(path: Path) -> Iterable[Layout]:
    yield from FILES
    if path.is_dir():
        from mcftensor.checkpoint.bridge.foreign_folders import FOLDERS

        yield from FOLDERS


def read_checkpoint(path: Path, request: Request) -> Contents:
    """What a path stands for: a file, an index, or a folder."""
    with reading(path):
        if index_of(path).is_file():
            path = index_of(path)
        for layout in _layouts(path):
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
