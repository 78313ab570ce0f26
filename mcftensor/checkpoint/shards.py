"""Checkpoints in several files, with an index that says what is where.

Names and index are those of Hugging Face, `model.safetensors.index.json`, with one difference: the
names of shards hold a token, new for every checkpoint, so that those of the last one stay whole
until the index names the new ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mcftensor.checkpoint.atomic_files import remove_abandoned, synchronize
from mcftensor.checkpoint.checkpoint_error import CheckpointError, some
from mcftensor.checkpoint.state_dicts import names_of_terms

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 2 ** (10 * i) for i, unit in enumerate("KMGT", 1)}


def size_in_bytes(size: int | str, of: str = "save_file: max_shard_size") -> int:
    """Of a size such as 5_000_000_000, "5GB" or "512MiB"; ValueError for what is none."""
    text = str(size).strip().upper()
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)\s*([KMGT]I?)B", text)
    number, unit = (match[1] or match[2], match[3] or "") if match else ("0", "")
    found = int(float(number) * _UNITS[unit])
    if found <= 0:
        raise ValueError(f"{of} is {size!r}; give bytes, or a size such as '5GB'")
    return found


def divide(terms: Mapping[str, Tensor], most: int | None) -> list[list[str]]:
    """Names of terms, in their order, in shards of at most so many bytes.

    The terms of one number stay together, also where they are more than that.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for names in names_of_terms(terms).values():
        size = sum(terms[name].nbytes for name in names)
        if most is not None and shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].extend(names)
        filled += size
    return shards


def index_of(path: Path) -> Path:
    """Where the index of a checkpoint is that is in several files."""
    return path.with_name(f"{path.name}.index.json")


def files_in(index: Path, content: Any) -> dict[str, str]:
    """In which file, beside the index, each tensor is; CheckpointError unless all are there."""
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


def remove_stale(path: Path, previous: Iterable[str]) -> None:
    """Remove what no index names: shards of the last one, and what killed writers have left."""
    stem, suffix = re.escape(path.stem), re.escape(path.suffix)
    shard = rf"{stem}-([0-9a-f]{{8}}-)?\d{{5}}-of-\d{{5}}{suffix}"
    unfinished = rf"\.({shard}|{stem}{suffix}(\.index\.json)?)\.[0-9a-f]{{8}}\.tmp"

    def is_named(file: Path) -> bool:
        named = files_named(index_of(path))
        return named is None or file.name in named

    for file in path.parent.iterdir():
        match = re.fullmatch(shard, file.name)
        if match and file.name in previous and not is_named(file):
            file.unlink(missing_ok=True)
        elif (match and match[1]) or re.fullmatch(unfinished, file.name):
            remove_abandoned(file, is_named)
    synchronize(path.parent)


def files_named(index: Path) -> set[str] | None:
    """The files that an index names, also one that is not there or damaged; None where it cannot be
    read, as with too many files open, so that nobody can say."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return set()
    except OSError:
        return None
