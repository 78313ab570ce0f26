"""A model and its optimizer, converted by one call: what they were goes on as it was."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mcftensor as mcf
from common.database import cases, configurations, paths_of
from support.helpers import assert_same_bits, exact, small_model
from support.optimizers import CASES, SAMPLE

SHAPES = [(), (7,), (3, 5), (2, 3, 4), (40, 50)]
STEPS = 12
# Adafactor's default eps is that of the dtype of its parameters.
OPTIONS = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.Adafactor: {"eps": (1e-30, 1e-3)}}
SCALARS = ("step", "eta", "mu", "mu_product")


def gradients(parameters, first):
    """Those of one step after another, the same for parameters of any kind; and a loss."""
    for step in itertools.count(first):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        yield torch.tensor(1e6 - 10.0 * step)


def train(model, optimizer, schedule=None, first=0, steps=STEPS):
    calls = gradients(list(model.parameters()), first)
    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda: next(calls))
        else:
            next(calls)
            optimizer.step()
        if schedule is not None:
            schedule.step()


def network(name, dtype=torch.float32):
    shapes = [(7, 5), (40, 50)] if name == "Muon" else SHAPES
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList(
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    )


def groups(model, name, keywords):
    """Two groups with settings of their own; LBFGS takes one."""
    first, second = list(model)[::2], list(model)[1::2]
    if name == "LBFGS":
        return list(model)
    return [{"params": first}, {"params": second, "lr": keywords.get("lr", 1e-3) / 4}]


def plain_states(model, optimizer):
    """Every number of the states, as float32 where it is stored."""
    for i, p in enumerate(model):
        for name, x in optimizer.state[p].items():
            if isinstance(x, torch.Tensor):
                yield (i, name), mcf.as_plain(x, torch.float32) if x.is_floating_point() else x


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id="-".join(case), marks=() if SAMPLE[case[0]] == case[1] else pytest.mark.slow
        )
        for case in cases()
        if case[2] in ("for-loop", "foreach")
    ],
)
def test_a_run_in_float32_goes_on_with_its_bits(case):
    """In `bf16i16`, which is float32: with states, groups and a scheduler from before."""
    name, configuration, path = case
    keywords = configurations(name)[configuration].keywords | paths_of(name)[path]
    runs = []
    for is_ours in (True, False):
        model = network(name)
        parameters = list(model)
        optimizer = getattr(torch.optim, name)(groups(model, name, keywords), **keywords)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, schedule)
        if is_ours:
            found = mcf.prepare(model, optimizer, None, mcf.bf16i16)
            assert found[0] is model
            assert found[1] is optimizer
            assert all(p is q for p, q in zip(model, parameters, strict=True))
            assert {p.format for p in model} == {mcf.bf16i16}
        train(model, optimizer, schedule, STEPS)
        runs.append((model, optimizer))
    (ours, own), (theirs, other) = runs
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(mcf.as_plain(p, torch.float32), q)
    got, wanted = dict(plain_states(ours, own)), dict(plain_states(theirs, other))
    assert got.keys() == wanted.keys()
    for key, x in wanted.items():
        assert torch.equal(got[key], x), key
    assert [g["lr"] for g in own.param_groups] == [g["lr"] for g in other.param_groups]


@pytest.mark.thinned(of=36)
@pytest.mark.parametrize("mode", ["light", "plus", "full", "compact", "compact4", None])
@pytest.mark.parametrize(("cls", "flags"), CASES)
def test_in_every_mode_updates_go_on(cls, flags, mode):
    """Near those of float64 from the same parameters and states, far nearer than plain bf16."""
    options = OPTIONS.get(cls, {})
    model = network(cls.__name__)
    with torch.no_grad():
        for p in model:  # numbers of bfloat16, so that plain ones start there too
            p.copy_(p.bfloat16())
    optimizer = cls(groups(model, cls.__name__, {}), lr=1e-3, **options, **flags)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, schedule)
    start = torch.cat([p.detach().double().flatten() for p in model])
    moved = {}
    for kind in ("ours", torch.float64, torch.bfloat16):
        own, other, rates = copy.deepcopy((model, optimizer, schedule))
        rates.optimizer = other
        if kind == "ours":
            mcf.prepare(own, other, mode)
        else:
            own.to(kind)
            for p, state in other.state.items():
                other.state[p] = {
                    k: x.to(kind) if isinstance(x, torch.Tensor) and k not in SCALARS else x
                    for k, x in state.items()
                }
        train(own, other, rates, STEPS)
        moved[kind] = torch.cat([exact(p.detach()).flatten() for p in own]) - start
    wide = moved[torch.float64]
    error, plain = (float((moved[k] - wide).norm() / wide.norm()) for k in ("ours", torch.bfloat16))
    assert error < {"compact": 0.08, "compact4": 0.5, "light": 0.01}.get(mode, 0.004)
    assert plain > 0.5


def test_it_is_the_two_calls():
    found = []
    for is_one in (True, False):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if is_one:
            mcf.prepare(model, optimizer)
        else:
            mcf.as_expansion(model)
            mcf.collage(optimizer, "plus")
        train(model, optimizer)
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same_bits(*found)


def test_states_become_what_the_mode_says_rounded_once():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    before = {p: dict(state) for p, state in optimizer.state.items()}
    mcf.prepare(model, optimizer)
    for p, state in before.items():
        found = optimizer.state[p]
        assert torch.equal(found["exp_avg"], state["exp_avg"].bfloat16())
        assert found["exp_avg_sq"].format == p.format
        assert_same_bits(found["exp_avg_sq"], mcf.as_expansion(state["exp_avg_sq"], p.format))
        assert found["step"] == STEPS
    assert optimizer.param_groups[0]["fused"]


def test_without_a_mode_states_are_in_the_format_of_their_parameter():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    mcf.prepare(model, optimizer, None)
    for p, state in optimizer.state.items():
        assert state["exp_avg"].format == state["exp_avg_sq"].format == p.format


def test_counts_of_steps_are_such_as_the_fused_path_takes():
    wide = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # then torch counts in float64, unless it is fused
    try:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
    finally:
        torch.set_default_dtype(wide)
    mcf.prepare(model, optimizer, overrides={"bias": None})
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}
    train(model, optimizer)
    assert optimizer.state[model.bias]["step"] == 2 * STEPS


def test_sparse_gradients():
    runs = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(20, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
        for step in range(8):
            if step == 4 and is_ours:
                mcf.prepare(table, optimizer, None, mcf.bf16i16)
            optimizer.zero_grad()
            table(torch.tensor([step, step, 7])).float().sum().backward()
            optimizer.step()
        runs.append(exact(table.weight.detach()))
    assert torch.equal(*runs)


class Wrapper(torch.optim.Optimizer):
    """One that passes on what it is asked, as Accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def test_errors_leave_all_as_it_was():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = torch.optim.SGD(small_model().parameters(), lr=1e-3)
    calls = {
        "unknown mode 'most'": lambda: mcf.prepare(model, optimizer, "most"),
        "format=format": lambda: mcf.prepare(model, optimizer, "exact"),
        "matches none": lambda: mcf.prepare(model, optimizer, overrides={"head": None}),
        "no state 'velocity'": lambda: mcf.prepare(model, optimizer, {"velocity": None}),
        "no parameter of this optimizer": lambda: mcf.prepare(model, other),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    wrong = {
        "prepare: got Sequential and generator; give a module": (model, model.parameters()),
        "Sequential and AdamW and SGD; .* several optimizers, call": (model, optimizer, other),
        "Sequential and list; .* several optimizers, call it for each": (model, [optimizer, other]),
        "passes its steps on to another optimizer": (model, Wrapper(optimizer)),
    }
    for message, arguments in wrong.items():
        with pytest.raises(TypeError, match=message):
            mcf.prepare(*arguments)
    with pytest.raises(TypeError, match=r"prepare: torch\.float32 is a plain dtype"):
        mcf.prepare(model, optimizer, "plus", torch.float32)
    assert_same_bits((model.state_dict(), optimizer.state_dict()), before)


# -------------------------------------------------------- vectors in float32, under autocast


class Scale(nn.Module):
    """The norm of transformers' Llama, and of most that followed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(16),
    "RMSNorm": lambda: nn.RMSNorm(16),
    "GroupNorm": lambda: nn.GroupNorm(4, 16),
    "BatchNorm1d": lambda: nn.BatchNorm1d(16),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(16, affine=True),
    "Llama": Scale,
}


def with_norm(kind):
    """A model whose matrices are numbers of bfloat16, and whose vectors are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), NORMS[kind](), nn.Linear(16, 4))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(4e-3 * torch.randn(p.shape))
            else:
                p.copy_(p.bfloat16())
    return model


