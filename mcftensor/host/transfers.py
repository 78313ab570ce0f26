"""Copies between a device and the host, beside the device's computing, through pinned memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

SLOTS = 4
"""Pieces of pinned memory in each direction: while one is copied, the next is filled."""


class _Slot:
    """A piece of pinned memory, and the event of the last copy that the device does with it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.event = torch.Event(device)

    def like(self, x: Tensor) -> Tensor:
        """Return memory of it as a vector of the dtype and length of x."""
        return self._memory[: x.numel() * x.element_size()].view(x.dtype)


class Link:
    """The way between one device and the host: two streams and a bounded amount of pinned memory.

    Args:
        device: an accelerator.
        staging_bytes: of pinned memory, for both directions together.
    """

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self._device = device
        self._size = max(staging_bytes // (2 * SLOTS) // 16 * 16, 16)
        self._down, self._up = torch.Stream(device), torch.Stream(device)
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(SLOTS):
            self._free.put(_Slot(self._size, device))
        self._turns = itertools.cycle([_Slot(self._size, device) for _ in range(SLOTS)])

    def down(self, x: Tensor, submit: Callable[..., None]) -> Tensor:
        """Return a tensor on the host that has the numbers of x when what is submitted next runs.

        The caller may let go of x. It waits where all pinned memory is filled. `submit` calls a
        function in the thread that works on what has arrived, in order.
        """
        made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")
        self._down.wait_stream(self._current())
        for source, target in self._pieces(x, made):
            slot = self._free.get()
            try:
                staged = slot.like(source)
                with self._down:
                    staged.copy_(source, non_blocking=True)
                slot.event.record(self._down)
            except BaseException:  # such as a device without memory
                self._free.put(slot)
                raise
            submit(self._land, slot, staged, target)
        x.record_stream(self._down)
        return made

    def _land(self, slot: _Slot, staged: Tensor, target: Tensor) -> None:
        try:
            slot.event.synchronize()
            target.copy_(staged)
        finally:
            self._free.put(slot)

    def up(self, x: Tensor, target: Tensor) -> None:
        """Begin to copy x, on the host, to a tensor of its dtype and layout on the device."""
        for source, piece in self._pieces(x, target):
            slot = next(self._turns)
            slot.event.synchronize()
            staged = slot.like(source)
            staged.copy_(source)
            with self._up:
                piece.copy_(staged, non_blocking=True)
            slot.event.record(self._up)

    def wait_before(self) -> None:
        """Have copies to the device wait for what it computes so far, which reads the targets."""
        self._up.wait_stream(self._current())

    def wait_after(self) -> None:
        """Have the device compute on after the copies to it."""
        self._current().wait_stream(self._up)

    def _current(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    def _pieces(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return pieces of two tensors of one dense layout, in the order of memory."""
        length = self._size // x.element_size()
        flat = [z.as_strided((z.numel(),), (1,)).split(length) for z in (x, y) if z.numel()]
        return zip(*flat, strict=True)
