"""Steps in backward on several processes: under `fully_shard` and DistributedDataParallel."""

import contextlib

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import mcftensor as mcf
from support.helpers import assert_same_bits
from support.ranks import on_ranks
from support.sharded import Network, by_blocks

CONVERSIONS = {"expansions": mcf.as_expansion, "plain": nn.Module.bfloat16}


def sharded(kind, **options):
    return by_blocks(CONVERSIONS[kind](Network()), **options)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(7, (3, 5), generator=generator)
    return model(tokens).float().square().mean()


def left(model, optimizer):
    """What this rank has after training."""
    parameters = [p.to_local() for p in model.parameters()]
    states = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
    tensors = [{k: getattr(x, "_local_tensor", x) for k, x in s.items()} for s in states]
    return parameters, tensors


def train(make, release, backward=None, mode=None, **options):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if mode:
        mcf.collage(optimizer, mode)
    handle = mcf.step_in_backward(model, optimizer, **options) if release else None
    for step in range(3):
        if backward is None:
            loss_of(model, step).backward()
        else:
            backward(model, handle, step)
        if handle:
            assert all(p.grad is None for p in model.parameters())
            assert len(handle.stepped) == 9
        optimizer.step()
        optimizer.zero_grad()
    return left(model, optimizer)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("bucket", [0, 1 << 22])
