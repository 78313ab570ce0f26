"""Deltas under `fully_shard`: each rank gives its rows, and a server takes those of all."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mcftensor as mcf
from support.ranks import Wire, on_ranks


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("way", ["fused", "foreach", "for-loop", "plain"])
@on_ranks(2)
def test_shards_are_not_gathered(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 130), nn.Linear(130, 1), nn.Linear(1, 7))  # uneven, empty
    model = model.bfloat16() if way == "plain" else mcf.as_expansion(model)
    server = copy.deepcopy(model)
    server = server if way == "plain" else mcf.as_plain(server)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    options = {"fused": way == "fused"} if way in ("fused", "plain") else {}
    foreach = {"foreach": True} if way == "foreach" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options, **foreach)
    deltas = mcf.deltas(optimizer, names=model)
    for seed in range(3):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
        model(x.bfloat16()).square().sum().backward()
        with Wire() as wire:
            optimizer.step()
            delta = deltas.take()
        assert not wire.sent
        optimizer.zero_grad()
        files = [None, None]
        dist.all_gather_object(files, delta.data)
        mcf.apply_deltas(server, files)
        for p, q in zip(server.parameters(), model.parameters(), strict=True):
            whole = q.full_tensor()
            assert torch.equal(p, mcf.as_plain(whole) if way != "plain" else whole)
