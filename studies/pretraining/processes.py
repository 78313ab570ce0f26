"""One job on several processes, as `torchrun` starts them; on one alone, nothing of this does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

PARALLEL = ("ddp", "fsdp")


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """Within, the processes of `torchrun` can talk to each other."""
    if dist.is_initialized() or "RANK" not in os.environ:
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def count() -> int:
    """The number of processes."""
    return (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )


def rank() -> int:
    """The number of this one, from 0 on."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


def share(x: Tensor) -> Tensor:
    """What of a batch is for this process."""
    return x.tensor_split(count())[rank()]


def total(value: float, device: str) -> float:
    """The sum of what all processes have."""
    if not dist.is_initialized():
        return value
    x = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(x)
    return x.item()


def divided(model: nn.Module, parallel: str, device: str) -> nn.Module:
    """The model such that the gradients of all processes are averaged.

    With "ddp" each process has a copy of it, with "fsdp" a part.
    """
    if not dist.is_initialized():
        return model
    if parallel == "fsdp":
        mesh = init_device_mesh(device, (count(),))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        # Divided again also after validation, which has no backward pass.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        return model
    copy = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # After its first pass DistributedDataParallel puts gradients into other buckets, and where in a
    # bucket a gradient is decides in which order it is summed. This is that pass, so that the
    # steps of a resumed run have the buckets that they would have had.
    copy(torch.zeros(1, 1, dtype=torch.long, device=device)).sum().backward()
    copy.zero_grad()
    return copy
