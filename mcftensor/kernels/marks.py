"""Marks: a bit for each element of a watched tensor, set when a kernel changes the element.

Kernels look up the addresses that they write to among the watched tensors. They compare the old
pattern with the new one as they store it, so no copy of the old values is needed.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcftensor.kernels.columns import is_bare
from mcftensor.kernels.program import PATTERNS

# Elements at a multiple of which kernels begin to write: threads share no byte of marks.
_ALIGNED = 64


class Marks:
    """The elements of a contiguous tensor whose bits have changed since the last `clear`.

    Attributes:
        bits: the marks, on the device of the tensor; element i has bit i % 8 of byte i // 8.
        is_blind: whether the tensor may have been written to without marks.
    """

    def __init__(self, x: Tensor) -> None:
        self.address, self.length, self.width = x.data_ptr(), x.numel(), x.element_size()
        self.bits = bits_for(x)
        self._version = x._version
        self.is_blind = False

    def clear(self, x: Tensor) -> None:
        """Clear all marks of the tensor x."""
        self.bits.zero_()
        self._version, self.is_blind = x._version, False

    def look(self, x: Tensor) -> None:
        """Set `is_blind` if an operation of PyTorch has written to the tensor."""
        self.is_blind |= x._version != self._version

    def compare(self, x: Tensor, new: Tensor, start: int) -> None:
        """Mark the elements of x, a part that begins at `start`, that `new` will change."""
        self.look(x)
        packed = packed_bits(changed_elements(x, new.to(x.device, x.dtype)))
        self.bits[start // 8 : start // 8 + len(packed)] |= packed

    def stored(self, x: Tensor) -> None:
        """Accept the write that `compare` has marked, which PyTorch has counted."""
        self._version = x._version


def bits_for(x: Tensor) -> Tensor:
    """Return cleared marks for all elements of a tensor."""
    size = -(-x.numel() // _ALIGNED) * _ALIGNED // 8
    return torch.zeros(size, dtype=torch.uint8, device=x.device)


def changed_elements(x: Tensor, y: Tensor) -> Tensor:
    """Return a flat mask of the elements that differ in their bits, of tensors of one dtype."""
    pattern = PATTERNS[x.element_size()]
    return (x.view(pattern) != y.view(pattern)).reshape(-1)


def packed_bits(changed: Tensor) -> Tensor:
    """Return a mask as bits, the first element in the lowest bit of the first byte.

    Shapes: (n,) to (ceil(n / 8),).
    """
    whole = torch.nn.functional.pad(changed.to(torch.uint8), (0, -len(changed) % 8))
    places = torch.arange(8, dtype=torch.uint8, device=changed.device)
    return (whole.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def unpacked_bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes, the lowest of each byte first.

    Shapes: (n,) to (8 n,).
    """
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).flatten()


class Mark(NamedTuple):
    """The position of a written tensor within a watched one."""

    marks: Marks
    start: int

    @property
    def address(self) -> int:
        """The address of the first mark."""
        return self.marks.bits.data_ptr() + self.start // 8


_watched: weakref.WeakValueDictionary[int, Marks] = weakref.WeakValueDictionary()
watched_addresses: list[int] = []
"""The addresses of the watched tensors, in order; empty if no tensor is watched."""


def watch(x: Tensor) -> Marks:
    """Have kernels mark their changes of a contiguous tensor, as long as the marks exist.

    Raises:
        RuntimeError: the tensor is watched already.
    """
    marks = Marks(x)
    if _at(marks.address) is not None:
        raise RuntimeError(f"a tensor of shape {tuple(x.shape)} is watched already")
    if marks.length:
        _watched[marks.address] = marks
        watched_addresses[:] = sorted(_watched)
    return marks


def _at(address: int) -> Marks | None:
    """Return the marks of the watched tensor that contains an address, or None."""
    i = bisect_right(watched_addresses, address)
    marks = _watched.get(watched_addresses[i - 1]) if i else None
    inside = marks is not None and address < marks.address + marks.width * marks.length
    return marks if inside else None


def marks_of(width: int, lengths: Sequence[int], addresses: Sequence[int]) -> list[Mark | None]:
    """Return the marks of tensors by their lengths and addresses; `width` is bytes an element."""
    if not _watched:
        watched_addresses.clear()
        return [None] * len(lengths)
    return [_mark(width, *place) for place in zip(lengths, addresses, strict=True)]


def _mark(width: int, length: int, address: int) -> Mark | None:
    found, end = _at(address), address + width * length
    for i in range(bisect_right(watched_addresses, address), len(watched_addresses)):
        if watched_addresses[i] >= end:
            break
        inner = _watched.get(watched_addresses[i])  # a part of the written tensor
        if inner is not None:
            inner.is_blind = True
    if found is None:
        return None
    start, rest = divmod(address - found.address, found.width)
    if rest or width != found.width or start % _ALIGNED or start + length > found.length:
        found.is_blind = True
        return None
    return Mark(found, start)


def of_column(column: Sequence[Tensor]) -> list[Mark | None]:
    """Return the marks of tensors of one dtype."""
    lengths, addresses = [x.numel() for x in column], [x.data_ptr() for x in column]
    return marks_of(column[0].element_size(), lengths, addresses)


def unseen(x: Tensor) -> None:
    """Note that a write to a tensor will leave no marks."""
    if watched_addresses and is_bare([x]):
        for mark in of_column([x]):
            if mark is not None:
                mark.marks.is_blind = True


def store_marked(
    targets: Sequence[Tensor], new: Sequence[Tensor], marks: Sequence[Mark | None]
) -> None:
    """Mark the changes of tensors, and copy the new values to them."""
    pairs = [(x, y, m) for x, y, m in zip(targets, new, marks, strict=True) if m is not None]
    for x, y, mark in pairs:
        if x.is_contiguous():
            mark.marks.compare(x, y, mark.start)
        else:
            mark.marks.is_blind = True
    torch._foreach_copy_(list(targets), list(new))
    for x, _, mark in pairs:
        mark.marks.stored(x)
