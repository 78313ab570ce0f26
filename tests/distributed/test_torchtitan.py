"""torchtitan's specification of a model, by a stand-in with its fields: the real one is tried by
`make works-with`."""

import dataclasses
import sys
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import mcftensor as mcf
from mcftensor.dispatch.operands import count_of
from mcftensor.training.torchtitan_spec import in_expansions
from support.forks import exit_status, needs_fork
from support.ranks import on_ranks


class Model(nn.Module):
    """Has a weight that is put together from others, as torchtitan's fused projections have."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 66, bias=False)
        self.second = nn.Linear(66, 4, bias=False)
        self.register_buffer("angles", torch.full((4,), 0.1))

    def forward(self, x):
        return self.second(self.first(x))

    def init_weights(self):
        self.angles.copy_(torch.full((4,), 0.1))
        parts = [self.first.weight.new_empty(22, 32) for _ in range(3)]
        for i, part in enumerate(parts):
            nn.init.constant_(part, 0.01 * i + 0.003)
        self.first.weight.copy_(torch.cat(parts))
        nn.init.constant_(self.second.weight, 0.02)


@dataclasses.dataclass
class Spec:
    parallelize_fn: Any
    post_optimizer_build_fn: Any
    state_dict_adapter: Any


def shard(model, *, calls):
    calls.append("shard")
    assert all(isinstance(p, mcf.MCFTensor) for p in model.parameters())
    return fully_shard(model)


def built(format, mode, optimizer=torch.optim.AdamW, **options):
    """What torchtitan's Trainer does with a specification."""
    calls = []
    spec = Spec(shard, lambda *given: calls.append("finish"), None)
    spec = in_expansions(spec, format, mode, **options)
    with torch.device("meta"):
        model = Model()
    model = spec.parallelize_fn(model, calls=calls)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    made = optimizer(model.parameters(), lr=1e-3)
    spec.post_optimizer_build_fn([made], [model], None)
    assert calls == ["shard", "finish"]
    return model, made


def train(model, optimizer, start, end):
    for step in range(start, end):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 32, generator=generator).bfloat16()
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(model, optimizer):
    states = [x for state in optimizer.state.values() for x in state.values()]
    return [getattr(x.detach(), "_local_tensor", x) for x in (*model.parameters(), *states)]


def bits(*training):
    found = []
    for x in tensors(*training):
        found += [*x.components, x.writes] if isinstance(x, mcf.MCFTensor) else [x]
    return [None if x is None else x.clone() for x in found]


