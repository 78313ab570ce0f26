"""Expansion parameters divided over two dimensions of a mesh, and within layers."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import mcftensor as mcf
from mcftensor.formats import ExpansionFormat
from mcftensor.tensor.components import format_of
from mcftensor.tensor.dtensor import place_of
from support.helpers import IN_MODULES, KEPT, assert_same_terms, exact, over_formats
from support.ranks import on_ranks

PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()
        for p in self.parameters():  # all terms are busy
            nn.init.normal_(p)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def expansions(format=None) -> Block:
    """In two terms by default: what is divided goes by its shape, and not by its size."""
    return mcf.as_expansion(Block(), format, lr=None if format else 1.0)


def plain(format=None) -> Block:
    """What an expansion computes as, in bfloat16."""
    model = Block().bfloat16()
    if format is not None:  # which may have rounded otherwise
        for p, q in zip(model.parameters(), expansions(format).parameters(), strict=True):
            p.data = q.compute_tensor.clone()
    return model


def parallel(model: nn.Module, mesh) -> nn.Module:
    return parallelize_module(model, mesh, PLAN)


def whole(x) -> torch.Tensor:
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


def assert_same(p: torch.Tensor, q: torch.Tensor) -> None:
    """The bits of the undivided parameter, which go by its rows where rounding is balanced."""
    by_columns = any(placement.is_shard(1) for placement in getattr(p, "placements", ()))
    if q.writes is None or not by_columns:
        assert_same_terms(whole(p), q.detach())
    else:
        unit = 2.0 ** (1 - q.format.precision)  # and two roundings, each by less than that
        torch.testing.assert_close(exact(whole(p)), exact(q.detach()), rtol=2 * unit, atol=0)


def collaged(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """In mode "plus" over terms."""
    formats = [format_of(p) for p in optimizer.param_groups[0]["params"]]
    if isinstance(formats[0], ExpansionFormat):
        mcf.collage(optimizer, "plus")
    return optimizer


def trained(model: nn.Module, x: torch.Tensor, fused: bool = True) -> list[torch.Tensor]:
    """One step of AdamW: the output before it, and the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    collaged(optimizer)
    y = model(x)
    y.float().square().mean().backward()
    grads = [whole(p.grad) for p in model.parameters()]
    optimizer.step()
    return [y.detach(), *grads]


