"""Digests by which altered files are told: CRC-32, which is faster than any disk.

They are against accidents. Whoever alters a file on purpose can write new ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError

KEY = "mcftensor"
"""Under what name a file's metadata hold what is said here."""

_VERSION = 1


def digest(name: str, x: Tensor) -> str:
    """Of a plain tensor on the CPU: its name, dtype, shape and bytes."""
    kind = f"{name} {x.dtype} {tuple(x.shape)}"
    return f"{zlib.crc32(content_of(x), zlib.crc32(kind.encode())):08x}"


def content_of(x: Tensor) -> memoryview:
    """The bytes of a plain tensor on the CPU, in the order of its elements."""
    x = x.resolve_conj().resolve_neg().contiguous()
    return x.reshape(-1).view(torch.uint8).numpy().data


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with their own digest."""
    content = {"version": _VERSION, **content}
    return {**content, "crc32": _of(content)}


def unsealed(where: object, content: Any) -> dict[str, Any]:
    """Metadata that `sealed` has made; CheckpointError if altered, or of a later version."""
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
