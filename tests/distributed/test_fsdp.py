"""Expansion parameters under `fully_shard`: leading terms travel, all terms stay sharded."""

import copy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import mcftensor as mcf
from mcftensor.tensor.components import format_of
from support.helpers import IN_MODULES, KEPT, assert_same_terms, exact, over_formats
from support.ranks import Wire, on_ranks

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "fsdp.py")


class Network(nn.Module):
    """Shards that are even, uneven (5 rows) and empty (1 row); matrices, vectors, tied weights."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 4))
        self.gain = nn.Parameter(torch.ones(1, 4))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = False
        self.double()
        for p in self.parameters():  # all terms are busy
            nn.init.normal_(p, mean=float(p.dim() == 1), std=0.5)  # for two terms in matrices

    def forward(self, tokens):
        run = checkpoint if self.checkpointed else lambda f, x, **options: f(x)
        x = self.embedding(tokens)
        return self.head((x + run(self.layers, x, use_reentrant=False)) * self.gain)


def expansions(format=None) -> Network:
    return mcf.as_expansion(Network(), format)


def plain(format=None) -> Network:
    """What an expansion computes as, in bfloat16."""
    model = Network().bfloat16()
    if format is not None:  # which may have rounded otherwise
        for p, q in zip(model.parameters(), expansions(format).parameters(), strict=True):
            p.data = q.compute_tensor.clone()
    return model


def sharded(model: Network, **options) -> Network:
    fully_shard(model.layers, **options)
    fully_shard(model, **options)
    return model


def batch(step: int = 0) -> torch.Tensor:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(7, (3, 2), generator=generator)


def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(batch(step)).float().square().mean()


def whole(x) -> torch.Tensor:
    return x.detach().full_tensor()


def assert_same_parameters(sharded: nn.Module, unsharded: nn.Module) -> None:
    sharded.reshard()
    for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
        assert_same_terms(whole(p), q.detach())


BF16 = torch.bfloat16
OPTIONS = {
    "default": {},
    "kept after forward": {"reshard_after_forward": False},
    "in smaller groups": {"reshard_after_forward": 2},
    "in groups of one": {"reshard_after_forward": 1},
    "reduced in float32": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    "policy of bfloat16": {"mp_policy": MixedPrecisionPolicy(BF16, BF16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize(
    "name", [*OPTIONS, "checkpointed", pytest.param("compiled", marks=pytest.mark.slow)]
)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_outputs_and_gradients_are_those_of_plain_bf16(format, name):
    results = []
    for make in (expansions, plain):
        model = sharded(make(format), **OPTIONS.get(name, {}))
        model.checkpointed = name == "checkpointed"
        run = torch.compile(model, backend="aot_eager") if name == "compiled" else model
        y = run(batch())
        y.float().square().mean().backward()
        loss(run, 1).backward()  # added up
        results.append([y, *(p.grad for p in model.parameters())])
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype
        x, y = (getattr(z, "_local_tensor", z) for z in (x, y))
        assert type(x) is torch.Tensor
        assert torch.equal(x, y)


@pytest.mark.thinned(of=3)
@over_formats(mcf.bf16i8, mcf.e4m3i8)
@on_ranks(4)
def test_resharding_to_smaller_groups(format):
    """Between forward and backward two ranks of four hold a parameter together, plain by then."""
    results = []
    for options in ({}, {"reshard_after_forward": 2}):
        torch.manual_seed(0)
        model = mcf.as_expansion(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), format)
        for layer in model:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        for i in range(2):
            optimizer.zero_grad()
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(i)).bfloat16()
            model(x).float().square().mean().backward()
            optimizer.step()
        model.reshard()
        results.append(list(model.parameters()))
    for p, q in zip(*results, strict=True):
        assert torch.equal(whole(p.grad), whole(q.grad))
        assert_same_terms(whole(p), whole(q))


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_a_wider_compute_type_receives_what_it_can_hold(format, dtype):
    model = expansions(format)
    plain = mcf.as_plain(copy.deepcopy(model), dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float64)
    fully_shard(model, mp_policy=policy)
    y = model(batch())
    assert y.dtype == torch.float64
    assert torch.equal(y, plain(batch()).double())
    y.float().square().mean().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_every_rank_holds_its_part_of_every_term(format):
    model = expansions(format)
    unsharded = copy.deepcopy(model)
    sharded(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model).backward()
    optimizer.step()
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        rows = [len(part) for part in torch.empty(q.shape[0], 0).chunk(2)]
        mine = rows[dist.get_rank()] if dist.get_rank() < len(rows) else 0
        for x in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            part = x.to_local()
            assert part.format == (q.format if x is p else q.format.of_states)
            assert part.shape == (mine, *q.shape[1:])
            stored = sum(t.untyped_storage().nbytes() for t in part.components)
            shared = sum(t.numel() for t in part.components if t.shape != part.shape)
            assert stored <= -(-q.shape[0] // 2) * q[0].numel() * part.format.bytes + 2 * shared
        assert p.detach().to_local().role == "parameter"
        assert type(p.grad.to_local()) is torch.Tensor


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_sharding_and_gathering_keep_every_term(format):
    model = expansions(format)
    unsharded = copy.deepcopy(model)
    assert all(term.any() for p in model.parameters() for term in p.components)
    assert_same_parameters(sharded(model), unsharded)
    loss(model).backward()
    assert_same_parameters(model, unsharded)


STEPS = {
    "AdamW, for-loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "SGD, foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    "SGD, for-loop": (
        torch.optim.SGD,
        {"foreach": False, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adam, foreach": (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    "NAdam, for-loop": (torch.optim.NAdam, {"foreach": False}),
    "RMSprop, foreach": (torch.optim.RMSprop, {"foreach": True, "momentum": 0.5}),
}


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize("name", STEPS)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_steps_give_the_bits_of_unsharded_ones(format, name):
    for mode in (None,) if format else (None, "light", "plus", "full"):
        model = expansions(format)
        unsharded = copy.deepcopy(model)
        sharded(model)
        make, options = STEPS[name]
        optimizers = [make(m.parameters(), lr=1e-2, **options) for m in (model, unsharded)]
        if mode:
            for optimizer in optimizers:
                mcf.collage(optimizer, mode)
        for step in range(2):
            optimizers[0].zero_grad()
            loss(model, step).backward()
            for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
                q.grad = whole(p.grad)
            for optimizer in optimizers:
                optimizer.step()
        assert all(type(p.grad.to_local()) is torch.Tensor for p in model.parameters())
        assert_same_parameters(model, unsharded)
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            assert whole(p).writes == q.writes
        states, references = (optimizer.state.values() for optimizer in optimizers)
        for state, reference in zip(states, references, strict=True):
            for key, x in reference.items():
                if isinstance(x, mcf.MCFTensor):
                    assert_same_terms(whole(state[key]), x)
                elif x.dim():
                    assert torch.equal(whole(state[key]), x)


BLOCKS_TO_NEAREST = {"exp_avg": mcf.mxfp8.nearest, "exp_avg_sq": mcf.ue5m3.nearest}
# Steps over states in blocks, which DTensors ask for other dtypes than that of the gradients.
IN_BLOCKS = {
    "to nearest": (torch.optim.AdamW, {"fused": True}, BLOCKS_TO_NEAREST),
    "to nearest, for-loop": (torch.optim.AdamW, {"foreach": False}, BLOCKS_TO_NEAREST),
    "chosen": (torch.optim.AdamW, {}, "compact"),
    "four bits": (torch.optim.AdamW, {}, "compact4"),
    "four bits, foreach": (torch.optim.AdamW, {"foreach": True}, "compact4"),
    "AdamW, for-loop": (torch.optim.AdamW, {"foreach": False}, "compact"),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}, "compact"),
    "Adam, for-loop": (torch.optim.Adam, {"foreach": False, "weight_decay": 0.1}, "compact"),
    "NAdam, foreach": (torch.optim.NAdam, {"foreach": True}, "compact"),
    "RAdam, for-loop": (torch.optim.RAdam, {"foreach": False}, "compact"),
    "Adamax, foreach": (torch.optim.Adamax, {"foreach": True}, "compact"),
    "RMSprop, for-loop": (torch.optim.RMSprop, {"foreach": False, "momentum": 0.5}, "compact"),
    "SGD, foreach": (
        torch.optim.SGD,
        {"foreach": True, "momentum": 0.9, "nesterov": True, "dampening": 0},
        "compact",
    ),
}


@pytest.mark.thinned(of=9)
@pytest.mark.parametrize("shape", [(2,), (1, 2)], ids=["FSDP", "HSDP"])
@pytest.mark.parametrize("name", IN_BLOCKS)
@on_ranks(2)
def test_states_in_blocks_have_the_bits_of_unsharded_ones(name, shape):
    """Blocks lie in rows, which are what is sharded."""
    make, options, mode = IN_BLOCKS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 5), nn.Linear(5, 33, bias=False))
    model = mcf.as_expansion(model, mcf.bf16i8, overrides={"*bias": mcf.bf16i16})
    unsharded = copy.deepcopy(model)
    names = ("replicated", "sharded")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizers = [
        mcf.collage(make(m.parameters(), lr=1e-2, **options), mode) for m in (model, unsharded)
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizers[0].zero_grad()
        model(torch.randn(4, 40, generator=generator).bfloat16()).square().mean().backward()
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            q.grad = whole(p.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(model, unsharded)
    in_blocks = set()
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        for key, x in optimizers[1].state[q].items():
            if isinstance(x, mcf.MCFTensor):
                assert optimizers[0].state[p][key].to_local().format is x.format
                assert_same_terms(whole(optimizers[0].state[p][key]), x)
                in_blocks |= {x.format} if x.format.shared else set()
    assert in_blocks


@on_ranks(2)
def test_dtensors_of_plain_tensors_want_one_dtype_as_ever():
    mesh = init_device_mesh("cpu", (2,))
    x, y = (distribute_tensor(torch.ones(4, dtype=d), mesh) for d in (torch.float32, BF16))
    with pytest.raises(RuntimeError, match="expected dtype"):
        x.lerp_(y, 0.5)
    with pytest.raises(RuntimeError, match="expected dtype"):
        torch._foreach_lerp_([x], [y], 0.5)


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_gradients_are_added_up_before_they_are_reduced(format):
    model = expansions(format)
    sharded(model)
    model.set_requires_gradient_sync(False)
    loss(model, 0).backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    loss(model, 1).backward()
    twin = sharded(plain(format))
    twin.set_requires_gradient_sync(False)
    loss(twin, 0).backward()
    twin.set_requires_gradient_sync(True)
    loss(twin, 1).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(p.grad), whole(q.grad))


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("foreach", [False, True])
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_gradients_are_clipped_by_their_norm_over_ranks(format, foreach):
    model = expansions(format)
    sharded(model)
    loss(model).backward()
    grads = [whole(p.grad).double() for p in model.parameters()]
    norm = torch.stack([g.norm() for g in grads]).norm()
    found = nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach).full_tensor()
    torch.testing.assert_close(found.double(), norm, rtol=1e-2, atol=0)
    clipped = torch.stack([whole(p.grad).double().norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(1e-3).double(), rtol=1e-2, atol=0)


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_a_scaler_skips_the_step_of_an_overflow_on_all_ranks(format, options):
    model = expansions(format)
    unsharded = copy.deepcopy(model)
    sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss(model)).backward()
    p = model.gain if options.get("fused") else model.layers[0].weight
    if p.grad.to_local().numel() and dist.get_rank() == 0:
        p.grad.to_local().view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same_parameters(model, unsharded)
    optimizer.zero_grad()
    scaler.scale(loss(model)).backward()
    scaler.step(optimizer)
    assert not torch.equal(mcf.as_plain(whole(model.gain)), mcf.as_plain(unsharded.gain))


@over_formats(mcf.bf16i16, mcf.bf16i8)
@on_ranks(2)
def test_initialized_after_sharding_on_the_meta_device(format):
    with torch.device("meta"):
        model = Network()
    mcf.as_expansion(model, format)
    sharded(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    nn.init.ones_(model.gain)
    assert model.head.weight is model.embedding.weight
    assert_same_terms(
        whole(model.layers[1].weight), mcf.as_expansion(torch.ones(5), format or mcf.bf16x3)
    )
    weight = model.layers[0].weight
    assert weight.detach().to_local().role == "parameter"
    assert whole(weight).components[0].unique().numel() > 10
    loss(model).backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    values = mcf.as_plain(whole(model.layers[1].weight), torch.float64)
    assert ((values - 1).abs() < 2e-3).all()
    assert (values != 1).any()
    plain = Network().bfloat16()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        q.data.copy_(mcf.as_plain(whole(p)))
    assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_as_many_bytes_travel_as_of_plain_bf16(format):
    wires = []
    for model in (expansions(format), Network().bfloat16(), Network().float()):
        sharded(model)
        loss(model).backward()
        with Wire() as wire:
            loss(model).backward()
        wires.append(wire.sent)
    assert wires[0] == wires[1]
    assert wires[0].keys() == {"_allgather_base_", "_reduce_scatter_base_"}
    assert all(2 * wires[0][name] == wires[2][name] for name in wires[0])


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("assign", [False, True])
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_a_plain_checkpoint_is_loaded_with_the_precision_of_the_format(format, assign):
    whole_model = Network(tied=False)
    with torch.device("meta" if assign else "cpu"):
        model = sharded(mcf.as_expansion(Network(tied=False), format))
    mesh = init_device_mesh("cpu", (2,))
    saved = whole_model.state_dict()
    model.load_state_dict(
        {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in saved.items()}, assign=assign
    )
    assert all(p.detach().to_local().role == "parameter" for p in model.parameters())
    unsharded = mcf.as_expansion(Network(tied=False), format)
    unsharded.load_state_dict(saved, assign=assign)
    assert_same_parameters(model, unsharded)
    assert torch.equal(model(batch()), unsharded(batch()))


@pytest.mark.thinned(of=3)
@over_formats(mcf.fp32x3, *IN_MODULES)
@on_ranks(2)
def test_edq_reads_what_it_reads_unsharded(format):
    model = mcf.as_expansion(Network(), format)
    unsharded = copy.deepcopy(model)
    sharded(model)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        for m in (model, unsharded)
    ]
    meters = [mcf.EDQ(mcf.collage(optimizer, "plus")) for optimizer in optimizers]
    for step in range(2):
        loss(model, step).backward()
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            q.grad = whole(p.grad)
        for optimizer in optimizers:
            optimizer.step()
    mine, reference = meters
    assert not mine.not_metered
    for name in reference.per_parameter:
        for key, value in reference.per_parameter[name].items():
            assert mine.per_parameter[name][key] == pytest.approx(value, rel=1e-12), (name, key)
    if format not in (KEPT[-1], mcf.e4m3i8):  # which lose some of each update
        assert mine.last["ratio"] > 0.99 > mine.last["ratio_leading"] - 0.01


@over_formats(*IN_MODULES)
@on_ranks(2)
def test_sharded_along_another_dimension(format):
    model = mcf.as_expansion(nn.Linear(6, 3).double(), format)
    unsharded = copy.deepcopy(model)
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))
    assert model.weight.to_local().shape == (3, 3)
    x = torch.randn(4, 6).bfloat16()
    assert torch.equal(model(x), unsharded(x))
    model.reshard()
    if format is not None and format.shared:  # each rank has blocks of its own
        columns = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
        assert torch.equal(exact(model.weight.to_local()), exact(unsharded.weight)[:, columns])
        assert_same_terms(whole(model.bias), unsharded.bias.detach())
    else:
        assert_same_parameters(model, unsharded)


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_frozen_layers_are_plain(format):
    model, twin = Network(), plain(format)
    twin.layers = Network().bfloat16().layers
    for m in (model, twin):
        m.layers.requires_grad_(False)
    fully_shard(mcf.as_expansion(model, format))
    fully_shard(twin)
    loss(model).backward()
    loss(twin).backward()
    assert type(model.layers[0].weight.to_local()) is torch.Tensor
    assert torch.equal(whole(model.gain.grad), whole(twin.gain.grad))


@on_ranks(2)
def test_parameters_of_several_dtypes_need_a_policy():
    def mixed() -> Network:
        model = Network().float()
        model.layers[1].requires_grad_(False)
        return mcf.as_expansion(model, overrides={"layers.1.*": None})

    with pytest.raises(TypeError, match=r"bf16x2.*param_dtype"):
        fully_shard(mixed())(batch())
    model = fully_shard(mixed(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert torch.equal(model(batch()), Network().bfloat16()(batch()))


@on_ranks(2)
def test_conversion_of_sharded_modules_is_refused():
    model = Network().bfloat16()
    sharded(model)
    with pytest.raises(RuntimeError, match="before it is sharded"):
        mcf.as_expansion(model)
    with pytest.raises(RuntimeError, match="full_tensor"):
        mcf.as_plain(model)


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_modules_are_not_taken_out_of_the_format(format):
    model = sharded(expansions(format))
    for convert in (model.float, model.double, lambda: model.to(torch.float16)):
        with pytest.raises(TypeError, match="as_plain"):
            convert()
    parallel = mcf.as_expansion(nn.Linear(4, 6), format)
    parallelize_module(parallel, init_device_mesh("cpu", (2,)), ColwiseParallel())
    with pytest.raises(TypeError, match="as_plain"):
        parallel.float()
    for module in (model.bfloat16().to("cpu"), parallel.bfloat16()):
        assert all(isinstance(p.to_local(), mcf.MCFTensor) for p in module.parameters())


@pytest.mark.thinned(of=3)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_state_dicts_of_the_first_rank_alone(format):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def run(mode):
        model = sharded(expansions(format))
        optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), foreach=True), mode)
        return model, optimizer

    def train(model, optimizer):
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for mode in ("plus", "full"):
        model, optimizer = run(mode)
        train(model, optimizer)
        whole = copy.deepcopy(get_model_state_dict(model, options=options))
        states = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        assert bool(whole) == (dist.get_rank() == 0)
        resumed, its_optimizer = run(mode)
        set_model_state_dict(resumed, whole, options=broadcast)
        set_optimizer_state_dict(resumed, its_optimizer, states, options=broadcast)
        for _ in range(2):
            for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
                assert_same_terms(a.to_local(), b.to_local())
                assert b.to_local().role == "parameter"
            train(model, optimizer)
            train(resumed, its_optimizer)


@on_ranks(2)
def test_numbers_beside_shards_are_loaded_as_they_are():
    model = sharded(expansions())
    optimizer, resumed = (torch.optim.NAdam(model.parameters()) for _ in range(2))
    loss(model).backward()
    optimizer.step()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in model.parameters():
        found, expected = (o.state[p]["mu_product"] for o in (resumed, optimizer))
        assert found.dtype == torch.float32
        assert found.equal(expected)


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_the_group_may_start_after_the_conversion(format):
    rank, folder = dist.get_rank(), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    models = [expansions(format), expansions(format)]
    nn.init.zeros_(models[1].gain)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder[0]}/store", rank=rank, world_size=2
    )
    given = models[0].state_dict() if rank == 0 else {}
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(models[1], given, options=broadcast)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert_same_terms(a, b)


@pytest.mark.thinned(of=2)
@over_formats(*IN_MODULES)
@on_ranks(2)
def test_the_first_rank_may_have_another_format(format):
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    longer = mcf.as_expansion(Network(), mcf.bf16x3).state_dict()
    for model in (expansions(format), Network().bfloat16()):
        rounded = {name: x.clone().copy_(longer[name]) for name, x in model.state_dict().items()}
        sharded(model)
        given = dict(longer) if dist.get_rank() == 0 else {}
        set_model_state_dict(model, given, options=broadcast)
        for name, p in model.state_dict().items():
            torch.testing.assert_close(
                mcf.as_plain(p.full_tensor(), torch.float64),
                mcf.as_plain(rounded[name], torch.float64),
                rtol=0,
                atol=0,
            )


@pytest.mark.thinned(of=2)
@over_formats(mcf.bf16x3, *IN_MODULES)
@on_ranks(2)
def test_conversion_of_distributed_tensors(format):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(5, 3, dtype=torch.float64)
    split = distribute_tensor(x, mesh, [Shard(0)])
    made = mcf.as_expansion(split, format)
    assert_same_terms(whole(made), mcf.as_expansion(x, format))
    assert torch.equal(
        whole(mcf.as_plain(made, torch.float32)),
        mcf.as_plain(mcf.as_expansion(x, format), torch.float32),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 32)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, **options) for _ in "ab")
        self.head = nn.Linear(32, 17)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def rhymes(step: int) -> torch.Tensor:
    """Two halves of a batch, of sequences that repeat themselves."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(17, (2, 4, 4), generator=generator).repeat(1, 1, 3)