def x_of(mesh) -> torch.Tensor:
    """The part of a batch of sequences that this rank computes with, the same on all."""
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    return x.chunk(2, dim=1)[mesh.get_local_rank()]


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("order", ["converted first", "divided first"])
@over_formats(*KEPT)
@on_ranks(2)
def test_layers_divided_within(format, order, fused):
    mesh = init_device_mesh("cpu", (2,))
    if order == "converted first":
        model = parallel(expansions(format), mesh)
    else:
        model = mcf.as_expansion(parallel(Block(), mesh), format)
    unsharded = expansions(format)
    twin = Block().bfloat16()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.data = whole(q).compute_tensor.clone()
    parallel(twin, mesh)
    assert model.up.weight.to_local().shape == (4, 6)
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert p.detach().to_local().role == "parameter"
        assert_same(p, q)
    results = [trained(m, x_of(mesh), fused) for m in (model, twin)]
    for a, b in zip(*results, strict=True):
        assert not isinstance(a, mcf.MCFTensor)
        assert torch.equal(a, b)
    optimizer = torch.optim.AdamW(unsharded.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    collaged(optimizer)
    for p, grad in zip(unsharded.parameters(), results[0][1:], strict=True):
        p.grad = grad
    optimizer.step()
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same(p, q)


@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_states_in_blocks_of_layers_divided_within(foreach):
    """By their rows; what is divided by columns has blocks of each rank, which are not saved."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layer = mcf.as_expansion(nn.Linear(40, 8, bias=False), mcf.bf16i8)
    unsharded = copy.deepcopy(layer)
    parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Shard(-1)))
    optimizers = [
        mcf.collage(torch.optim.AdamW(m.parameters(), 1e-2, foreach=foreach), "compact")
        for m in (layer, unsharded)
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in layer.parameters():
            p.grad = None
        layer(torch.randn(4, 40, generator=generator).bfloat16()).square().mean().backward()
        unsharded.weight.grad = whole(layer.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_terms(whole(layer.weight), unsharded.weight.detach())
    states, references = (x.state[x.param_groups[0]["params"][0]] for x in optimizers)
    assert references["exp_avg"].format is mcf.mxfp8
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_terms(whole(states[name]), references[name])
    across = mcf.as_expansion(nn.Linear(40, 8, bias=False), mcf.bf16i8)
    parallelize_module(across, mesh, RowwiseParallel(input_layouts=Shard(-1)))
    across.weight.grad = torch.zeros_like(across.weight.detach()).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(across.parameters(), foreach=foreach)
    mcf.collage(optimizer, "compact").step()
    moment = optimizer.state[across.weight]["exp_avg"]
    assert moment.to_local().format is mcf.mxfp8
    assert type(moment.full_tensor()) is torch.Tensor
    with pytest.raises(NotImplementedError, match="shard its rows"):
        mcf.checkpoint.as_terms({"x": moment.detach()})


def assert_counts_are_of_the_whole(model: nn.Module) -> None:
    """What is saved is the same on all ranks, and every rank has its own of it again."""
    state = {name: x.detach() for name, x in model.state_dict().items()}
    terms = mcf.checkpoint.as_terms(state)
    counts = {name: x.item() for name, x in terms.items() if name.endswith(".writes")}
    assert len(counts) == len(state)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, counts)
    assert all(x == counts for x in found)
    again = mcf.checkpoint.from_terms(terms)
    for name, x in state.items():
        own, loaded = (getattr(y, "_local_tensor", y) for y in (x, again[name]))
        if own.numel():
            assert torch.equal(own._count, loaded._count)


@on_ranks(2)
def test_counts_are_saved_as_of_the_whole():
    mesh = init_device_mesh("cpu", (2,))
    assert_counts_are_of_the_whole(parallel(expansions(mcf.bf16i8), mesh))
    assert_counts_are_of_the_whole(fully_shard(expansions(mcf.bf16i8)))
    assert_counts_are_of_the_whole(mcf.as_expansion(parallel(Block(), mesh), mcf.bf16i8))


@pytest.mark.slow
@on_ranks(4)
def test_counts_of_two_dimensions_are_saved_as_of_the_whole():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallel(expansions(mcf.bf16i8), mesh["tensor"])
    assert_counts_are_of_the_whole(fully_shard(model, mesh=mesh["data"]))
    assert_counts_are_of_the_whole(fully_shard(expansions(mcf.bf16i8), mesh=mesh))
    divided = distribute_tensor(
        expansions(mcf.bf16i8).up.weight.detach(), mesh, [Shard(0), Shard(0)]
    )
    assert_counts_are_of_the_whole(nn.ParameterDict({"x": nn.Parameter(divided)}))


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_divided_layers_become_plain_again(format):
    mesh = init_device_mesh("cpu", (2,))
    model = mcf.as_plain(parallel(expansions(format), mesh), torch.float32)
    for p, q in zip(model.parameters(), Block().parameters(), strict=True):
        assert p.dtype == torch.float32
        unit = 2.0 ** (1 - format.precision) if format else 2**-16
        torch.testing.assert_close(whole(p).double(), q.detach(), rtol=unit, atol=0)


@pytest.mark.slow
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_divided_layers_compile(format):
    mesh = init_device_mesh("cpu", (2,))
    models = [parallel(make(format), mesh) for make in (expansions, plain)]
    outputs = [torch.compile(model, backend="aot_eager")(x_of(mesh)) for model in models]
    assert torch.equal(*outputs)
    for y in outputs:
        y.float().square().mean().backward()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(whole(p.grad), whole(q.grad))


@pytest.mark.slow
@over_formats(*IN_MODULES)
@on_ranks(4)
def test_copies_of_shards(format):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model, unsharded, twin = expansions(format), expansions(format), plain(format)
    fully_shard(model, mesh=mesh)
    fully_shard(twin, mesh=mesh)
    x = torch.randn(3, 2, 6).bfloat16()
    for a, b in zip(*(trained(m, x) for m in (model, twin)), strict=True):
        assert torch.equal(a, b)
    trained(unsharded, x)
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same_terms(whole(p), q.detach())


@pytest.mark.slow
@over_formats(*IN_MODULES)
@on_ranks(4)
def test_shards_of_layers_divided_within(format):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, twin, unsharded = expansions(format), plain(format), expansions(format)
    for m in (model, twin):
        fully_shard(parallel(m, mesh["tensor"]), mesh=mesh["data"])
    assert model.up.weight.to_local().shape == (2, 6)
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same(p, q)
    results = [trained(m, x_of(mesh["tensor"])) for m in (model, twin)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    optimizer = collaged(torch.optim.AdamW(unsharded.parameters(), lr=1e-2, fused=True))
    for p, grad in zip(unsharded.parameters(), results[0][1:], strict=True):
        p.grad = grad
    optimizer.step()
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same(p, q)


@pytest.mark.slow
@over_formats(*KEPT)
@on_ranks(4)
def test_kept_in_smaller_groups_after_forward(format):
    x = torch.randn(3, 2, 6).bfloat16()
    results = []
    for m in (nn.Sequential(expansions(format)), nn.Sequential(plain(format))):
        fully_shard(m[0], reshard_after_forward=2)
        results.append(trained(fully_shard(m), x))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@on_ranks(4)
def test_shards_of_shards_have_places_of_their_own():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    model = nn.Sequential(nn.Linear(5, 6, bias=False))
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shards"])
    weight, found = model[0].weight, [None] * 4
    dist.all_gather_object(found, (place_of(weight), weight.to_local().numel()))
    places, sizes = zip(*sorted(found), strict=True)
    assert places == tuple(itertools.accumulate(sizes[:-1], initial=0))
    assert sum(sizes) == 30
