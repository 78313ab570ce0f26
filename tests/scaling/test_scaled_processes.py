"""Scales do not travel between processes: every way there says so."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import mcftensor as mcf
from support.ranks import on_ranks
from support.scales import normal

REFUSED = r"scales do not travel between processes.*bf16i8"


@on_ranks(2)
def test_every_way_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(NotImplementedError, match=REFUSED):
        dist.all_reduce(normal(3))
    with pytest.raises(NotImplementedError, match=REFUSED), mcf.scaling.fallback():
        dist.broadcast(normal(3), 0)
    with pytest.raises(NotImplementedError, match=REFUSED):
        distribute_tensor(normal(4, 3), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match=REFUSED):
        nn.parallel.DistributedDataParallel(mcf.scaling.scalify(nn.Linear(4, 4)))
    with pytest.raises(NotImplementedError, match=REFUSED):
        fully_shard(mcf.scaling.scalify(nn.Linear(4, 4)))(torch.ones(2, 4))
    with pytest.raises(NotImplementedError, match=rf"weight .* is sharded, and {REFUSED}"):
        mcf.scaling.scalify(fully_shard(nn.Linear(4, 4)))