def vectors(model, format=None):
    return {name: format for name, p in model.named_parameters() if p.dim() < 2}


def under_autocast(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, 16, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
        y.float().square().mean().backward()
    return y.detach()


# Of torch, about norms of bfloat16 with weights in float32, as autocast makes them.
mismatch = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


@mismatch
@pytest.mark.parametrize("format", [None, mcf.fp32x2], ids=["plain", "fp32x2"])
@pytest.mark.parametrize("kind", NORMS)
def test_vectors_that_overrides_leave_in_float32_compute_in_it(kind, format):
    """Outputs and gradients are those of stock autocast, to the bit; by default they are not."""
    model, stock, default = with_norm(kind), with_norm(kind), with_norm(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    mcf.prepare(model, optimizer, overrides=vectors(model, format))
    mcf.as_expansion(default)
    output = under_autocast(model)
    assert torch.equal(output, under_autocast(stock))
    assert not torch.equal(output, under_autocast(default))
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert p.grad.dtype == (torch.bfloat16 if p.dim() > 1 else torch.float32)
        assert torch.equal(p.grad, q.grad.to(p.grad.dtype))


@pytest.mark.thinned(of=2)
@mismatch
@pytest.mark.parametrize("path", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("kind", NORMS)
def test_vectors_in_float32_train_as_with_stock_autocast(kind, path):
    """To the bit, if they alone move; and what else moves goes with them, without a warning."""
    flags = {"for-loop": {"foreach": False}}.get(path, {path: True})
    models = with_norm(kind), with_norm(kind)
    optimizers = []
    for model in models:
        groups = [{"params": [p]} for p in model.parameters()]
        for group in groups:
            group["lr"] = 1e-4 if group["params"][0].dim() < 2 else 0.0
        settings = {"weight_decay": 0.0, **flags}
        optimizers.append(torch.optim.AdamW(groups, **settings))
    mcf.prepare(models[0], optimizers[0], overrides=vectors(models[0]))
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            under_autocast(model, step)
            optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(mcf.as_plain(p, torch.float32), q)
    start = with_norm(kind)[1].weight
    assert (models[0][1].weight - start).abs().gt(0).all()
    state = optimizers[0].state[models[0][1].weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


@mismatch
def test_a_norm_moves_the_output_before_its_leading_term_moves():
    """In float32 a weight of 1.001 computes; in expansions its leading term, 1, does."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def output(weight, **options):
        norm = nn.LayerNorm(64, bias=False)
        nn.init.constant_(norm.weight, weight)
        mcf.as_expansion(norm, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return norm(x)

    in_float32 = {"overrides": {"weight": None}}
    assert torch.equal(output(1.001), output(1.0))
    assert torch.equal(output(1.0, **in_float32), output(1.0))
    assert 0.1 < (output(1.001, **in_float32) != output(1.0)).float().mean() < 0.5
