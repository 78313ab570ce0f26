"""Files of safetensors, opened: what they hold, each tensor checked when it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError, some
from mcftensor.checkpoint.digests import KEY, digest, unsealed
from mcftensor.checkpoint.open_checkpoint import Lazy, open_safetensors
from mcftensor.checkpoint.shards import files_in


@dataclass(frozen=True)
class Stored:
    """Components by name, names that stand for the tensor of another one, texts, and the digest
    of all, which files of other programs lack."""

    terms: Lazy
    tied: dict[str, str]
    metadata: dict[str, str]
    seal: str | None


def opened(path: Path, verify: bool) -> Stored:
    """A file, or those that an index names."""
    return (_opened_shards if path.suffix == ".json" else _opened_file)(path, verify)


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
