"""The counts that balanced rounding goes by: how often a tensor was written to, and which it is.

A count is an int64 without dimensions. Its last 32 bits are a number of writes. The others are the
salt, by which tensors round by sequences that have nothing to do with each other: every element of
every tensor has a place in one line of 2^32, and the salt is that of a tensor's first one. It is a
sum of hashes of names, and 0 where none is known.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

_SALT = 32


def start(device: torch.device, name: str | None = None) -> Tensor:
    """The count of a tensor that has not been written to."""
    salt = 0 if name is None else _salted(name)
    return torch.full((), salt, dtype=torch.int64, device=device)


def name_(count: Tensor, name: str, place: int) -> None:
    """Give a tensor that has neither salt nor writes the salt of a name, from a place on."""
    count += (count == 0) * (start(count.device, name) + (place << _SALT))


def unwritten(count: Tensor) -> Tensor:
    """The same salt, and no writes."""
    return count & -(1 << _SALT)


def count_beside(count: Tensor, name: str) -> Tensor:
    """The count of a new tensor of some name that belongs to another one, as states of optimizers
    do."""
    return unwritten(count) + _salted(name)


def moved(count: Tensor, places: int) -> Tensor:
    """The count of what begins some elements after the first."""
    return count + (places << _SALT) if places else count


def writes_of(count: Tensor) -> Tensor:
    """The number of writes."""
    return count & ((1 << _SALT) - 1)


def salt_of(count: Tensor) -> Tensor:
    """The place of the first element."""
    return count >> _SALT


@functools.lru_cache(maxsize=1 << 16)
def _salted(name: str) -> int:
    """A hash of a name in the place of the salt."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True) << _SALT
