"""Collectives of torch.distributed on expansions, and sums over DTensors of them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mcftensor as mcf
from support.helpers import STORED, assert_same_terms, exact, sample
from support.ranks import on_ranks
from support.releases import MEANS_OF_SHARDS

BLOCKS = [mcf.mxfp8, mcf.ue5m3, mcf.ue5m3.nearest, mcf.q4, mcf.ue4]
FORMATS = [
    *(mcf.bf16x2, mcf.bf16x3, mcf.fp32x2),
    mcf.Format(torch.bfloat16, 2, rounding="stochastic"),
    mcf.bf16x2.with_rounding("balanced"),
    *STORED,
    *BLOCKS,
]


def of_rank(rank: int, format: mcf.Format, *shape: int) -> mcf.MCFTensor:
    return sample(format, *(shape or (3, 2)), seed=rank)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@on_ranks(2)
def test_every_term_moves(format):
    rank = dist.get_rank()
    mine, everything = of_rank(rank, format), [of_rank(0, format), of_rank(1, format)]

    x = mine.clone()
    work = dist.broadcast(x, src=1, async_op=True)
    work.wait()
    assert_same_terms(x, everything[1])

    found = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(found, mine)
    for x, y in zip(found, everything, strict=True):
        assert_same_terms(x, y)

    joined = mine.new_empty(6, 2)
    dist.all_gather_into_tensor(joined, mine)
    assert_same_terms(joined, torch.cat(everything))

    found = [torch.empty_like(mine) for _ in range(2)] if rank == 0 else None
    dist.gather(mine, found, dst=0)
    if rank == 0:
        assert_same_terms(found[1], everything[1])

    x = torch.empty_like(mine)
    dist.scatter(x, everything if rank == 1 else None, src=1)
    assert_same_terms(x, mine)

    parts = [of_rank(rank, format, 2, 2), of_rank(rank + 2, format, 2, 2)]
    x = mine.new_empty(4, 2)
    dist.all_to_all_single(x, torch.cat(parts))
    assert_same_terms(x[:2], of_rank(2 * rank, format, 2, 2))


REDUCTIONS = {
    dist.ReduceOp.SUM: lambda x, y: x + y,
    dist.ReduceOp.AVG: lambda x, y: (x + y) / 2,
    dist.ReduceOp.PRODUCT: lambda x, y: x * y,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@on_ranks(2)
def test_reductions_have_the_precision_of_the_format_and_the_same_bits_on_all_ranks(format):
    torch.manual_seed(dist.get_rank())  # each rank draws numbers of its own
    for op, formula in REDUCTIONS.items():
        x = of_rank(dist.get_rank(), format)
        dist.all_reduce(x, op)
        found = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(found, x)
        assert_same_terms(*found)
        parts = [exact(of_rank(rank, format)) for rank in range(2)]
        error = (exact(x) - formula(*parts)).abs()
        bound = 4 * mcf.finfo(format).eps / 2
        if format not in (*STORED, *BLOCKS):
            bound = 4 * format.u**format.terms
        assert (error <= bound * (parts[0].abs() + parts[1].abs())).all()


@on_ranks(2)
def test_sums_and_norms_of_distributed_tensors_have_the_precision_of_the_format():
    mesh = init_device_mesh("cpu", (2,))
    x = sample(mcf.bf16x3, 5, 3)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    assert sharded.to_local().shape == ((3, 2)[dist.get_rank()], 3)
    assert_same_terms(sharded.full_tensor(), x)
    assert_same_terms(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), x)
    assert_same_terms(distribute_tensor(x, mesh, [Replicate()]).to_local(), x)
    for function in (torch.sum, torch.linalg.vector_norm, lambda x: x.sum(dim=0)):
        found, wanted = function(sharded).full_tensor(), function(exact(x))
        assert found.format == mcf.bf16x3
        torch.testing.assert_close(exact(found), wanted, rtol=2e-6, atol=2e-6)


@MEANS_OF_SHARDS
@on_ranks(2)
def test_means_of_shards_of_unlike_sizes():
    x = sample(mcf.bf16x3, 5, 3)
    found = distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)]).mean().full_tensor()
    assert found.format == mcf.bf16x3
    torch.testing.assert_close(exact(found), exact(x).mean(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("format", BLOCKS, ids=lambda f: f.name)
@on_ranks(2)
def test_rows_are_distributed(format):
    mesh = init_device_mesh("cpu", (2,))
    x = sample(format, 5, 3 + bool(format.packed), 14)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    local = sharded.to_local()
    assert local.format is format
    assert local.shape == ((3, 2)[dist.get_rank()], *x.shape[1:])
    assert_same_terms(sharded.full_tensor(), x)
    assert_same_terms(distribute_tensor(x, mesh, [Replicate()]).to_local(), x)
    torch.testing.assert_close(
        exact(sharded.sum().full_tensor()), exact(x).sum(), rtol=1e-5, atol=0
    )
    sharded.mul_(0.5)
    assert torch.equal(exact(sharded.full_tensor()), exact(x) / 2)
    if format.packed:  # PyTorch splits an even dimension by a view across rows
        return
    moved = sharded.redistribute(mesh, [Shard(1)])
    assert torch.equal(exact(moved.full_tensor()), exact(x) / 2)


@on_ranks(2)
def test_no_two_terms_are_under_way_at_once():
    """With gloo, processes crash where several are: torch 2.13 and 2.15, on plain tensors too."""
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    for x in (
        functional.all_gather_into_tensor(of_rank(0, mcf.bf16x3, 4, 3), 2, group),
        functional.broadcast(of_rank(dist.get_rank(), mcf.bf16x3, 4, 3), 0, group),
    ):
        assert torch._C._distributed_c10d._get_work_registry_size() == 0
        assert_same_terms(x[:4], of_rank(0, mcf.bf16x3, 4, 3))


@on_ranks(2)
def test_what_would_lose_terms_is_refused():
    x = of_rank(0, mcf.bf16x2)
    with pytest.raises(NotImplementedError, match=r"reduce_scatter.*bf16x2 \(2, 2\).*all_reduce"):
        dist.reduce_scatter_tensor(x.new_empty(1, 2), x[:2])
    with pytest.raises(NotImplementedError, match=r"send.*bf16x2 \(3, 2\).*components"):
        dist.send(x, dst=1 - dist.get_rank())
    with pytest.raises(NotImplementedError, match=r"c10d.reduce_.*bf16x2"):
        dist.reduce(x, dst=0)
    with pytest.raises(ValueError, match="bf16x2 and bf16x3"):
        dist.all_gather([x, torch.empty_like(x)], of_rank(0, mcf.bf16x3))
    with pytest.raises(ValueError, match="plain"):
        dist.all_gather(list(torch.empty(2, 3, 2, dtype=x.dtype)), x)


@on_ranks(2)
def test_plain_tensors_beside_lists_of_expansions_are_refused():
    """In either direction, before anything is sent: PyTorch would read memory that is not there."""
    x = of_rank(0, mcf.bf16x2)
    plain = torch.zeros(3, 2, dtype=x.dtype)
    for own, several in ((plain, [x, x]), (x, [plain, plain])):
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=r"(?s)scatter.*bf16x2 and plain"):
                dist.scatter(own, several)
            with pytest.raises(ValueError, match=r"(?s)gather.*bf16x2 and plain"):
                dist.gather(own, several)
        with pytest.raises(ValueError, match=r"(?s)all_?gather.*bf16x2 and plain"):
            dist.all_gather(several, own)
        with pytest.raises(ValueError, match=r"(?s)(alltoall|all_to_all).*bf16x2 and plain"):
            dist.all_to_all([own, own], several)
    with pytest.raises(ValueError, match=r"reduce_scatter.*bf16x2 and plain"):
        dist.reduce_scatter(plain, [x, x])
    assert torch.equal(plain, torch.zeros_like(plain))


@on_ranks(2)
def test_a_sum_of_parameters_as_a_vector():
    """Gradients are recorded while it is taken, as in models averaged by hand."""
    rank = dist.get_rank()
    parameters = [torch.nn.Parameter(of_rank(rank + i, mcf.bf16x2)) for i in (0, 2)]
    vector = torch.nn.utils.parameters_to_vector(parameters)
    dist.all_reduce(vector)
    right = sum(
        exact(torch.cat([of_rank(r, mcf.bf16x2), of_rank(r + 2, mcf.bf16x2)])) for r in (0, 1)
    )
    assert exact(vector.detach()).tolist() == pytest.approx(right.flatten().tolist(), rel=2.0**-15)
