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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError, extra, reading, some
from mcftensor.wings import wing

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


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        like: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.names = dict.fromkeys(names)
        self.read = read
        self.like = like or (lambda name: read(name).to("meta"))
        """A tensor without data of the dtype and the shape of a stored one."""

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's own would read the tensor.


def open_safetensors(path: Path, caller: str) -> tuple[Lazy, dict[str, str]]:
    """Open a safetensors file, and return its stored tensors, term by term, and its metadata."""

    def read(name: str) -> Tensor:
        with reading(path):
            return file.get_tensor(name)

    def like(name: str) -> Tensor:
        with reading(path):
            header = file.get_slice(name)
            dtype = _DTYPES[header.get_dtype()]
            return torch.empty(header.get_shape(), dtype=dtype, device="meta")

    with reading(path):
        file = extra("safetensors", caller).safe_open(path, framework="pt", device="cpu")
        return Lazy(file.keys(), read, like), file.metadata() or {}


_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Components by name, names that stand for the tensor of another one, texts, and the digest
    of all, which files of other programs lack."""

    terms: Lazy
    tied: dict[str, str]
    metadata: dict[str, str]
    seal: str | None


def opened_files(path: Path, verify: bool) -> Stored:
    """Open a file, or the files of an index."""
    stored = (_opened_shards if path.suffix == ".json" else _opened_file)(path, verify)
    return stored if DELTA_KEY in stored.metadata else with_ties(stored, path)


def opened(path: Path, verify: bool) -> Stored:
    """Open a file, or the files of an index, with all that an incremental one is based on."""
    stored = opened_files(path, verify)
    if DELTA_KEY not in stored.metadata:
        return stored
    whole: Stored = wing("serving").put_together(path, verify)
    return whole


def with_ties(stored: Stored, path: Path) -> Stored:
    """Return what a file stores; CheckpointError if a tied name stands for no tensor of it."""
    for alias, name in stored.tied.items():
        if alias in stored.terms or name not in stored.terms:
            raise CheckpointError(f"{path} says that {alias} is tied to {name}, which cannot be")
    return stored


def _opened_file(path: Path, verify: bool) -> Stored:
    file, metadata = open_safetensors(path, "load_file")
    if KEY not in metadata:
        if verify and any('"crc32": "' in text for text in metadata.values()):
            raise CheckpointError(f"{path} is damaged: its digests are not under {KEY}")
        return Stored(file, {}, metadata, None)
    sealed = json.loads(metadata[KEY])
    if not verify:
        return Stored(file, sealed["tied"], metadata, sealed["crc32"])
    digests = unsealed(path, sealed)["tensors"]

    def require(name: str, holds: bool) -> None:
        if not holds:
            raise CheckpointError(
                f"{path} is damaged, or was altered: the digests of {name} are not what it says. "
                "verify=False reads it all the same"
            )

    def read(name: str) -> Tensor:
        x = file[name]
        require(name, digests.get(name) == digest(name, x))
        return x

    for name in digests:
        require(name, name in file)
    return Stored(Lazy(file, read, file.like), sealed["tied"], metadata, sealed["crc32"])


def _opened_shards(index: Path, verify: bool) -> Stored:
    content = json.loads(index.read_text(encoding="utf-8"))
    files = files_in(index, content)
    metadata = content.get("metadata")
    texts: dict[str, str] = {}
    seal, seals = None, {}
    if isinstance(metadata, dict):
        texts = {name: x for name, x in metadata.items() if isinstance(x, str)}
    if isinstance(metadata, dict) and KEY in metadata:
        sealed = metadata[KEY]
        seal, seals = sealed["crc32"], sealed["shards"]
        if verify:
            unsealed(index, sealed | {"weight_map": files})
    places: dict[str, Lazy] = {}
    tied: dict[str, str] = {}
    for file in dict.fromkeys(files.values()):
        shard = _opened_file(index.parent / file, verify)
        if verify and seals.get(file) != (shard.seal if seals else None):
            raise CheckpointError(
                f"{index.parent / file} is not the file that {index} was written for"
            )
        named = [name for name, place in files.items() if place == file]
        missing = [name for name in named if name not in shard.terms]
        if missing:
            raise CheckpointError(
                f"{index} says that {some(missing)} is in {file}, which does not hold it"
            )
        places |= dict.fromkeys(named, shard.terms)
        tied |= shard.tied
    terms = Lazy(places, lambda name: places[name][name], lambda name: places[name].like(name))
    return Stored(terms, tied, texts, seal)
