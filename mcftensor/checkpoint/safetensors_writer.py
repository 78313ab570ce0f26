"""The safetensors format, written tensor by tensor.

A file is the length of a header, the header in JSON, which says where in the rest each tensor is,
and that rest (https://github.com/huggingface/safetensors#format). The package of this name writes
to a file of its own making, which it renames, so that neither its mode nor its lock is ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mcftensor.checkpoint.digests import KEY, content_of, digest, sealed

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

_HEADER_MOST = 100_000_000  # of which the package reads no longer ones


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
