"""The norm of gradients, whose bits do not depend on how they are divided among processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.sums.accumulators import accumulate_all
from mcftensor.sums.correct_rounding import rounded_norm
from mcftensor.tensor.components import local


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of plain tensors and DTensors together, in float32, () in shape.

    *Error*: half an ulp: the exact norm, rounded once.

    *Special values*: NaN if there is one, else infinite if there is an infinity.
    """
    parts: dict[tuple[Any, ...], list[Tensor]] = {}
    for x in map(without_partial, tensors):
        own = local(x).detach()
        parts.setdefault((own.device, *_sharding(x)), []).append(own)
    device = local(tensors[0]).device
    totals = []
    for (_, mesh, dims), own_tensors in parts.items():
        total = accumulate_all(own_tensors, squares=True)
        for dim in dims:
            dist.all_reduce(total, group=mesh.get_group(dim))
        totals.append(total.to(device))
    return rounded_norm(torch.stack(totals).sum(0), torch.float32)


def _sharding(x: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return a mesh, and the dimensions along which processes have different parts of a tensor."""
    placements = getattr(x, "placements", ())
    # Shards of shards say that they are no shards.
    dims = tuple(i for i, placement in enumerate(placements) if not placement.is_replicate())
    return (x.device_mesh, dims) if dims else (None, ())  # type: ignore[attr-defined]


def without_partial(x: Tensor) -> Tensor:
    """Return a DTensor with the partial sums of tensor parallelism added up."""
    placements = getattr(x, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return x
    from torch.distributed.tensor import Replicate  # noqa: PLC0415

    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    return x.redistribute(placements=whole)  # type: ignore[attr-defined]
