"""Gradients summed in expansions while several processes train together."""

import contextlib
from datetime import timedelta

import pytest
import torch
from helpers import exact
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import mcftensor as mcf

PROCESSES = 2
MICROBATCHES = 16


def network(convert=nn.Module.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)))


def microbatches():
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(MICROBATCHES):
        yield torch.randn(5, 8, generator=generator).bfloat16()


def check_ddp(convert, set_to_none, **options):
    """What is reduced is the sum of all microbatches, not of the last one."""
    model = network(convert)
    mcf.accumulate_gradients(model)
    parallel = nn.parallel.DistributedDataParallel(model, **options)
    parameters = list(model.parameters())
    for _ in range(2):
        parallel.zero_grad(set_to_none)
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters]
        for i, x in enumerate(microbatches()):
            gradients = torch.autograd.grad(model(x).square().mean(), parameters)
            for total, g in zip(sums, gradients, strict=True):
                total += g.double()
            with contextlib.nullcontext() if i == MICROBATCHES - 1 else parallel.no_sync():
                parallel(x).square().mean().backward()
        for p, total in zip(parameters, sums, strict=True):
            dist.all_reduce(total)
            total /= PROCESSES
            # each process rounds its sum, and then that of all
            assert float((exact(p.grad) - total).abs().max() / total.abs().max()) < 2**-7
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    for p in parameters:
        first = exact(p)
        dist.broadcast(first, 0)
        assert first.equal(exact(p))


def check_fully_shard(convert):
    """Shards of microbatch gradients are summed in expansions."""
    model, twin = (fully_shard(network(convert)) for _ in range(2))
    mcf.accumulate_gradients(model)
    for set_to_none in (True, False):
        model.zero_grad(set_to_none)
        sums = [torch.zeros(p.to_local().shape, dtype=torch.float64) for p in model.parameters()]
        for x in microbatches():
            twin.zero_grad()
            for net in (model, twin):
                net(x).square().mean().backward()
            for total, p in zip(sums, twin.parameters(), strict=True):
                total += p.grad.to_local().double()
        for total, p in zip(sums, model.parameters(), strict=True):
            local = p.grad.to_local()
            assert isinstance(local, mcf.MCFTensor)
            assert float((exact(local) - total).abs().max() / total.abs().max()) < 2**-14
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    squares = torch.stack([total.square().sum() for total in sums]).sum()
    dist.all_reduce(squares)
    assert float(norm) == pytest.approx(float(squares.sqrt()), rel=2**-6)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def check_flat_shards():
    with pytest.raises(TypeError, match="fully_shard"):
        mcf.accumulate_gradients(FullyShardedDataParallel(network(), device_id="cpu"))


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    try:
        for as_view in (True, False):
            check_ddp(mcf.as_expansion, as_view, gradient_as_bucket_view=as_view)
            check_ddp(nn.Module.bfloat16, not as_view, gradient_as_bucket_view=as_view)
        for convert in (mcf.as_expansion, nn.Module.bfloat16):
            check_fully_shard(convert)
        check_flat_shards()
    finally:
        dist.destroy_process_group()


def test_processes(tmp_path):
    context = torch.multiprocessing.spawn(
        work, (str(tmp_path / "store"),), nprocs=PROCESSES, join=False
    )
    try:
        assert context.join(timeout=120, grace_period=1) or context.join(timeout=60)
    finally:
        for process in context.processes:
            process.kill()
