"""Gradients without order on several processes: the bits of one process that has all leaves."""

import contextlib
import copy
import gc
import io
import itertools
import os
import random
import signal
import tempfile
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import mcftensor as mcf
from mcftensor.kernels.without_float64 import widest
from mcftensor.meters.edq import readings
from mcftensor.sums.accumulators import accumulate
from mcftensor.sums.digits import WIDEST
from support.ranks import on_ranks

MICROBATCHES = 8

MODELS = {
    "bf16": (nn.Module.bfloat16, None),
    "bf16x2": (mcf.as_expansion, "plus"),
    "bf16i16": (partial(mcf.as_expansion, format=mcf.bf16i16), None),
    "compact": (partial(mcf.as_expansion, format=mcf.bf16i8), "compact"),
}


class Network(nn.Module):
    """Uneven shards, tied weights, a layer that every third microbatch leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(33, 32)
        self.up, self.norm, self.down = nn.Linear(32, 67), nn.LayerNorm(67), nn.Linear(67, 32)
        self.seldom = nn.Linear(32, 32)
        self.head = nn.Linear(32, 33, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, is_used=True):
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.gelu(self.norm(self.up(x))))
        x = x + self.seldom(x) if is_used else x
        return self.head(x)


def loss_of(model: nn.Module, step: int, i: int, uses_all: bool) -> torch.Tensor:
    """Of one microbatch; they have unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    tokens = torch.randint(33, (4, 3 + i % 3), generator=generator)
    logits = model(tokens[:, :-1], uses_all or i % 3 > 0)
    of_all = sum(4 * (2 + k % 3) for k in range(MICROBATCHES))
    return (
        nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum"
        )
        / of_all
    )


