"""Expansion parameters divided over two dimensions of a mesh, and within layers."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import mcftensor as mcf
from mcftensor.tensor.sharded import format_of
from support.helpers import assert_same_terms
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


def expansions() -> Block:
    return mcf.as_expansion(Block())


def parallel(model: nn.Module, mesh) -> nn.Module:
    return parallelize_module(model, mesh, PLAN)


def whole(x) -> torch.Tensor:
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


def trained(model: nn.Module, x: torch.Tensor, fused: bool = True) -> list[torch.Tensor]:
    """One step of AdamW: the output before it, and the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    if any(format_of(p) for p in model.parameters()):
        mcf.collage(optimizer, "plus")
    y = model(x)
    y.float().square().mean().backward()
    grads = [whole(p.grad) for p in model.parameters()]
    optimizer.step()
    return [y.detach(), *grads]


def x_of(mesh) -> torch.Tensor:
    """The part of a batch of sequences that this rank computes with, the same on all."""
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    return x.chunk(2, dim=1)[mesh.get_local_rank()]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("order", ["converted first", "divided first"])
@on_ranks(2)
def test_layers_divided_within(order, fused):
    mesh = init_device_mesh("cpu", (2,))
    if order == "converted first":
        model = parallel(expansions(), mesh)
    else:
        model = mcf.as_expansion(parallel(Block(), mesh))
    unsharded = expansions()
    plain = parallel(Block().bfloat16(), mesh)
    assert model.up.weight.to_local().shape == (4, 6)
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert p.detach().to_local().role == "parameter"
        assert_same_terms(whole(p), q.detach())
    results = [trained(m, x_of(mesh), fused) for m in (model, plain)]
    for a, b in zip(*results, strict=True):
        assert not isinstance(a, mcf.MCFTensor)
        assert torch.equal(a, b)
    optimizer = torch.optim.AdamW(unsharded.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    mcf.collage(optimizer, "plus")
    for p, grad in zip(unsharded.parameters(), results[0][1:], strict=True):
        p.grad = grad
    optimizer.step()
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same_terms(whole(p), q.detach())


@on_ranks(2)
def test_divided_layers_become_plain_again():
    mesh = init_device_mesh("cpu", (2,))
    model = mcf.as_plain(parallel(expansions(), mesh), torch.float32)
    for p, q in zip(model.parameters(), Block().parameters(), strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(whole(p).double(), q.detach(), rtol=2**-16, atol=0)


@pytest.mark.slow
@on_ranks(2)
def test_divided_layers_compile():
    mesh = init_device_mesh("cpu", (2,))
    models = [parallel(make(), mesh) for make in (expansions, lambda: Block().bfloat16())]
    outputs = [torch.compile(model, backend="aot_eager")(x_of(mesh)) for model in models]
    assert torch.equal(*outputs)
    for y in outputs:
        y.float().square().mean().backward()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(whole(p.grad), whole(q.grad))


@pytest.mark.slow
@on_ranks(4)
def test_copies_of_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model, unsharded, plain = expansions(), expansions(), Block().bfloat16()
    fully_shard(model, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    x = torch.randn(3, 2, 6).bfloat16()
    for a, b in zip(*(trained(m, x) for m in (model, plain)), strict=True):
        assert torch.equal(a, b)
    trained(unsharded, x)
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same_terms(whole(p), q.detach())


@pytest.mark.slow
@on_ranks(4)
def test_shards_of_layers_divided_within():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, plain, unsharded = expansions(), Block().bfloat16(), expansions()
    for m in (model, plain):
        fully_shard(parallel(m, mesh["tensor"]), mesh=mesh["data"])
    assert model.up.weight.to_local().shape == (2, 6)
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same_terms(whole(p), q.detach())
    results = [trained(m, x_of(mesh["tensor"])) for m in (model, plain)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    optimizer = mcf.collage(torch.optim.AdamW(unsharded.parameters(), lr=1e-2, fused=True), "plus")
    for p, grad in zip(unsharded.parameters(), results[0][1:], strict=True):
        p.grad = grad
    optimizer.step()
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert_same_terms(whole(p), q.detach())


@pytest.mark.slow
@on_ranks(4)
def test_kept_in_smaller_groups_after_forward():
    x = torch.randn(3, 2, 6).bfloat16()
    results = []
    for m in (nn.Sequential(expansions()), nn.Sequential(Block().bfloat16())):
        fully_shard(m[0], reshard_after_forward=2)
        results.append(trained(fully_shard(m), x))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
