"""Incremental checkpoints: what changed in any component since another file, and its reader.

The file has the form of a delta, for all components instead of the leading ones, and names its
base. A reader opens the base, which may be incremental too, and puts each tensor together when it
is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.open_checkpoint import like_in, opened
from mcftensor.checkpoint.safetensors_files import (
    DELTA_KEY,
    DTYPE_OF,
    DTYPES,
    Lazy,
    Stored,
    index_of,
    open_safetensors,
)
from mcftensor.kernels.program import PATTERNS
from mcftensor.serving.changes import (
    bits_for,
    coded_changes,
    digest_of,
    digest_of_change,
    indices_of,
    mark_changes,
)
from mcftensor.serving.delta_files import DeltaEntry

# ---------------------------------------------------------------------------------------- saved


def changes_since(
    base: str | os.PathLike[str],
    terms: Mapping[str, Tensor],
    tied: Mapping[str, str],
    path: Path,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what a file of the changes of terms since a checkpoint has: tensors, and metadata.

    Raises:
        CheckpointError: a base that `save_file` has not written, that is damaged, or that is or
            needs the file to be written.
    """
    base = _file_of(Path(base))
    stored = opened(base, verify=True)
    if stored.seal is None:
        raise CheckpointError(
            f"save_file: {base} has no digests, by which a base is recognized; save it by "
            "mcf.save_file, whole, and give that file as since"
        )
    if any(x.exists() and path.exists() and x.samefile(path) for x in _chain_of(base)):
        raise CheckpointError(
            f"save_file: {path} is needed to read {base}, since which changes are saved; give "
            "another path"
        )
    tensors: dict[str, Tensor] = {}
    entries: dict[str, list[Any]] = {}
    for name, x in terms.items():
        own = _codes_of(x)
        like = like_in(stored.terms, name) if name in stored.terms else None
        is_there = like is not None and (like.dtype, like.shape) == (x.dtype, x.shape)
        changed, before, width = None, None, 0
        if is_there:
            was, bits = _codes_of(stored.terms[name]), bits_for(own)
            before = digest_of(was)
            mark_changes(bits, own, was)
            changed = coded_changes(bits, own)
        if changed is not None and changed[1].nbytes + changed[2].nbytes < own.nbytes:
            width, tensors[f"{name}.gaps"], codes = changed
            tensors[f"{name}.codes"] = codes.view(x.dtype)
        elif changed is not None or not is_there:
            tensors[f"{name}.codes"] = own.view(x.dtype)
        entry = DeltaEntry(
            DTYPES[x.dtype], list(x.shape), 0, len(own), width, before, digest_of(own)
        )
        entries[name] = list(vars(entry).values())
    since = {"file": Path(os.path.relpath(base, path.parent)).as_posix(), "crc32": stored.seal}
    said = {"number": 0, "anchor": False, "since": since, "tied": tied, "parameters": entries}
    return tensors, {DELTA_KEY: json.dumps(said, separators=(",", ":"))}


def _codes_of(x: Tensor) -> Tensor:
    """The bits of a tensor's elements on the CPU, flat."""
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return x.view(PATTERNS[x.element_size()])


def _file_of(base: Path) -> Path:
    """The file, or the index, of a checkpoint."""
    if base.is_dir():
        base = base / "model.safetensors"
    return index_of(base) if index_of(base).is_file() else base


def _chain_of(path: Path) -> list[Path]:
    """A checkpoint and all that are needed to read it."""
    said = None if path.suffix == ".json" else _said_in(open_safetensors(path, verify=True))
    return [path, *(_chain_of(path.parent / said["since"]["file"]) if said else [])]


# ---------------------------------------------------------------------------------------- read


def put_together(path: Path, stored: Stored, verify: bool, above: tuple[Path, ...]) -> Stored:
    """Return the content of an incremental file with that of all that it is based on.

    `above` are the files that name it as their base.
    """
    above = (*above, path.resolve())
    said = _said_in(stored)
    if said is None or "since" not in said:
        raise CheckpointError(f"{path} is a delta of a plain model; mcf.apply_deltas applies it")
    place = path.parent / said["since"]["file"]
    if not place.is_file():
        raise CheckpointError(
            f"{path} has what changed since {place}, which is missing; put it back"
        )
    if place.resolve() in above:
        raise CheckpointError(f"{path} has what changed since {place}, which is based on it")
    base = opened(place, verify, above)
    if verify and base.seal != said["since"]["crc32"]:
        raise CheckpointError(
            f"{place} is not the checkpoint since which the changes in {path} were saved: it has "
            "another digest; put that one back"
        )
    entries = {name: DeltaEntry(*x) for name, x in said["parameters"].items()}

    def require(name: str, holds: bool, which: str) -> None:
        if verify and not holds:
            raise CheckpointError(f"{path} does not fit {place}: {name} has another digest {which}")

    def read(name: str) -> Tensor:
        entry, codes = entries[name], f"{name}.codes"
        if f"{name}.gaps" in stored.terms or codes not in stored.terms:
            x = base.terms[name].clone()
            own = _codes_of(x)
            before = digest_of(own) if verify else None
            require(name, before == entry.before, "before")
            if codes in stored.terms:
                at = indices_of(stored.terms[f"{name}.gaps"], entry.width)
                new = _codes_of(stored.terms[codes])
                if before is not None:
                    after = (before + digest_of_change(at, own[at], new)) % 2**64
                    require(name, after == entry.after, "after")
                own[at] = new
            else:
                require(name, before == entry.after, "after")
            return own.view(x.dtype).view(x.shape)
        x = stored.terms[codes]
        require(name, not verify or digest_of(x) == entry.after, "after")
        return x.view(entry.shape)

    def like(name: str) -> Tensor:
        entry = entries[name]
        return torch.empty(entry.shape, dtype=DTYPE_OF[entry.dtype], device="meta")

    return replace(stored, terms=Lazy(entries, read, like), tied=said["tied"])


def _said_in(stored: Stored) -> dict[str, Any] | None:
    """Return the entry on changes in the metadata of a file."""
    said: dict[str, Any] | None = json.loads(stored.metadata.get(DELTA_KEY, "null"))
    return said
