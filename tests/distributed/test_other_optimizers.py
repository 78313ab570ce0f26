"""Optimizers that DTensor lacks operations for, or that need whole matrices, over shards: with the
bits of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mcftensor as mcf
from support.helpers import assert_same_terms, over_formats
from support.ranks import Wire, on_ranks

FORMATS = (mcf.bf16i16, mcf.bf16i8, mcf.e4m3i8)
OPTIMIZERS = {
    "Muon": lambda ps: torch.optim.Muon(ps, lr=0.01),
    "Muon without Nesterov": lambda ps: torch.optim.Muon(ps, lr=0.01, nesterov=False),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, weight_decay=0.1),
    "Adafactor foreach": lambda ps: torch.optim.Adafactor(ps, foreach=True, maximize=True),
    "Rprop": torch.optim.Rprop,
    "Rprop foreach": lambda ps: torch.optim.Rprop(ps, foreach=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, weight_decay=0.1, fused=True),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
    "LBFGS searching": lambda ps: torch.optim.LBFGS(ps, max_iter=3, line_search_fn="strong_wolfe"),
}

BY_DTENSOR = {
    "RAdam": torch.optim.RAdam,
    "Adamax": lambda ps: torch.optim.Adamax(ps, foreach=True),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": lambda ps: torch.optim.ASGD(ps, foreach=True),
    "SGD foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
}
"""What DTensor carries out; lists of tensors on several meshes it refuses."""


class Layers(nn.Module):
    """Shards that are even, uneven (5 and 7 rows) and empty (1 row)."""

    def __init__(self, matrices_alone: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.uneven, self.row = nn.Linear(5, 7, bias=False), nn.Linear(4, 1, bias=False)
        self.wide = nn.Linear(33, 5, bias=False)
        if not matrices_alone:
            self.norm = nn.LayerNorm(5)


def layers(name: str, format) -> Layers:
    return mcf.as_expansion(Layers(name.startswith("Muon")), format)


def whole(x):
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x


def placed_like(p, x: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank has, divided as a parameter is."""
    if not hasattr(p, "placements"):
        return x
    everywhere = [Replicate()] * p.device_mesh.ndim
    x = DTensor.from_local(x, p.device_mesh, everywhere)
    return x.redistribute(placements=p.placements)


def compare(name: str, model: nn.Module, unsharded: nn.Module) -> None:
    """Three steps with the same gradients; then parameters and states are the same to the bit."""
    before = copy.deepcopy(unsharded)
    optimizers = [(OPTIMIZERS | BY_DTENSOR)[name](list(m.parameters())) for m in (model, unsharded)]
    for step in range(3):
        for i, (p, q) in enumerate(zip(model.parameters(), unsharded.parameters(), strict=True)):
            generator = torch.Generator().manual_seed(10 * step + i)
            q.grad = torch.randn(q.shape, generator=generator).to(q.dtype)
            p.grad = placed_like(p, q.grad.clone())
        for optimizer in optimizers:
            if name.startswith("LBFGS"):
                values = iter([3.0, 2.0, 2.5, *[1.0] * 50])
                optimizer.step(lambda values=values: torch.tensor(next(values)))
            else:
                optimizer.step()
    for p, q, r in zip(
        model.parameters(), unsharded.parameters(), before.parameters(), strict=True
    ):
        assert_same(whole(p.detach()), q.detach())
        assert not torch.equal(plain(q), plain(r))
        states, references = (o.state[x] for o, x in zip(optimizers, (p, q), strict=True))
        assert states.keys() == references.keys()
        for key, x in references.items():
            if isinstance(x, torch.Tensor):
                assert_same(whole(states[key]), x)


def plain(x: torch.Tensor) -> torch.Tensor:
    return mcf.as_plain(x) if isinstance(x, mcf.MCFTensor) else x


def assert_same(x: torch.Tensor, y: torch.Tensor) -> None:
    assert type(x) is type(y)
    if isinstance(y, mcf.MCFTensor):
        assert_same_terms(x, y)
    else:
        assert torch.equal(x, y)


def check_sharded(name: str, format) -> None:
    model, unsharded = layers(name, format), layers(name, format)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    compare(name, model, unsharded)


