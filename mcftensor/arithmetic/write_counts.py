"""Write counts for balanced rounding: the number of writes to a tensor, and its salt.

A count is a 0-d int64 tensor. Its last 32 bits are the number of writes. Its first 32 bits are the
salt, which makes the rounding sequences of different tensors unrelated: every element of every
tensor has a place in one line of 2^32, and the salt is the place of a tensor's first element. It is
a sum of hashes of names, and 0 if no name is known.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

_SALT = 32


def start(device: torch.device, name: str | None = None) -> Tensor:
    """Return the count of a tensor without writes."""
    salt = 0 if name is None else _salted(name)
    return torch.full((), salt, dtype=torch.int64, device=device)


def name_(count: Tensor, name: str, place: int) -> None:
    """Give a count without salt and writes the salt of a name, moved by `place` elements."""
    count += (count == 0) * (start(count.device, name) + (place << _SALT))


def unwritten(count: Tensor) -> Tensor:
    """Return the count with the same salt and no writes."""
    return count & -(1 << _SALT)


def count_beside(count: Tensor, name: str) -> Tensor:
    """Return the count of a new tensor that belongs to another one, such as an optimizer state."""
    return unwritten(count) + _salted(name)


def moved(count: Tensor, places: int) -> Tensor:
    """Return the count of a part that starts `places` elements after the first."""
    return count + (places << _SALT) if places else count


def writes_of(count: Tensor) -> Tensor:
    """The number of writes."""
    return count & ((1 << _SALT) - 1)


def salt_of(count: Tensor) -> Tensor:
    """The salt: the place of the first element."""
    return count >> _SALT


@functools.lru_cache(maxsize=1 << 16)
def _salted(name: str) -> int:
    """A hash of a name, shifted to the place of the salt."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True) << _SALT
