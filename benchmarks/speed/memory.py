"""Memory of a device: what is free, and what an action takes for a while."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# The profiler tells of every start and stop on the screen otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def available(device: str) -> int:
    """Bytes that can still be had."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + _cached()
    try:
        with Path("/proc/meminfo").open() as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except FileNotFoundError:
        return 8 * 2**30  # no Linux: what an ordinary machine has
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cached() -> int:
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def release(device: str) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def peak(device: str, action: Callable[[], object]) -> int:
    """Bytes that PyTorch's allocator has out at most during `action`, above those before.

    On a GPU by the allocator's own count. On a CPU by the allocations and releases that the
    profiler records, which, unlike the size of the process, does not depend on what was freed
    before. Memory that an extension takes from elsewhere is not seen, nor is the release of what
    is older than the action, so that a step which exchanges a state counts as one that adds it.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            action()
    results = recorded.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    out = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        out += event.nbytes()
        highest = max(highest, out)
    return highest
