"""Safetensors files: written tensor by tensor with digests, read with each tensor checked.

A file consists of the length of a header, the header in JSON with the offset of each tensor, and
the data (https://github.com/huggingface/safetensors#format). The package safetensors creates and
renames a file by itself, and would not keep the mode and the lock of this library.

Digests are CRC-32, which is faster than any disk, of each tensor and of the metadata. They are
against accidents: whoever alters a file on purpose can write new ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError, extra, reading

KEY = "mcftensor"
"""Under what name a file's metadata hold what is said here."""

DELTA_KEY = "mcftensor.delta"
"""Under what name the metadata of a file of changes describe them."""

_VERSION = 1


def digest(name: str, x: Tensor) -> str:
    """Return the digest of a plain tensor on the CPU: of its name, dtype, shape and bytes."""
    kind = f"{name} {x.dtype} {tuple(x.shape)}"
    return f"{zlib.crc32(content_of(x), zlib.crc32(kind.encode())):08x}"


def content_of(x: Tensor) -> memoryview:
    """Return the bytes of a plain tensor on the CPU, in the order of its elements."""
    x = x.resolve_conj().resolve_neg().contiguous()
    return x.reshape(-1).view(torch.uint8).numpy().data


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with their digest."""
    content = {"version": _VERSION, **content}
    return {**content, "crc32": _of(content)}


def unsealed(where: object, content: Any) -> dict[str, Any]:
    """Return metadata without the digest; CheckpointError if altered, or of a later version."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: the metadata under {KEY} are damaged")
    content = dict(content)
    seal = content.pop("crc32", None)
    if seal != _of(content):
        raise CheckpointError(
            f"{where} is damaged, or was altered: the metadata under {KEY} do not have the digest "
            "that they say. verify=False reads it all the same"
        )
    if content["version"] != _VERSION:
        raise CheckpointError(
            f"{where} was written by a later version of mcftensor; install a newer one"
        )
    return content


def _of(content: Any) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


# ----------------------------------------------------------------------------------- written

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}

RESERVED = "__metadata__"
"""The one name that no tensor can have."""

_HEADER_MOST = 100_000_000  # the longest header that the package safetensors reads


def write(
    file: BinaryIO,
    likes: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    tied: dict[str, str],
    metadata: dict[str, str],
) -> str:
    """Write plain tensors to an empty file, as they come, in any order.

    Of each, `likes` has one of its dtype and shape. Returns the digest of what the metadata say of
    them, their own digests included.
    """
    # Every tensor starts at a multiple of the size of its elements.
    names = sorted(likes, key=lambda name: -likes[name].dtype.itemsize)
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        x = likes[name]
        start, end = end, end + x.nbytes
        entries[name] = {
            "dtype": DTYPES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }

    def header(digests: dict[str, str]) -> tuple[bytes, str]:
        seal = sealed({"tied": tied, "tensors": digests})
        content = {RESERVED: {**metadata, KEY: json.dumps(seal)}, **entries}
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, seal["crc32"]

    # Digests are known when all is written, and do not change its length.
    length = len(header(dict.fromkeys(names, "0" * 8))[0])
    if length > _HEADER_MOST:
        raise ValueError(
            f"save_file: the names of {len(names)} tensors are too many for one file; divide it "
            "with max_shard_size"
        )
    digests = {}
    for name, x in tensors:
        x = x.detach().cpu().contiguous()
        digests[name] = digest(name, x)
        file.seek(length + entries[name]["data_offsets"][0])
        file.write(content_of(x))
    first, seal = header({name: digests[name] for name in names})
    file.seek(0)
    file.write(first)
    return seal


# -------------------------------------------------------------------------------------- read


def is_safetensors(path: Path) -> bool:
    """Whether a file is one of safetensors, or says so."""
    with path.open("rb") as file:
        head = file.read(9)
    # It starts with the length of its header in eight bytes; that is JSON.
    return path.suffix == ".safetensors" or head[4:] == b"\0\0\0\0{"


def index_of(path: Path) -> Path:
    """Return the path of the index of a checkpoint in several files."""
    return path.with_name(f"{path.name}.index.json")


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        like: Callable[[str], Tensor],
    ) -> None:
        self.names = dict.fromkeys(names)
        self.read = read
        self.like = like
        """A tensor without data of the dtype and the shape of a stored one."""

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's own would read the tensor.


@dataclass(frozen=True)
class Stored:
    """The content of a checkpoint: plain tensors by name, each read at its access, and names that
    stand for the tensor of another one."""

    layout: str
    terms: Mapping[str, Tensor]
    tied: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    seal: str | None = None
    """The digest of all tensors, which files of other programs lack."""
    optimizers: dict[str, Any] = field(default_factory=dict)
    """State dicts of optimizers in the same file."""


def open_safetensors(path: Path, verify: bool) -> Stored:
    """Open a safetensors file; each tensor is compared with its digest when it is read."""
    with reading(path):
        file = extra("safetensors", f"cannot read {path}").safe_open(path, "pt", device="cpu")
        metadata = file.metadata() or {}
        names = dict.fromkeys(file.keys())
        sealed = json.loads(metadata[KEY]) if KEY in metadata else None
        if verify and sealed is None and any('"crc32": "' in text for text in metadata.values()):
            raise CheckpointError(f"{path} is damaged: its digests are not under {KEY}")
        digests = unsealed(path, sealed)["tensors"] if verify and sealed is not None else None
        tied, seal = (sealed["tied"], sealed["crc32"]) if sealed is not None else ({}, None)

    def require(name: str, holds: bool) -> None:
        if not holds:
            raise CheckpointError(
                f"{path} is damaged, or was altered: the digests of {name} are not what it says. "
                "verify=False reads it all the same"
            )

    def read(name: str) -> Tensor:
        with reading(path):
            x: Tensor = file.get_tensor(name)
            require(name, digests is None or digests.get(name) == digest(name, x))
            return x

    def like(name: str) -> Tensor:
        with reading(path):
            header = file.get_slice(name)
            dtype = DTYPE_OF[header.get_dtype()]
            return torch.empty(header.get_shape(), dtype=dtype, device="meta")

    for name in digests or ():
        require(name, name in names)
    return Stored("safetensors", Lazy(names, read, like), tied, metadata, seal)