def made(kind: str, convert, meshes=None, **options) -> tuple[nn.Module, nn.Module]:
    """A model, and what runs it."""
    model = convert(Network())
    if kind == "ddp":
        return model, DDP(model, find_unused_parameters=True, **options)
    if kind in ("fsdp", "hsdp"):
        world = dist.get_world_size()
        shape = (world,) if kind == "fsdp" else (2, world // 2)
        names = ("shards",) if kind == "fsdp" else ("copies", "shards")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model.up, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return model, model


def shares(world: int, order: list[int]) -> list[list[int]]:
    """The microbatches of each process."""
    return [order[rank::world] for rank in range(world)]


def train(
    kind: str,
    name: str,
    steps: range,
    *,
    order: list[int] | None = None,
    state: bytes | None = None,
    optimizer_of=torch.optim.AdamW,
    is_free: bool = True,
    max_norm: float = 0.5,
    is_metered: bool = False,
    **options,
) -> dict[str, object]:
    """What some steps leave behind: whole parameters and states, losses, norms, readings."""
    world = dist.get_world_size() if kind != "plain" else 1
    rank = dist.get_rank() if kind != "plain" else 0
    convert, mode = MODELS[name]
    model, runner = made(kind, convert, **options)
    handle = mcf.order_free_gradients(runner, microbatches=MICROBATCHES) if is_free else None
    # A power of two: torch's SGD adds products to bf16 parameters in one rounding or in two, as an
    # element is in one of its vectors or left over, so that shards would differ from the whole.
    optimizer = optimizer_of(model.parameters(), lr=2**-7)
    if mode is not None:
        optimizer = mcf.collage(optimizer, mode)
    if state is not None:
        loaded = torch.load(io.BytesIO(state), weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    meter = mcf.EDQ(optimizer, names=model) if is_metered else None
    every = shares(world, order or list(range(MICROBATCHES)))
    passes = max(map(len, every))
    losses, norms = [], []
    for step in steps:
        own = []
        for k in range(passes):
            if k >= len(every[rank]):
                if kind in ("fsdp", "hsdp"):
                    with handle.padding():
                        loss_of(runner, step, 0, uses_all=True).backward()
                continue
            is_last = k == len(every[rank]) - 1
            quiet = kind == "ddp" and not is_last
            with runner.no_sync() if quiet else contextlib.nullcontext():
                loss = loss_of(runner, step, every[rank][k], uses_all=kind not in ("plain", "ddp"))
                loss.backward() if is_free or kind == "plain" else (loss * world).backward()
            own.append(loss.detach())
        norm = clip_grad_norm_(model.parameters(), max_norm)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        losses.append(handle.total(torch.stack(own)) if handle else torch.stack(own).sum())
        optimizer.step()
        optimizer.zero_grad()
    buffer = io.BytesIO()
    if kind in ("plain", "ddp"):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return {
        "parameters": [terms(p) for p in model.parameters()],
        "states": [
            terms(x)
            for p in model.parameters()
            for _, x in sorted(optimizer.state[p].items())
            if isinstance(x, torch.Tensor)
        ],
        "losses": [x.double().item().hex() for x in losses],
        "norms": [x.double().item().hex() for x in norms],
        "readings": readings_of(meter) if meter else [],
        "state": buffer.getvalue(),
    }


def readings_of(meter: mcf.EDQ) -> list[str]:
    """All figures of all samples and of each parameter, to the last bit."""
    assert not meter.not_metered
    found = {"": meter.history, "groups": meter.per_group} | meter.per_parameter
    found |= {"states": meter.states} | meter.per_state
    return [f"{name}: {figures!r}" for name, figures in sorted(found.items())]


def terms(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return [t.clone() for t in getattr(x, "components", (x,))]


def differing(a: dict[str, object], b: dict[str, object]) -> dict[str, int]:
    """How many numbers, of each kind, have other bits."""
    counts = {}
    for key in ("parameters", "states"):
        counts[key] = 0
        for x, y in zip(a[key], b[key], strict=True):
            for s, t in zip(x, y, strict=True):
                assert s.shape == t.shape
                same = s.reshape(-1).view(torch.uint8) == t.reshape(-1).view(torch.uint8)
                counts[key] += int((~same).sum())
    for key in ("losses", "norms", "readings"):
        counts[key] = sum(x != y for x, y in zip(a[key], b[key], strict=True))
    return counts


NONE = {"parameters": 0, "states": 0, "losses": 0, "norms": 0, "readings": 0}


def expected(name: str, steps: range, uses_all: bool, **options) -> dict[str, object]:
    """One process, all leaves."""
    with pytest.MonkeyPatch.context() as patch:
        if uses_all:
            patch.setattr(
                f"{__name__}.loss_of",
                lambda model, step, i, uses_all, own=loss_of: own(model, step, i, True),
            )
        return train("plain", name, steps, **options)


def check(kind: str, name: str, steps: int, **options) -> None:
    own = {k: v for k, v in options.items() if k in ("optimizer_of", "is_metered")}
    right = [None]
    if dist.get_rank() == 0:
        right = [expected(name, range(steps), kind not in ("plain", "ddp"), **own)]
    dist.broadcast_object_list(right)
    got = train(kind, name, range(steps), **options)
    assert differing(got, right[0]) == NONE


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_two_processes_have_the_bits_of_one(kind, name):
    check(kind, name, 3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
@on_ranks(4)
def test_four_processes_have_the_bits_of_one(kind):
    check(kind, "bf16x2", 3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(3)
def test_three_processes_with_unequal_shares_have_the_bits_of_one(kind):
    check(kind, "bf16", 3)


SGD = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer_of", [torch.optim.AdamW, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_200_steps_on_every_number_of_processes(ranks, kind, name, optimizer_of, world):
    if name == "compact" and optimizer_of is SGD:
        pytest.skip("its states are those of Adam")
    arguments = {"kind": kind, "name": name, "steps": 200, "optimizer_of": optimizer_of}
    ranks.run(world, "gloo", __name__, "compared", arguments)


def compared(**arguments):
    check(**arguments)


compared.check = compared


@pytest.mark.slow
@on_ranks(4)
def test_without_it_most_bits_differ():
    """What the tests above would see."""
    right = expected("bf16x2", range(20), False)
    got = train("ddp", "bf16x2", range(20), is_free=False)
    counts = differing(got, right)
    elements = sum(t.numel() for x in right["parameters"] for t in x)
    assert counts["parameters"] > elements / 2
    assert counts["norms"] > 15


QUICK = [(2, "bf16x2", "ddp"), (4, "compact", "fsdp")]


@pytest.mark.parametrize(
    ("world", "name", "kind"),
    [
        pytest.param(*x, marks=() if x in QUICK else pytest.mark.slow)
        for x in itertools.product((2, 4), MODELS, ("ddp", "fsdp"))
    ],
)
def test_meters_read_the_same_on_every_number_of_processes(ranks, kind, name, world):
    arguments = {"kind": kind, "name": name, "steps": 2, "is_metered": True}
    ranks.run(world, "gloo", __name__, "compared", arguments)


@pytest.mark.slow
@on_ranks(4)
def test_sums_of_meters_in_the_order_of_torch_differ():
    """What the tests above would see: dot products in float64, of each process and then of all."""

    def rounded(x, others):
        products = torch.stack([x @ y for y in others])
        return accumulate(products.view(-1, 1), None, WIDEST)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings, "accumulate_dots", rounded)
        right = expected("bf16x2", range(2), True, is_metered=True)
        got = train("fsdp", "bf16x2", range(2), is_metered=True)
    counts = differing(got, right)
    assert counts.pop("readings") > len(right["readings"]) / 2
    assert not any(counts.values())


@on_ranks(2)
def test_order_of_processes_and_of_leaves_and_size_of_buckets_are_nothing():
    right = expected("bf16x2", range(2), False)
    for seed in range(3):
        order = random.Random(seed).sample(range(MICROBATCHES), MICROBATCHES)
        for options in ({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}):
            got = train("ddp", "bf16x2", range(2), order=order, **options)
            assert differing(got, right) == NONE
    sharded = expected("bf16x2", range(2), True)
    got = train("fsdp", "bf16x2", range(2), order=order)
    assert differing(got, sharded) == NONE


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["bf16x2", "compact"])
def test_a_run_resumed_on_fewer_processes_has_the_bits_of_one_that_did_not_stop(ranks, world, name):
    """Four processes stop after three steps; others go on."""
    state = _outcome(ranks, 4, {"name": name, "start": 0, "stop": 3, "state": None})
    resumed = _outcome(ranks, world, {"name": name, "start": 3, "stop": 6, "state": state})
    whole = _outcome(ranks, 4, {"name": name, "start": 0, "stop": 6, "state": None})
    a, b = (torch.load(io.BytesIO(x), weights_only=True) for x in (resumed, whole))
    assert _bytes(a) == _bytes(b)


def _bytes(x: object) -> object:
    if isinstance(x, torch.Tensor):
        return [t.reshape(-1).view(torch.uint8).tolist() for t in getattr(x, "components", (x,))]
    if isinstance(x, dict):
        return {k: _bytes(v) for k, v in x.items()}
    return [_bytes(v) for v in x] if isinstance(x, (list, tuple)) else x


def _outcome(ranks, world: int, arguments: dict[str, object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        ranks.run(world, "gloo", __name__, "saved", {**arguments, "path": str(path)})
        return path.read_bytes()


def saved(name, start, stop, state, path):
    result = train("ddp", name, range(start, stop), state=state)
    if dist.get_rank() == 0:
        Path(path).write_bytes(result["state"])


saved.check = saved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16x2", "compact"])
@pytest.mark.parametrize("seed", range(3))
def test_kills_in_the_middle_of_steps_change_no_bit(name, seed, tmp_path):
    """Processes are killed in backward, and others, fewer or more, go on from what they saved."""
    chance, steps = random.Random(seed), 8
    path, finished = tmp_path / "state", []
    for world in (*chance.sample([2, 3, 4], 3), chance.choice([1, 2, 3])):
        done = torch.load(path, weights_only=True)[0] if path.exists() else 0
        is_last = len(finished) == 3
        at = None if is_last else (chance.randrange(world), chance.randint(done, done + 1))
        finished.append(_trained_until_killed(world, tmp_path, name, steps, at))
    assert finished == [False, False, False, True]
    _, state = torch.load(path, weights_only=True)
    whole = expected(name, range(steps), False)["state"]
    a, b = (torch.load(io.BytesIO(x), weights_only=True) for x in (state, whole))
    assert _bytes(a) == _bytes(b)


def _trained_until_killed(world, folder, name, steps, at) -> bool:
    """Whether all processes came to the end."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        given = (world, f"{place}/store", str(folder), name, steps, at)
        arguments = [(rank, *given) for rank in range(world)]
        processes = [context.Process(target=_saves_each_step, args=x) for x in arguments]
        for process in processes:
            process.start()
        if at is not None:
            processes[at[0]].join()
            assert processes[at[0]].exitcode == -signal.SIGKILL
            for process in processes:
                process.kill()
        for process in processes:
            process.join()
    return all(process.exitcode == 0 for process in processes)


def _saves_each_step(rank, world, store, folder, name, steps, at):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    path, state, done = Path(folder, "state"), None, 0
    if path.exists():
        done, state = torch.load(path, weights_only=True)
    for step in range(done, steps):
        with pytest.MonkeyPatch.context() as patch:
            if at == (rank, step):
                patch.setattr(f"{__name__}.loss_of", _killed_in_backward)
            state = train("ddp", name, range(step, step + 1), state=state)["state"]
        if rank == 0:
            unfinished = path.with_suffix(".new")
            torch.save((step + 1, state), unfinished)
            unfinished.replace(path)
    dist.barrier()


def _killed_in_backward(model, step, i, uses_all, own=loss_of):
    parameter = next(p for p in model.parameters() if p.requires_grad)
    parameter.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    return own(model, step, i, uses_all)


@on_ranks(2)
def test_traffic_is_that_of_bf16():
    """One leaf a process: what a ring would send. Several: 2 bytes each, at most 8."""
    elements = 64 * 64
    for microbatches, bytes_of_leaves in ((2, 2), (4, 4), (8, 8), (16, 8)):
        model = nn.Linear(64, 64, bias=False).bfloat16()
        runner = DDP(model)
        mcf.order_free_gradients(runner, microbatches=microbatches)
        for k in range(microbatches // 2):
            is_last = k == microbatches // 2 - 1
            with contextlib.nullcontext() if is_last else runner.no_sync():
                loss = runner(torch.randn(4, 64).bfloat16()).sum()
                sent = _sent_in(loss.backward)
        assert sent == [elements // 2 * bytes_of_leaves, elements // 2 * 2]


def _sent_in(function) -> list[int]:
    """Bytes that this process sends: of its leaves, and of what it owns."""
    sent = []
    send = dist.batch_isend_irecv

    def counted(messages):
        sent.append(sum(x.tensor.nbytes for x in messages if x.op is dist.isend))
        return send(messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted)
        function()
    return sent


@on_ranks(2)
def test_float32_parameters_computed_in_bf16_send_bf16_and_get_float32():
    torch.manual_seed(0)
    whole = nn.Linear(8, 8, bias=False)
    model = copy.deepcopy(whole)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    mcf.order_free_gradients(model, microbatches=2)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(5))
    model(x[dist.get_rank()]).float().square().sum().backward()
    got = model.weight.grad.full_tensor()
    assert got.dtype == torch.float32
    leaves = []
    for part in x:
        own = copy.deepcopy(whole).bfloat16()
        own(part.bfloat16()).float().square().sum().backward()
        leaves.append(own.weight.grad)
    assert torch.equal(got, leaves[0].float() + leaves[1].float())


@on_ranks(2)
def test_counts_that_are_not_those_announced_raise_on_all():
    runner = DDP(nn.Linear(2, 2).bfloat16())
    handle = mcf.order_free_gradients(runner, microbatches=3)
    with pytest.raises(
        RuntimeError, match="a step of 2 microbatches on all processes, not of the 3"
    ):
        runner(torch.ones(1, 2).bfloat16()).sum().backward()
    handle.reset()


@on_ranks(2)
def test_losses_and_counts():
    runner = DDP(nn.Linear(2, 2).bfloat16())
    handle = mcf.order_free_gradients(runner, microbatches=3)
    own = [[1e16, 1.0], [-1e16]][dist.get_rank()]
    total = handle.total(torch.tensor(own, dtype=torch.float64))
    assert total.dtype == widest()
    assert total.item() == 1.0
    counts = handle.total(torch.tensor([2**60 + 1] * (1 + dist.get_rank())))
    assert counts.dtype == torch.int64
    assert counts.item() == 3 * (2**60 + 1)


@on_ranks(2)
def test_released_gradients_of_one_leaf_a_process():
    def run(released: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = mcf.as_expansion(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
        fully_shard(model)
        mcf.order_free_gradients(model, microbatches=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if released:
            mcf.step_in_backward(model, optimizer)
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(3, 4).bfloat16()).float().square().sum().backward()
            assert (model[0].weight.grad is None) == released
            optimizer.step()
            optimizer.zero_grad()
        return [t for p in model.parameters() for t in terms(p)]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
def test_clipping_measures_the_norm_exactly():
    model = nn.Sequential(nn.Linear(16, 40, bias=False), nn.Linear(40, 3)).bfloat16()
    fully_shard(model[0])
    fully_shard(model)
    mcf.order_free_gradients(model, microbatches=2)
    model(torch.randn(5, 16).bfloat16()).float().square().sum().backward()
    whole = [p.grad.full_tensor().double() for p in model.parameters()]
    right = torch.stack([x.square().sum() for x in whole]).sum().sqrt().float()
    norm = clip_grad_norm_(model.parameters(), 1e-3)
    assert norm.dtype == torch.float32
    assert norm == right
    clipped = torch.stack(
        [p.grad.full_tensor().double().square().sum() for p in model.parameters()]
    )
    assert clipped.sum().sqrt() == pytest.approx(1e-3, rel=5e-3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2)
def test_a_removed_handle_leaves_averages_to_torch(kind):
    model = nn.Linear(2, 2, bias=False).bfloat16()
    runner = DDP(model) if kind == "ddp" else fully_shard(model)
    with mcf.order_free_gradients(runner, microbatches=2):
        pass
    runner(torch.full((1, 2), 2.0 * dist.get_rank()).bfloat16()).sum().backward()
    grad = model.weight.grad
    grad = grad.full_tensor() if kind == "fsdp" else grad
    assert torch.equal(grad, torch.ones(2, 2).bfloat16())


def passes(runner: nn.Module, batches: list[torch.Tensor]) -> None:
    """The backward passes of a process in a step, the last one with an exchange."""
    for i, x in enumerate(batches):
        with contextlib.nullcontext() if i == len(batches) - 1 else runner.no_sync():
            runner(x).sum().backward()


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("leaves", [1, 2, 6])
@on_ranks(2)
def test_gradients_of_other_strides(leaves, is_view):
    """Which lie in a bucket as their parameter lies in memory."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 5, 3).bfloat16().to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    runner = DDP(model, gradient_as_bucket_view=is_view)
    mcf.order_free_gradients(runner, microbatches=2 * leaves)
    mcf.order_free_gradients(alone, microbatches=2 * leaves)
    batches = list(torch.randn(2 * leaves, 1, 3, 5, 5).bfloat16())
    for _ in range(2):
        passes(runner, batches[dist.get_rank() :: 2])
        for x in batches:
            alone(x).sum().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
            assert p.grad.stride() == q.grad.stride()
        runner.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("clears", [False, True])
@on_ranks(2)
def test_gradients_that_are_still_there_raise_under_ddp(is_view, clears):
    runner = DDP(nn.Linear(2, 2).bfloat16(), gradient_as_bucket_view=is_view)
    handle = mcf.order_free_gradients(runner, microbatches=2)
    x = torch.ones(1, 2).bfloat16()
    runner(x).sum().backward()
    if clears:
        runner.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="has got another gradient"):
        runner(x).sum().backward()
    handle.reset()


@on_ranks(2)
def test_a_second_handle_of_one_ddp_and_copies():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    runner = DDP(model)
    with mcf.order_free_gradients(runner, microbatches=2) as first:
        passes(runner, [torch.ones(1, 1).bfloat16()])
        copied = copy.deepcopy(runner)
        torch.save(runner, io.BytesIO())
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None  # and what others have received into
    runner.zero_grad()
    copied.zero_grad()
    own = torch.full((1, 1), 2.0 * dist.get_rank()).bfloat16()
    passes(runner, [own])
    passes(copied, [own])
    assert model.weight.grad.item() == copied.module.weight.grad.item() == 1.0  # means
    runner.zero_grad()
    mcf.order_free_gradients(runner, microbatches=4)
    passes(runner, [own, own])
    assert model.weight.grad.item() == 4.0


@on_ranks(2)
def test_what_is_around_the_model_is_to_be_given():
    model = nn.Linear(2, 2).bfloat16()
    runner = DDP(model)
    with pytest.raises(ValueError, match=r"weight is also in a DistributedDataParallel around"):
        mcf.order_free_gradients(model, microbatches=2)
    mcf.order_free_gradients(runner, microbatches=2).remove()
    sharded = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"also in a FSDPSequential around this Linear"):
        mcf.order_free_gradients(sharded[0], microbatches=2)
    mcf.order_free_gradients(sharded, microbatches=2)


@on_ranks(2)
def test_static_graphs_have_one_leaf_a_process():
    runner = DDP(nn.Linear(2, 2).bfloat16(), static_graph=True)
    with pytest.raises(ValueError, match=r"static_graph=True .* 2 microbatches at most"):
        mcf.order_free_gradients(runner, microbatches=3)
    mcf.order_free_gradients(runner, microbatches=2)
    for _ in range(3):
        passes(runner, [torch.full((1, 2), 1.0 + dist.get_rank()).bfloat16()])
        assert runner.module.weight.grad[0, 0].item() == 3.0
        runner.zero_grad()


@on_ranks(2)
def test_a_process_without_microbatches():
    runner = DDP(nn.Linear(1, 1, bias=False).bfloat16())
    handle = mcf.order_free_gradients(runner, microbatches=3)
    one = torch.ones(1, 1).bfloat16()
    if dist.get_rank() == 0:
        passes(runner, [one] * 3)
    else:
        with handle.padding():
            passes(runner, [5 * one])
    assert runner.module.weight.grad.item() == 3.0


@on_ranks(4)
def test_the_norm_of_shards_of_shards():
    """Of tensor parallelism within `fully_shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shards"])
    mcf.order_free_gradients(model, microbatches=2)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("shards"))
    model(torch.randn(2, 8, generator=generator)).sum().backward()
    whole = [p.grad.full_tensor().double().square().sum() for p in model.parameters()]
    assert clip_grad_norm_(model.parameters(), 1e9) == torch.stack(whole).sum().sqrt().float()


@on_ranks(2)
def test_summands_of_tensor_parallelism_are_added():
    """Each process has the gradient of a part of the sequence, and the weight is whole."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.LayerNorm(4))
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": SequenceParallel(sequence_dim=0)})
    mcf.order_free_gradients(model, microbatches=2)
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    for _ in range(2):
        model(distribute_tensor(x, mesh, [Replicate()])).sum().backward()
    alone(x).sum().backward()
    grad = model[0].bias.grad
    assert grad.placements == model[0].bias.placements
    assert torch.equal(grad.full_tensor(), 2 * alone[0].bias.grad)
    norm = clip_grad_norm_(model.parameters(), 1e9)
    whole = [p.grad.full_tensor().double().square().sum() for p in model.parameters()]
    assert norm == torch.stack(whole).sum().sqrt().float()
