"""Parameters and states on more than one process: what PyTorch's classes for that do not ask for.

Nothing here is called by users. DistributedDataParallel brings all ranks to the state of the
first when it is made, and DTensors, of which `fully_shard` and tensor parallelism make
parameters, hold expansions as what each rank has of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from mcftensor.formats import Format
from mcftensor.tensor import MCFTensor


def local(x: Tensor) -> Tensor:
    """What this rank has of a DTensor; any other tensor is itself."""
    return getattr(x, "_local_tensor", x)


def format_of(x: object) -> Format | None:
    """The format of an expansion or of a DTensor of one; None of all else."""
    if isinstance(x, MCFTensor):
        return x._format
    x = getattr(x, "_local_tensor", None)
    return x._format if isinstance(x, MCFTensor) else None


def on_local(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """A function of single elements, carried out on what this rank has of a DTensor."""
    if not hasattr(x, "_local_tensor"):
        return function(x, *args)
    return type(x).from_local(  # type: ignore[attr-defined]
        function(local(x), *args),
        x.device_mesh,  # type: ignore[attr-defined]
        x.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


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


class _Conversion:
    """What `Module.to` does to each tensor; DTensors of expansions have to stay such.

    Module puts what it gets in their place, and asks them nothing; expansions themselves refuse.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self.convert = convert

    def __call__(self, x: Tensor) -> Tensor:
        new = self.convert(x)
        format = format_of(x)
        if format is not None and local(x) is not x and format_of(new) is None:
            raise TypeError(
                f"to: a sharded expansion in {format.name} of shape {tuple(x.shape)} cannot become "
                f"{new.dtype} with its module. Convert with mcf.as_plain(module, dtype) before it "
                "is sharded; a MixedPrecisionPolicy(param_dtype=...) computes in another dtype"
            )
        return new


def _keeping_expansions(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(apply)
    def apply_to_tensors(module: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> nn.Module:
        return apply(
            module, fn if isinstance(fn, _Conversion) else _Conversion(fn), *args, **kwargs
        )

    return apply_to_tensors


def _by_terms(broadcast: Callable[..., None]) -> Callable[..., None]:
    """Terms in place of expansions: tensors of one dtype travel joined, and DistributedDataParallel
    gives plain buffers beside parameters of several formats."""

    @functools.wraps(broadcast)
    def broadcast_terms(group: Any, tensors: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        terms = [t for x in tensors for t in (x.components if isinstance(x, MCFTensor) else (x,))]
        broadcast(group, terms, *args, **kwargs)

    return broadcast_terms


if dist.is_available():
    nn.Module._apply = _keeping_expansions(nn.Module._apply)  # type: ignore[method-assign]
    # Written in C++, it asks nobody how to join expansions.
    dist._broadcast_coalesced = _by_terms(dist._broadcast_coalesced)
