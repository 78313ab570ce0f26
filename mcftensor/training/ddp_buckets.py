"""Buckets of DistributedDataParallel, whose gradients are passed on once they are reduced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mcftensor.training.gradient_hooks import at_end_of_backward

OF_DDP = (
    "call it with the DistributedDataParallel itself, after that is made around the model: it "
    "reduces gradients after the hooks of parameters"
)


def holds_fsdp1(model: nn.Module) -> bool:
    """Whether FullyShardedDataParallel has a part of a model, and keeps gradients to itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()
    )


def require_own_gradients(where: str, model: nn.Module) -> None:
    """Raise ValueError if gradients are not those of single parameters when their hooks run.

    FullyShardedDataParallel keeps them to itself; a DistributedDataParallel within the model
    reduces them later; and its buckets may hold zeros for gradients that are not there.
    """
    if holds_fsdp1(model):
        raise ValueError(
            f"{where}: FullyShardedDataParallel keeps gradients in memory of its own; shard with "
            "torch.distributed.fsdp.fully_shard"
        )
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module is not model:
            raise ValueError(f"{where}: {OF_DDP}")
    for option in ("find_unused_parameters", "static_graph"):
        if isinstance(model, DistributedDataParallel) and getattr(model, option):
            raise ValueError(
                f"{where}: DistributedDataParallel has {option}=True, and its buckets do not say "
                "which parameters have gradients; leave that out, or shard the model with "
                "torch.distributed.fsdp.fully_shard, over a mesh that replicates if need be"
            )


def pass_on_reduced(
    model: DistributedDataParallel,
    wants: Callable[[Tensor], bool],
    take: Callable[[Tensor], None],
) -> None:
    """Call a function with each wanted parameter as soon as its gradient is averaged over all
    ranks.

    The gradient is in the memory of the bucket. A gradient that is None afterwards stays None.

    Raises:
        RuntimeError: the model has another communication hook.
    """
    group: Any = model.process_group

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().mul_(1 / group.size())  # as DistributedDataParallel does
        dist.all_reduce(buffer, group=group)
        chosen = [
            (p, grad)
            for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if wants(p)
        ]
        for p, grad in chosen:
            p.grad = grad
            take(p)
        if chosen:  # dropped once the model has copied its buckets to gradients, after backward
            at_end_of_backward(lambda: at_end_of_backward(lambda: _drop(p for p, _ in chosen)))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _drop(parameters: Any) -> None:
        for p in parameters:
            if wants(p):
                p.grad = None

    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))
