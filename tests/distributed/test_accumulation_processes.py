"""Gradients summed in expansions while several processes train together."""

import contextlib
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import mcftensor as mcf
from support.helpers import IN_MODULES, exact
from support.ranks import on_ranks

MICROBATCHES = 16


def network(convert=nn.Module.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)))


def microbatches():
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(MICROBATCHES):
        yield torch.randn(5, 8, generator=generator).bfloat16()


CONVERSIONS = {
    "expansions": mcf.as_expansion,
    "plain": nn.Module.bfloat16,
    **{f.name: partial(mcf.as_expansion, format=f) for f in IN_MODULES},
}


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("kind", CONVERSIONS)
@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_ddp_reduces_the_sum_of_all_microbatches(kind, as_view):
    model = network(CONVERSIONS[kind])
    mcf.accumulate_gradients(model)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    parameters = list(model.parameters())
    for set_to_none in (True, False):
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
            total /= dist.get_world_size()
            # each process rounds its sum, and then that of all
            assert float((exact(p.grad) - total).abs().max() / total.abs().max()) < 2**-7
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    for p in parameters:
        first = exact(p)
        dist.broadcast(first, 0)
        assert first.equal(exact(p))


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("kind", CONVERSIONS)
@on_ranks(2)
def test_shards_of_gradients_are_summed_in_expansions(kind):
    model, twin = (fully_shard(network(CONVERSIONS[kind])) for _ in range(2))
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


@on_ranks(2)
def test_flat_shards_are_refused():
    with pytest.raises(TypeError, match="fully_shard"):
        mcf.accumulate_gradients(FullyShardedDataParallel(network(), device_id="cpu"))
