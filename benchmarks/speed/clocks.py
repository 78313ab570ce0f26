"""Time of a step, and the speed of memory that bounds it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], object]


class Clock(Protocol):
    """Takes the time of steps on one device."""

    def wait(self) -> None:
        """Wait for the device to be idle."""

    def seconds(self, step: Step) -> float:
        """Time of a step that begins on an idle device."""

    def queued_seconds(self, step: Step) -> float | None:
        """Time of a step on a device with work to do while the host prepares the step.

        None where host and device are one.
        """


class HostClock:
    """For a CPU."""

    def wait(self) -> None:
        """Nothing runs on its own."""

    def seconds(self, step: Step) -> float:
        """By the clock on the wall."""
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def queued_seconds(self, step: Step) -> None:
        """There is no queue."""


class CudaClock:
    """For a GPU: events before and after the step, and no waiting between them."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        cycles = 10_000_000
        self._timed(lambda: torch.cuda._sleep(cycles))
        self.cycles_a_second = cycles / self._timed(lambda: torch.cuda._sleep(cycles))

    def wait(self) -> None:
        """Wait for the device to be idle."""
        torch.cuda.synchronize()

    def seconds(self, step: Step) -> float:
        """From the first kernel to the last, what the host takes to launch them included."""
        self.wait()
        return self._timed(step)

    def queued_seconds(self, step: Step) -> float:
        """Of the kernels alone: the device sleeps until the host has launched them all."""
        self.wait()
        begin = time.perf_counter()
        step()
        launching = time.perf_counter() - begin
        self.wait()
        torch.cuda._sleep(int(self.cycles_a_second * (1.5 * launching + 1e-3)))
        return self._timed(step)

    def _timed(self, step: Step) -> float:
        self.start.record()
        step()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


def clock_of(device: str) -> Clock:
    """The clock of a device."""
    return CudaClock() if device == "cuda" else HostClock()


def bandwidth(device: str, clock: Clock, size: int | None = None) -> float:
    """Return bytes a second, read and written: the faster of copying a large block and changing
    one.

    A CPU may read memory before it writes it, so that a copy moves more bytes than are counted.
    """
    size = size or (2**31 if device == "cuda" else 2**28)
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    return max(
        2 * size / statistics.median([clock.seconds(action) for _ in range(11)][1:])
        for action in (lambda: target.copy_(source), lambda: target.mul_(1.5))
    )
