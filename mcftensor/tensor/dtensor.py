"""Parameters and states on several processes, for the cases that PyTorch's classes do not dispatch.

Users call nothing here. DistributedDataParallel copies the state of the first rank to all others at
construction. DTensors, which `fully_shard` and tensor parallelism use for parameters, have
expansions as local shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mcftensor.formats import Format
from mcftensor.tensor.step_context import Step, outside
from mcftensor.tensor.tensor import MCFTensor, lifted_gradient


def local(x: Tensor) -> Tensor:
    """What this rank has of a DTensor; any other tensor is itself."""
    return getattr(x, "_local_tensor", x)


def format_of(x: object) -> Format | None:
    """Return the format of an expansion or of a DTensor of one. None for other tensors, and for
    formats with their own rules, whose steps are those of any tensor."""
    format = any_format_of(x)
    return format if format is None or format.rules is None else None


def any_format_of(x: object) -> Format | None:
    """Return the format of an MCFTensor or of a DTensor of one; None for other tensors."""
    if isinstance(x, MCFTensor):
        return x._format
    x = getattr(x, "_local_tensor", None)
    return x._format if isinstance(x, MCFTensor) else None


def on_local(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """A function of single elements, or of rows, carried out on what this rank has of a DTensor.

    Raises:
        NotImplementedError: a function of rows, where another dimension is sharded.
    """
    if not hasattr(x, "_local_tensor"):
        return function(x, *args)

    def on_own() -> Tensor:
        own = function(local(x), *args)
        shape, stride = x.shape, x.stride()
        if own.shape != local(x).shape:
            placements = x.placements  # type: ignore[attr-defined]
            if not all(y.is_replicate() or y.is_shard(0) for y in placements):
                raise NotImplementedError(
                    f"a tensor of shape {tuple(x.shape)} in a format whose rows share scales is "
                    "sharded along another dimension than the first: shard its rows, or keep it in "
                    "mcf.bf16i16"
                )
            shape = torch.Size((x.shape[0], *own.shape[1:]))
            stride = torch.empty(shape, device="meta").stride()
        return type(x).from_local(  # type: ignore[attr-defined]
            own,
            x.device_mesh,  # type: ignore[attr-defined]
            x.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=shape,
            stride=stride,
        )

    return outside(on_own)  # DTensor asks for the dtype of what it holds


def placed_like(x: Tensor, own: Tensor) -> Tensor:
    """Return a DTensor like x, of which this rank has `own`; or `own`, if x is plain."""
    return on_local(lambda _: own, x)


def place_of(x: Tensor) -> int:
    """Return the offset of this rank's first element in a DTensor.

    What is divided along its first dimension is a row of parts, one after the other. Where layers
    that are divided within are sharded, so are parts, and the place is that among their elements.
    """
    if local(x) is x or not local(x).numel():
        return 0
    placed: Any = x
    mesh, shape, place = placed.device_mesh, list(x.shape), 0
    divisions = [(i, y) for i, y in enumerate(placed.placements) if hasattr(y, "dim")]
    if len({(type(y), y.dim) for _, y in divisions}) > 1:
        divisions.reverse()  # shards of layers that are divided within
    for i, dim in ((i, y.dim) for i, y in divisions):
        rows = -(-shape[dim] // mesh.size(i))
        start = rows * mesh.get_local_rank(i)
        place += start * math.prod(shape[dim + 1 :])
        shape[dim] = min(rows, shape[dim] - start)
    return place


def with_lifted_shards(
    step: Step, parameters: Iterable[Tensor], function: Callable[[], Any]
) -> Any:
    """Call a function, within a step, with what `MCFTensor.grad` does for DTensors of expansions,
    whose gradients nobody asks an expansion for."""
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for p in parameters:
            format = None if isinstance(p, MCFTensor) else format_of(p)
            grad = p.grad if format else None
            if format and grad is not None and type(local(grad)) is Tensor:
                placed: Any = grad
                if any(placement.is_partial() for placement in placed.placements):  # summed first
                    placed = placed.redistribute(placements=p.placements)  # type: ignore[attr-defined]
                lifted = on_local(lifted_gradient, placed, format)
                step.gradients[id(p)] = local(placed), local(lifted)
                held.append((p, grad, lifted))
                p.grad = lifted
        return function()
    finally:
        for p, grad, lifted in held:
            if p.grad is lifted:
                p.grad = grad


def require_unsharded(where: str, module: nn.Module) -> None:
    """Raise RuntimeError for a module that `fully_shard` has been applied to.

    It keeps views of its parameters, which would go on showing what these were.
    """
    for name, part in module.named_modules():
        if any(base.__name__ == "FSDPModule" for base in type(part).__mro__):
            raise RuntimeError(
                f"{where}: {name or 'the module'} ({type(part).__name__}) is sharded by "
                "fully_shard, which has views of its parameters. Convert before it is sharded; "
                "the whole of a sharded expansion is x.full_tensor()"
            )