@pytest.mark.thinned(of=27)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *BY_DTENSOR])
@over_formats(*FORMATS)
@on_ranks(2)
def test_shards_have_the_bits_of_one_process(format, name):
    check_sharded(name, format)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPTIMIZERS, *BY_DTENSOR])
@over_formats(*FORMATS, mcf.fp32x2)
@on_ranks(4)
def test_shards_of_four_ranks_have_the_bits_of_one_process(format, name):
    check_sharded(name, format)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@over_formats(*FORMATS)
@on_ranks(1)
def test_one_rank_has_the_bits_of_no_mesh(format, name):
    check_sharded(name, format)


def divided_within(name: str, format, mesh) -> Layers:
    """Rows and columns are divided."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "uneven": ColwiseParallel()}
    return parallelize_module(layers(name, format), mesh, plan)


@pytest.mark.thinned(of=7)
@pytest.mark.parametrize("name", OPTIMIZERS)
@over_formats(mcf.bf16i16)
@on_ranks(2)
def test_layers_divided_within_have_the_bits_of_one_process(format, name):
    mesh = init_device_mesh("cpu", (2,))
    compare(name, divided_within(name, format, mesh), layers(name, format))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@over_formats(mcf.bf16i16)
@on_ranks(4)
def test_shards_of_layers_divided_within_have_the_bits_of_one_process(format, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = divided_within(name, format, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    compare(name, model, layers(name, format))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@over_formats(mcf.bf16i8)
@on_ranks(4)
def test_copies_of_shards_have_the_bits_of_one_process(format, name):
    model = layers(name, format)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    compare(name, model, layers(name, format))


@pytest.mark.parametrize(("format", "sent"), [(mcf.bf16x2, 8), (mcf.bf16i16, 4)], ids=str)
@on_ranks(2)
def test_muon_sends_each_update_once_to_its_owner_and_back(format, sent):
    model = mcf.as_expansion(
        nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]), format
    )
    fully_shard(model)
    optimizer = torch.optim.Muon(model.parameters())
    for p in model.parameters():
        p.grad = placed_like(p, torch.ones(8, 8).bfloat16())
    with Wire() as wire:
        optimizer.step()
    assert wire.sent.keys() == {"send", "recv_"}
    # Half of each matrix is where its owner is: of a rank's matrices the other half comes, and
    # of the others' matrices its own half goes.
    assert wire.sent["send"] == wire.sent["recv_"] == sent * 4 * 64 // 2 // 2


@on_ranks(2)
def test_a_line_search_takes_the_same_way_on_all_ranks():
    """Each has a loss of its own; they go by the mean."""
    torch.manual_seed(0)
    model = mcf.as_expansion(nn.Linear(4, 3).double())
    unsharded = copy.deepcopy(model)
    fully_shard(model)
    batches = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).bfloat16()

    def losses(m, xs):
        return torch.stack([m(x).float().square().mean() for x in xs])

    def train(m, xs):
        optimizer = torch.optim.LBFGS(m.parameters(), line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = losses(m, xs).mean()
            loss.backward()
            return loss

        return [float(optimizer.step(closure)) for _ in range(2)]

    mine = train(model, batches[dist.get_rank() :][:1])
    assert mine == pytest.approx(train(unsharded, batches), rel=1e-2)
    found = [None, None]
    dist.all_gather_object(found, mine)
    assert found[0] == found[1]
    assert losses(unsharded, batches).max() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(1)
def test_muon_keeps_buffers_that_it_orthogonalizes(dtype):
    """In one process, too: PyTorch normalizes them where they lie if they are in bfloat16."""
    torch.manual_seed(0)
    p = nn.Parameter(mcf.as_expansion(torch.randn(3, 4), mcf.bf16x2))
    p.grad = 100 * torch.ones(3, 4).to(torch.bfloat16)
    optimizer = torch.optim.Muon([p], momentum=0.5, nesterov=False)
    optimizer.step()
    assert (mcf.as_plain(optimizer.state[p]["momentum_buffer"]) == 50).all()


@on_ranks(2)
def test_plain_parameters_among_them_step_alike():
    model, unsharded = (
        mcf.as_expansion(Layers(matrices_alone=True), overrides={"up.*": None}) for _ in range(2)
    )
    for layer in model.children():
        fully_shard(layer)
    compare("Muon", model, unsharded)
    compare("Adafactor", model, unsharded)
