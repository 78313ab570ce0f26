"""Folders of `torch.distributed.checkpoint`: the index `.metadata`, and the data in `*.distcp`.

A tensor consists of parts; each part is a file of torch.save within a file. Other objects are
stored in the same way. Read: PyTorch 2.13.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading
from mcftensor.checkpoint.entries import Entry
from mcftensor.checkpoint.pickle_checks import MOST, require_bounded, require_pickle
from mcftensor.checkpoint.safetensors_files import DTYPES
from mcftensor.formats import PLAIN

METADATA = ".metadata"


@dataclass(frozen=True)
class Folder:
    """The contents of a folder by name: tensors, and readers of other objects."""

    tensors: dict[str, Entry]
    objects: dict[str, Callable[[], Any]]
    paths: dict[str, tuple[Any, ...]]
    """By which keys each was found in the state dict that was saved."""


def folder_at(path: Path, verify: bool) -> Folder:
    """Open a folder; read only `.metadata`."""
    with reading(path / METADATA), (path / METADATA).open("rb") as file:
        require_pickle(file, path / METADATA)
        found = _Unpickler(file).load()
        places = {(i.fqn, i.offset): place for i, place in found.storage_data.items()}
        kinds = found.state_dict_metadata.items()
        tensors = {
            name: _entry(name, kind, path, places, verify)
            for name, kind in kinds
            if isinstance(kind, TensorStorageMetadata)
        }
        available = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
        claimed = sum(x.shape.numel() * x.format.bytes for x in tensors.values())
        if claimed > MOST * available:
            raise CheckpointError(
                f"{path / METADATA} says that there are {claimed:,} bytes of tensors, and all "
                f"files in the folder have {available:,}"
            )
        objects: dict[str, Callable[[], Any]] = {
            name: partial(_content, name, path, places.get((name, None)), verify)
            for name, _ in kinds
            if name not in tensors
        }
        paths = dict(found.planner_data or {name: (name,) for name, _ in kinds})
        for name, _ in kinds:
            if ".".join(map(str, paths[name])) != name:
                raise CheckpointError(f"{name} is called {paths[name]} there, too")
    return Folder(tensors, objects, paths)


def _entry(name: str, kind: Any, path: Path, places: dict[Any, Any], verify: bool) -> Entry:
    parts = [(chunk, places.get((name, chunk.offsets))) for chunk in kind.chunks]
    if not _cover([chunk for chunk, _ in parts], kind.size):
        raise CheckpointError(f"the parts of {name} in {path} do not make a tensor of {kind.size}")
    dtype = kind.properties.dtype

    def part(chunk: Any, place: Any) -> Tensor:
        x = _content(name, path, place, verify)
        if not isinstance(x, Tensor) or x.shape != chunk.sizes or x.dtype != dtype:
            raise CheckpointError(f"a part of {name} in {path} is not what .metadata says")
        return x

    def read() -> Tensor:
        if len(parts) == 1:
            return part(*parts[0])
        x = torch.empty(kind.size, dtype=dtype, device="cpu")
        for chunk, place in parts:
            where = zip(chunk.offsets, chunk.sizes, strict=True)
            x[tuple(slice(start, start + size) for start, size in where)] = part(chunk, place)
        return x

    return Entry(name, PLAIN[dtype], kind.size, read)


def _cover(chunks: list[Any], size: torch.Size) -> bool:
    """Whether parts make a whole: all are in it, they have its size together, and none meet."""
    boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
    for i, (start, length) in enumerate(boxes):
        if any(a < 0 or a + n > whole for a, n, whole in zip(start, length, size, strict=True)):
            return False
        for other, its_length in boxes[i + 1 :]:
            if start[0] + length[0] <= other[0]:
                break
            sides = zip(start, length, other, its_length, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in sides):
                return False
    return sum(torch.Size(length).numel() for _, length in boxes) == size.numel()


def _content(name: str, path: Path, place: Any, verify: bool) -> Any:
    if place is None or getattr(place, "transform_descriptors", None):
        raise CheckpointError(f"a part of {name} in {path} is missing, or is compressed")
    file = path / str(place.relative_path)
    if file.name != place.relative_path:
        raise CheckpointError(f"{file} is not in the folder of its .metadata")
    with reading(file), file.open("rb") as whole:
        content = io.BufferedReader(_Window(whole, place.offset, place.length))
        if verify and zipfile.ZipFile(content).testzip() is not None:
            raise CheckpointError(
                f"{file} is damaged, or was altered: {name} does not have the CRC-32 that is "
                "said. verify=False reads it all the same"
            )
        content.seek(0)
        require_bounded(content, place.length, file)
        return torch.load(content, map_location="cpu", weights_only=True)


class _Window(io.RawIOBase):
    """A part of a file as a file; only the requested bytes are in memory."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self.file, self.start, self.length, self.place = file, start, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Seek, as in any file."""
        self.place = offset + (0, self.place, self.length)[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, as from any file."""
        self.file.seek(self.start + self.place)
        count = self.file.readinto(memoryview(buffer)[: max(0, self.length - self.place)])
        self.place += count
        return count


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
"""The classes and functions that `.metadata` may name."""


class _Unpickler(pickle.Unpickler):
    """Reads what `.metadata` holds, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that `.metadata` may contain."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        # Where it was saved, and classes of Megatron's own, whose attributes are enough.
        if module == "pathlib" or module.startswith("megatron."):
            return _Ignored
        raise CheckpointError(f".metadata holds a {module}.{name}, which is not unpickled")


class _Ignored:
    def __init__(self, *args: Any) -> None:
        """Ignore all arguments."""
