"""The layout of a checkpoint and its reader: this library's own layouts first.

State dicts of weights are read here: safetensors and files of torch.save, whole or in several
files with an index as transformers writes them, `model.safetensors.index.json` and
`pytorch_model.bin.index.json`. float32 weights of mixed precision are these: the model's under
torch.amp, and the output of DeepSpeed's `zero_to_fp32.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mcftensor.checkpoint import torch_optimizers
from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading
from mcftensor.checkpoint.entries import Contents, Request, entries_in, entries_of
from mcftensor.checkpoint.open_checkpoint import IN_FOLDERS, in_shards
from mcftensor.checkpoint.pickle_checks import require_whole
from mcftensor.checkpoint.safetensors_files import files_in, index_of, is_safetensors, opened
from mcftensor.wings import wing_or_none

Reader = Callable[[Path, Request], Contents]


def read_checkpoint(path: Path, request: Request) -> Contents:
    """Read the checkpoint that a path stands for: a file, an index, or a folder."""
    with reading(path):
        if index_of(path).is_file():
            path = index_of(path)
        contents = _reader(path)(path, request)
        contents.require_known(request.parameters)
        contents.require_fitting_moments(request.parameters)
        return contents


def _reader(path: Path) -> Reader:
    if path.suffix == ".json":
        return _read_shards
    if path.is_file():
        return _read_safetensors if is_safetensors(path) else torch_optimizers.read_file
    if not path.is_dir():
        raise CheckpointError(f"cannot read {path}: No such file or directory")
    if any((path / name).is_file() for name in IN_FOLDERS):
        return _read_folder
    if bridge := wing_or_none("bridge"):
        reader: Reader | None = bridge.reader_of(path)
        if reader is not None:
            return reader
    raise CheckpointError(
        f"the folder {path} holds none of {', '.join(IN_FOLDERS)}, and is no checkpoint of "
        "DeepSpeed, Megatron (torch_dist) or torch.distributed.checkpoint; name the file itself"
    )


def _read_safetensors(path: Path, request: Request) -> Contents:
    """Read a file, or the files of an index."""
    stored = opened(path, request.verify)
    weights = entries_in(stored.terms, request, request.verify and stored.seal is not None)
    return Contents("safetensors", weights, tied=stored.tied)


def _read_shards(index: Path, request: Request) -> Contents:
    """Read the files of an index, of either kind."""
    files = files_in(index, json.loads(index.read_text(encoding="utf-8")))
    places = [index.parent / file for file in dict.fromkeys(files.values())]
    if all(map(is_safetensors, places)):
        return _read_safetensors(index, request)
    for place in places if request.verify else ():
        require_whole(place)
    return Contents("torch.save in shards", entries_of(in_shards(index), request))


def _read_folder(path: Path, request: Request) -> Contents:
    file = next(path / name for name in IN_FOLDERS if (path / name).is_file())
    contents = read_checkpoint(file, request)
    torch_optimizers.add_beside(contents, path, request)
    return contents