def losses(model: nn.Module, parts: slice, steps: int) -> list[float]:
    """Training with AdamW in mode "plus" on parts of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    mcf.collage(optimizer, "plus")
    found = []
    for step in range(steps):
        tokens = rhymes(step)[parts].flatten(0, 1)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        value = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.parametrize("steps", [5, pytest.param(100, marks=pytest.mark.slow)])
@on_ranks(2)
def test_training_has_the_bits_of_ddp_and_agrees_with_one_process(steps):
    rank = dist.get_rank()
    models = [mcf.as_expansion(Transformer()) for _ in range(3)]
    for block in models[0].blocks:
        fully_shard(block)
    fully_shard(models[0])
    runs = [models[0], DDP(models[1]), models[2]]
    mine = slice(rank, rank + 1)
    parts = [mine, mine, slice(0, 2)]
    found = [losses(run, part, steps) for run, part in zip(runs, parts, strict=True)]
    assert found[0] == found[1]
    assert_same_parameters(models[0], models[1])
    halves = [None, None]
    dist.all_gather_object(halves, found[0])
    for x, y, together in zip(*halves, found[2], strict=True):
        assert (x + y) / 2 == pytest.approx(together, abs=0.01)
    assert found[2][-1] < found[2][0] - 0.003 * steps


@pytest.mark.slow
def test_the_example_prints_what_is_held_and_what_travels():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launcher, EXAMPLE, "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "process 1 holds" in run.stdout
    assert "reduce_scatter: 1,619,072 bytes" in run.stdout  # 2 bytes a parameter


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["default", "offloaded"])
@on_ranks(2, backend="nccl")
def test_on_gpus(name):
    options = {"offload_policy": CPUOffloadPolicy()} if name == "offloaded" else {}
    tokens, results = batch().cuda(), []
    for model in (expansions().cuda(), Network().bfloat16().cuda()):
        sharded(model, **options)
        model(tokens).float().square().mean().backward()
        results.append([whole(p.grad.cuda()) for p in model.parameters()])
        if format_of(model.gain):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            mcf.collage(optimizer, "plus").step()
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("format", [mcf.bf16i8, mcf.bf16i16, mcf.fp16i8, mcf.e4m3i8, mcf.bf16x2])
@on_ranks(1)
def test_one_rank_computes_with_the_weights_of_the_model(format):
    """FSDP copies the shard then; of tails of 8 bits some are halfway to another leading term."""
    torch.manual_seed(0)
    model = mcf.as_expansion(nn.Linear(64, 64, bias=False), format)
    sharded = copy.deepcopy(model)
    fully_shard(sharded)
    x = torch.randn(8, 64).to(model.weight.dtype)
    assert torch.equal(sharded(x), model(x))
    sharded.unshard()
    assert torch.equal(sharded.weight.detach(), model.weight.compute_tensor.detach())
