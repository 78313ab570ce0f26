"""Parameters and states on several processes, for the cases that PyTorch's classes do not dispatch.

Users call nothing here. DistributedDataParallel copies the state of the first rank to all others at
construction. DTensors, which `fully_shard` and tensor parallelism use for parameters, have
expansions as local shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from mcftensor.tensor.components import format_of, local, on_local
from mcftensor.tensor.step_context import Step
from mcftensor.tensor.step_tensors import gradient_tensor


def place_of(x: Tensor) -> int:
    """Return the offset of this rank's first element in a DTensor.

    A tensor sharded along its first dimension is a sequence of consecutive shards. If
    `fully_shard` shards tensor-parallel layers again, the offset counts elements in the order of
    the resulting shards.
    """
    if local(x) is x or not local(x).numel():
        return 0
    placed: Any = x
    mesh, shape, place = placed.device_mesh, list(x.shape), 0
    divisions = [(i, y) for i, y in enumerate(placed.placements) if hasattr(y, "dim")]
    if len({(type(y), y.dim) for _, y in divisions}) > 1:
        divisions.reverse()  # fully_shard has sharded the shards of tensor parallelism
    for i, dim in ((i, y.dim) for i, y in divisions):
        rows = -(-shape[dim] // mesh.size(i))
        start = rows * mesh.get_local_rank(i)
        place += start * math.prod(shape[dim + 1 :])
        shape[dim] = min(rows, shape[dim] - start)
    return place


def with_gradient_tensors(
    step: Step, sharded: Iterable[Tensor], function: Callable[[], Any]
) -> Any:
    """Call a function within a step, with gradient tensors for those DTensors that hold expansions.

    `MCFTensor.grad` reads as a gradient tensor. An optimizer reads `grad` of the DTensor,
    and so never that property of the shard.
    """
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for p in sharded:
            format = format_of(p)
            grad = p.grad if format else None
            if format and grad is not None and type(local(grad)) is Tensor:
                placed: Any = grad
                if any(placement.is_partial() for placement in placed.placements):  # summed first
                    placed = placed.redistribute(placements=p.placements)  # type: ignore[attr-defined]
                read = on_local(gradient_tensor, placed, format)
                step.gradients[id(p)] = local(placed), local(read)
                held.append((p, grad, read))
                p.grad = read
        return function()
    finally:
        for p, grad, read in held:
            if p.grad is read:
                p.grad = grad
