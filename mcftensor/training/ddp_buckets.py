"""Buckets of DistributedDataParallel, whose gradients are passed on once they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mcftensor.training.gradient_hooks import at_end_of_backward


def require_known_gradients(model: DistributedDataParallel) -> None:
    """Raise ValueError if a bucket may hold zeros in the place of gradients that are not there."""
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise ValueError(
                f"step_in_backward: DistributedDataParallel has {option}=True, and its buckets do "
                "not say which parameters have gradients; leave that out, or shard the model with "
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
