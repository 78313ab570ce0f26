"""Components shared by *blocks* of 32 elements of a row: shapes, maxima and repetition; and bytes
with two codes of a row.

A row holds the elements of one index of the first dimension. If its length is not a multiple of
32, its last block is shorter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcftensor.kernels.custom_ops import opaque

BLOCK_SIZE = 32
"""Elements of a block, as in the OCP Microscaling Formats (MX) specification 1.0."""


def shape_of_shared(shape: torch.Size) -> torch.Size:
    """Return the shape of a component that blocks share, for a tensor of some shape."""
    length = torch.Size(shape[1:]).numel()
    return torch.Size((*shape[:1], -(-length // BLOCK_SIZE)))


def _fake_of_blocks(x: Tensor) -> Tensor:
    return x.new_empty(shape_of_shared(x.shape))


@opaque(_fake_of_blocks, lays_out=True)
def block_max(x: Tensor) -> Tensor:
    """Return the maximum of each block of non-negative integers."""
    rows = x.reshape(x.shape[0], -1) if x.numel() else x.new_empty(x.shape[0], 0)
    rows = F.pad(rows, (0, -rows.shape[1] % BLOCK_SIZE)) if rows.shape[1] % BLOCK_SIZE else rows
    return rows.view(x.shape[0], -1, BLOCK_SIZE).amax(2) if rows.numel() else _fake_of_blocks(x)


@opaque(
    lambda shared, like: torch.empty_like(like, dtype=shared.dtype),
    lays_out=True,
)
def spread(shared: Tensor, like: Tensor) -> Tensor:
    """Repeat the shared value of each block for its elements, in the layout of another tensor."""
    made = torch.empty_like(like, dtype=shared.dtype)
    if not like.numel():
        return made
    length = torch.Size(like.shape[1:]).numel()
    rows = shared.view(like.shape[0], -1).repeat_interleave(BLOCK_SIZE, 1)[:, :length]
    return made.copy_(rows.reshape(like.shape))


def shape_of_packed(shape: torch.Size) -> torch.Size:
    """Return the shape of bytes that hold two codes each: half the second dimension."""
    return torch.Size((*shape[:1], shape[1] // 2, *shape[2:]))


def shape_of_codes(shape: torch.Size) -> torch.Size:
    """Return the shape of the codes in bytes of some shape."""
    return torch.Size((*shape[:1], 2 * shape[1], *shape[2:]))


def _pack_fake(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape if codes.dim() < 2 else shape_of_packed(codes.shape))


def _unpack_fake(packed: Tensor) -> Tensor:
    return packed.new_empty(packed.shape if packed.dim() < 2 else shape_of_codes(packed.shape))


@opaque(_pack_fake, lays_out=True)
def pack(codes: Tensor) -> Tensor:
    """Return bytes with two neighbours of a row each, the first one in the last bits.

    A vector, as which functions are recorded, is unchanged: programs have one code in each lane.
    """
    if codes.dim() < 2:
        return codes.clone()
    pairs = codes.reshape(codes.shape[0], codes.shape[1:].numel() // 2, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(shape_of_packed(codes.shape))


@opaque(_unpack_fake, lays_out=True)
def unpack(packed: Tensor) -> Tensor:
    """Return the codes in bytes with two each; a vector is unchanged."""
    if packed.dim() < 2:
        return packed.clone()
    return torch.stack([packed & 15, packed >> 4], -1).view(shape_of_codes(packed.shape))