@pytest.mark.parametrize("kind", CONVERSIONS)
@on_ranks(2)
def test_the_bits_of_a_step_after_backward(kind, bucket):
    for options in (
        {},
        {"reshard_after_forward": False},
        {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):

        def make(options=options):
            return sharded(kind, **options)

        for mode in (None, "plus") if kind == "expansions" else (None,):
            assert_same_bits(
                train(make, False, mode=mode), train(make, True, mode=mode, bucket_bytes=bucket)
            )


@on_ranks(2)
def test_checkpointed_activations():
    def make():
        model = sharded("expansions")
        model.checkpointed = True
        return model

    assert_same_bits(train(make, False), train(make, True, bucket_bytes=0))


@on_ranks(2)
def test_few_gradients_are_alive_at_a_time():
    model = sharded("expansions")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    alive = []
    for p in parameters:
        p.register_post_accumulate_grad_hook(
            lambda p: alive.append(sum(q.grad is not None for q in parameters))
        )
    mcf.step_in_backward(model, optimizer, bucket_bytes=0)
    loss_of(model, 0).backward()
    assert alive == [1] * 9


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("kind", CONVERSIONS)
@pytest.mark.parametrize("summed", [False, True])
@on_ranks(2)
def test_microbatches(kind, summed):
    def make():
        model = sharded(kind)
        if summed:
            mcf.accumulate_gradients(model)
        return model

    def backward(model, handle, step):
        for part in range(3):
            with handle.no_step() if handle and part < 2 else contextlib.nullcontext():
                loss_of(model, 3 * step + part).backward()

    assert_same_bits(train(make, False, backward), train(make, True, backward, bucket_bytes=0))


@on_ranks(2)
def test_microbatches_without_communication():
    """FSDP sums whole gradients, and gives none to hooks, until the last one."""

    def backward(model, handle, step):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss_of(model, 3 * step + part).backward()

    def make():
        return sharded("expansions")

    assert_same_bits(train(make, False, backward), train(make, True, backward))


@pytest.mark.parametrize("kind", CONVERSIONS)
@on_ranks(2)
def test_clipping_by_the_norm(kind):
    norms = []

    def backward(model, handle, step):
        loss = loss_of(model, step)
        if handle:
            with handle.measure_norm(0.05):
                loss.backward()
            norms.append(handle.norm)
            loss = loss_of(model, step)
        loss.backward()
        if not handle:
            norms.append(clip_grad_norm_(model.parameters(), 0.05).full_tensor())

    def make():
        return sharded(kind)

    assert_same_bits(train(make, False, backward), train(make, True, backward, bucket_bytes=0))
    assert_same_bits(norms[:3], [x.full_tensor() for x in norms[3:]])
    assert float(norms[0]) > 0.05
    train(make, True, clip_by_previous_norm=0.05)


class Used(Network):
    """Without a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


def trained_by_ddp(kind, released, steps=3, accumulated=1, **options):
    """What training leaves, and the losses."""
    model = CONVERSIONS[kind](Used())
    ddp = DDP(model, bucket_cap_mb=2e-4, gradient_as_bucket_view=options.pop("views", False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    handle = mcf.step_in_backward(ddp, optimizer, **options) if released else None
    for step in range(steps):
        for i in range(accumulated):
            with ddp.no_sync() if i < accumulated - 1 else contextlib.nullcontext():
                loss_of(ddp, step * accumulated + i).backward()
        if released:
            assert all(p.grad is None for p in model.parameters())
            assert set(handle.stepped) == {name for name, _ in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return left_whole(model, optimizer)


def left_whole(model, optimizer):
    return list(model.parameters()), [dict(optimizer.state[p]) for p in model.parameters()]


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("options", [{}, {"views": True}, {"accumulated": 2}], ids=str)
@pytest.mark.parametrize("kind", CONVERSIONS)
@on_ranks(2)
def test_under_ddp_parameters_step_when_their_bucket_is_reduced(kind, options):
    expected = trained_by_ddp(kind, False, **options)
    assert_same_bits(trained_by_ddp(kind, True, bucket_bytes=0, **options), expected)
    assert_same_bits(trained_by_ddp(kind, True, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_under_ddp_on_other_numbers_of_ranks(ranks, world, kind):
    on_ranks(world)(_check_under_ddp)(ranks, kind=kind)


def _check_under_ddp(kind):
    expected = trained_by_ddp(kind, False)
    assert_same_bits(trained_by_ddp(kind, True, bucket_bytes=0), expected)


_check_under_ddp.check = _check_under_ddp


@on_ranks(2)
def test_under_ddp_a_handle_holds_measures_and_ends():
    model = CONVERSIONS["expansions"](Used())
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = mcf.step_in_backward(ddp, optimizer)
    with handle.measure_norm(1.0):
        loss_of(ddp, 0).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    with handle.no_step():
        loss_of(ddp, 0).backward()
    assert handle.stepped == []
    norm = clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(handle.norm, norm, rtol=1e-2, atol=0, check_dtype=False)
    optimizer.step()
    optimizer.zero_grad()
    handle.remove()
    loss_of(ddp, 0).backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_under_ddp_a_second_step_in_an_iteration_raises():
    model = CONVERSIONS["expansions"](Used())
    ddp = DDP(model)
    handle = mcf.step_in_backward(ddp, torch.optim.SGD(model.parameters(), lr=0.0))
    loss_of(ddp, 0).backward()
    assert handle.stepped
    with pytest.raises(mcf.errors.StepInBackwardError, match="another gradient after its step"):
        loss_of(ddp, 0).backward()


@on_ranks(2)
def test_ddp_comes_first_and_knows_which_gradients_are_there():
    model = CONVERSIONS["expansions"](Network())
    optimizer = torch.optim.AdamW(model.parameters())
    handle = mcf.step_in_backward(model, optimizer)
    for module in (model, model.blocks):
        with pytest.raises(ValueError, match="with the DistributedDataParallel itself"):
            DDP(module)
    handle.remove()
    with pytest.raises(ValueError, match="with the DistributedDataParallel itself"):
        mcf.step_in_backward(nn.Sequential(DDP(model)), optimizer)
    for option in ("find_unused_parameters", "static_graph"):
        with pytest.raises(ValueError, match=option):
            mcf.step_in_backward(DDP(model, **{option: True}), optimizer)


@on_ranks(2)
def test_flat_shards_are_refused():
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id="cpu")
    with pytest.raises(ValueError, match="fully_shard"):
        mcf.step_in_backward(model, torch.optim.AdamW(model.parameters()))


@on_ranks(2)
def test_parameters_from_before_sharding_are_noticed():
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    with pytest.raises(ValueError, match="make it after the model is sharded"):
        mcf.step_in_backward(model, optimizer)


@on_ranks(2)
def test_memory_is_that_of_this_rank():
    model = sharded("expansions")
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters()), "plus")
    before = mcf.meters.summary(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    after = mcf.meters.summary(model, optimizer)
    used = [x for x in after.held if not x.name.startswith("unused")]
    assert [(x.name, x.state, x.format, x.bytes) for x in used] == [
        (x.name, x.state, x.format, x.bytes) for x in before.held if not x.name.startswith("unused")
    ]
    local = [p.to_local() for p in model.parameters()]
    expected = sum(t.nbytes for p in local for t in p.components)
    assert after.bytes_of("parameters") == expected
    assert after.trained == sum(p.numel() for p in local)