def differing(xs, ys):
    assert len(xs) == len(ys)
    return sum(x is not None and not torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize(
    ("format", "mode", "size"),
    [(None, "plus", 12.0), (mcf.bf16i8, "compact", 7.1), ("bf16i16", {"exp_avg": None}, 12.0)],
)
@on_ranks(2)
def test_a_specification_in_expansions(format, mode, size):
    one, two = built(format, mode), built(format, mode)
    assert one[0].angles.dtype == torch.float32
    train(*one, 0, 3)
    elements = sum(getattr(p, "_local_tensor", p).numel() for p in one[0].parameters())
    parts = [c for x in tensors(*one) for c in getattr(x, "components", (x,))]
    held = sum(c.nbytes for c in parts) / elements + 2
    assert held == pytest.approx(size, abs=0.05)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    train(*two, 0, 1)
    assert differing(bits(*one), bits(*two))
    for training, move in ((one, dcp.save), (two, dcp.load)):
        # torchtitan looks at the storage of what a model gives.
        state = training[0].state_dict()
        assert all(getattr(x, "_local_tensor", x).untyped_storage() for x in state.values())
        optimizer = training[1].state_dict()
        move({"model": state, "optimizer": optimizer}, checkpoint_id=folder[0])
        training[0].load_state_dict(state)
        training[1].load_state_dict(optimizer)
    assert not differing(bits(*one), bits(*two))
    for training in (one, two):
        train(*training, 3, 5)
    assert not differing(bits(*one), bits(*two))


@on_ranks(2)
def test_shards_begin_at_their_places():
    """Also a weight that is put together from others, which have the place of its shard."""
    model, _ = built(mcf.bf16i8, None)
    counts = [int(count_of(p)) for p in model.parameters()]
    found = [None, None]
    dist.all_gather_object(found, counts)
    whole = mcf.as_expansion(Model(), mcf.bf16i8)
    salts = [int(count_of(p)) >> 32 for p in whole.parameters()]
    assert [count >> 32 for count in found[0]] == salts
    assert [(b - a) >> 32 for a, b in zip(*found, strict=True)] == [33 * 32, 2 * 66]


@on_ranks(2)
def test_initialized_shards_have_the_salts_of_their_names():
    """Without torchtitan: `to_empty` after sharding."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6, bias=False))
    fully_shard(mcf.as_expansion(model, mcf.bf16i8)).to_empty(device="cpu")
    whole = mcf.as_expansion(nn.Sequential(nn.Linear(4, 6, bias=False)), mcf.bf16i8)
    salt = int(count_of(whole[0].weight)) >> 32
    assert int(count_of(model[0].weight)) >> 32 == salt + 12 * dist.get_rank()


class Adapter:
    def __init__(self, *given):
        self.given = given

    def to_hf(self, state_dict):
        return {f"model.{name}": state_dict[name] for name in state_dict}


def test_exports_have_leading_terms_alone():
    spec = in_expansions(Spec(lambda model: model, None, Adapter), mcf.bf16i16, "full")
    model = spec.parallelize_fn(nn.Linear(3, 2))
    adapter = spec.state_dict_adapter("config", "path")
    assert adapter.given == ("config", "path")
    exported = adapter.to_hf(model.state_dict())
    assert list(exported) == ["model.weight", "model.bias"]
    assert torch.equal(exported["model.weight"], mcf.as_plain(model.weight))


def test_states_without_a_mode_are_what_the_optimizer_makes():
    model = in_expansions(Spec(lambda model: model, None, None), None, None)
    optimizer = torch.optim.AdamW(
        (layer := model.parallelize_fn(nn.Linear(3, 2))).parameters(), fused=True
    )
    model.post_optimizer_build_fn([optimizer], [layer], None)
    layer(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["exp_avg"].format == mcf.bf16x2


def test_overrides_reach_the_conversion():
    spec = in_expansions(
        Spec(lambda model: model, None, None), overrides={"first.weight": mcf.bf16x3}
    )
    formats = [p.format for p in spec.parallelize_fn(Model()).parameters()]
    assert formats == [mcf.bf16x3, mcf.bf16x2]


@pytest.mark.parametrize("spec", [None, Spec, nn.Linear(2, 2)])
def test_what_is_no_specification(spec):
    with pytest.raises(TypeError, match=r"in_expansions: got .*; give a ModelSpec of torchtitan"):
        in_expansions(spec)
    with pytest.raises(TypeError, match="in_expansions"):
        in_expansions(Spec(None, None, None), "no format")


STEP = """
import torch

def init_optim_state(optim):
    if optim.state:
        return
    for group in optim.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optim.param_groups]
    for group in optim.param_groups:
        group["lr"] = 0.0
    optim.step()
    for group, rate in zip(optim.param_groups, rates):
        group["lr"] = rate
    optim.zero_grad()
"""
CHECK = """
import torch, mcftensor as mcf
model = mcf.as_expansion(torch.nn.Linear(40, 8, bias=False), mcf.bf16i8)
from torchtitan.components.optimizer.optimizer import init_optim_state
optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), fused=True), "compact")
before = [x.clone() for x in (*model.weight.components, model.weight.writes)]
init_optim_state(optimizer)
after = [*model.weight.components, model.weight.writes]
assert all(map(torch.equal, before, after)), (before[-1], after[-1])
assert optimizer.state[model.weight]["exp_avg"].format == mcf.mxfp8
"""


@needs_fork
def test_the_step_that_makes_states_is_not_counted(tmp_path):
    """torchtitan takes one with zero gradients and a rate of 0 before it saves or loads."""
    package = tmp_path / "torchtitan/components/optimizer"
    package.mkdir(parents=True)
    (package / "optimizer.py").write_text(STEP)

    def check():
        sys.path.insert(0, str(tmp_path))
        exec(CHECK, {})

    assert exit_status(check) == 0
