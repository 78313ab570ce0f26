"""Memory of a device: the free memory, and the temporary memory of an action."""

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
    """Free memory without references."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def peak(device: str, action: Callable[[], object]) -> int:
    """Bytes that PyTorch's allocator has out at most during `action`, above those before.

    On a GPU by the allocator's own count. On a CPU by the allocations and releases that the
    profiler records, which, unlike the size of the process, does not depend on what was freed
    before. Memory that an extension allocates elsewhere is not seen, nor is the release of memory
    from before the action. A step that replaces a state therefore counts as adding it.
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
