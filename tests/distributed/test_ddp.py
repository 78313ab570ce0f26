"""Expansion parameters under DistributedDataParallel."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import mcftensor as mcf
from support.helpers import IN_MODULES, KEPT, assert_same_terms, over_formats
from support.ranks import Wire, gathered, on_ranks


class Network(nn.Module):
    """Matrices in bf16x2, vectors in bf16x3, buffers that are plain, a layer that may be unused."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16)
        )
        self.head = nn.Linear(16, 3)
        self.unused = nn.Linear(2, 2)
        self.checkpointed = self.skipping = False
        self.double()

    def forward(self, x):
        run = checkpoint if self.checkpointed else lambda f, x, **options: f(x)
        y = self.head(run(self.layers, x, use_reentrant=False))
        return y if self.skipping else y + self.unused(x[:, :2]).sum()


def expansions(format: mcf.Format | None = None, seed: int = 0) -> Network:
    return mcf.as_expansion(Network(seed), format)


def plain(format: mcf.Format | None = None) -> Network:
    """What an expansion computes as, in bfloat16."""
    model = Network().bfloat16()
    if format is not None:  # which may have rounded otherwise
        for p, q in zip(model.parameters(), expansions(format).parameters(), strict=True):
            p.data = q.compute_tensor.clone()
    return model


def batch(step: int = 0) -> torch.Tensor:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 6, generator=generator).bfloat16()


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_every_rank_starts_with_every_term_of_the_first(format):
    model, first = expansions(format, dist.get_rank()), expansions(format)
    DDP(model)
    for p, q in zip(model.parameters(), first.parameters(), strict=True):
        assert all(term.any() for term in p.components) == all(term.any() for term in q.components)
        assert_same_terms(p, q)


OPTIONS = {
    "default": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize(
    "name", [*OPTIONS, "checkpointed", pytest.param("compiled", marks=pytest.mark.slow)]
)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_gradients_are_those_of_plain_bf16(format, name):
    grads = []
    for make in (expansions, plain):
        model = make(format)
        model.checkpointed = name == "checkpointed"
        model.skipping = name == "unused parameters"
        wrapped = DDP(model, **OPTIONS.get(name, {}))
        if name == "compiled":
            wrapped = torch.compile(wrapped, backend="aot_eager")
        for step in range(2):
            wrapped(batch(step)).square().sum().backward()
        grads.append({k: p.grad for k, p in model.named_parameters()})
    for key, grad in grads[0].items():
        assert (grad is None) == (grads[1][key] is None), key
        if grad is not None:
            assert type(grad) is torch.Tensor
            assert grad.dtype == torch.bfloat16
            torch.testing.assert_close(grad, grads[1][key], rtol=0, atol=0)


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_as_many_bytes_travel_as_of_plain_bf16(format):
    wires = []
    for model in (expansions(format), plain()):
        wrapped = DDP(model, broadcast_buffers=False)
        with Wire() as wire:
            wrapped(batch()).square().sum().backward()
        wires.append(wire.sent)
    assert wires[0] == wires[1] == {"allreduce_": sum(2 * p.numel() for p in model.parameters())}


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_a_step_by_the_mean_of_gradients_leaves_all_ranks_alike(format):
    model = expansions(format)
    wrapped = DDP(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if format is None:
        mcf.collage(optimizer, "plus")
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):  # accumulated
            last = part == 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                wrapped(batch(2 * step + part)).square().sum().backward()
        own = model.head.weight.grad
        means = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(means, own)
        assert torch.equal(*means)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        optimizer.step()
    for p in model.parameters():
        assert_same_terms(*gathered(p))
    for state in optimizer.state.values():
        assert (type(state["exp_avg"]) is torch.Tensor) == (format is None)
        assert_same_terms(*gathered(state["exp_avg_sq"]))


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_edq_reads_the_same_on_every_rank(format):
    model = expansions(format)
    wrapped = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    edq = mcf.EDQ(optimizer)
    for step in range(2):
        wrapped(batch(step)).square().sum().backward()
        optimizer.step()
    readings = [None, None]
    dist.all_gather_object(readings, edq.last)
    assert readings[0] == readings[1]
    if format not in (KEPT[-1], mcf.e4m3i8):  # which lose some of each update
        assert readings[0]["ratio"] > 0.99 > readings[0]["ratio_leading"]


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_ranks_with_fewer_batches_join(format):
    model = expansions(format)
    wrapped = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Join([wrapped]):
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            wrapped(batch(step)).square().sum().backward()
            optimizer.step()
    for p in model.parameters():
        assert_same_terms(*gathered(p))


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("mode", [None, "compact"])
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_states_divided_by_the_zero_redundancy_optimizer(format, mode):
    models = [expansions(format), expansions(format)]
    sharded = ZeroRedundancyOptimizer(
        models[0].parameters(), torch.optim.AdamW, lr=1e-3, foreach=False
    )
    whole = torch.optim.AdamW(models[1].parameters(), lr=1e-3, foreach=False)
    if mode is not None:
        for optimizer in (sharded.optim, whole):
            mcf.collage(optimizer, mode)
    wrapped = [DDP(model, broadcast_buffers=False) for model in models]
    for step in range(3):
        for model, optimizer in zip(wrapped, (sharded, whole), strict=True):
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same_terms(p, q)


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_averaging_models_keeps_every_term(format):
    model = expansions(format, dist.get_rank())
    before = {name: gathered(p) for name, p in model.named_parameters()}
    averager = PeriodicModelAverager(period=1)
    model(batch()).sum().backward()  # it averages what has a gradient
    averager.average_parameters(model.parameters())
    for name, p in model.named_parameters():
        assert_same_terms(*gathered(p))
        mean = sum(mcf.as_plain(x, torch.float64) for x in before[name]) / 2
        error = (mcf.as_plain(p, torch.float64) - mean).abs()
        unit = 2.0 ** (1 - p.format.precision) if format else 4 * p.format.u**p.format.terms
        assert (error <= unit * mean.abs().clamp(1e-3)).all()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@on_ranks(2, backend="nccl")
def test_on_gpus():
    model, first = expansions(None, dist.get_rank()).cuda(), expansions().cuda()
    wrapped = DDP(model, device_ids=[dist.get_rank()])
    for p, q in zip(model.parameters(), first.parameters(), strict=True):
        assert_same_terms(p, q)
    wrapped(batch().cuda()).square().sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    for p in model.parameters():
        assert_same_terms(*gathered(p))


@pytest.mark.parametrize("path", [pytest.param("for-loop", marks=pytest.mark.slow), "fused"])
@on_ranks(2)
def test_another_format_between_two_steps(path):
    """Ranks still have the mean of their gradients, and the same parameters; so they would have,
    had the model been wrapped afterwards."""
    runs = []
    for is_wrapped_anew in (False, True):
        model = expansions(KEPT[2])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=path == "fused")
        wrapped = DDP(model)
        for step in range(4):
            if step == 2:
                done = mcf.change_format(model, optimizer, mcf.bf16i16)
                assert not done.lost
                wrapped = DDP(model) if is_wrapped_anew else wrapped
            optimizer.zero_grad()
            wrapped(batch(step)).square().sum().backward()
            optimizer.step()
        for p in model.parameters():
            assert_same_terms(*gathered(p))
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert p.format is mcf.bf16i16
        assert_same_terms(p, q)
