"""Another format between two steps: what is kept, what is lost and said, and what goes on."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mcftensor as mcf
from support.contract import fractions, numbers
from support.helpers import assert_same_bits

ALONE = mcf.Format(torch.bfloat16, 1, rounding="balanced")
PATHS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
WIDER = [
    (None, mcf.bf16i16), (None, mcf.bf16x2), (ALONE, mcf.bf16i16), (ALONE, mcf.bf16x3),
    (mcf.bf16i8, mcf.bf16i16), (mcf.bf16x2, mcf.bf16x3), (mcf.bf16i16, mcf.fp32x2),
    (mcf.fp16i8, mcf.fp16i16), (mcf.e4m3i8, mcf.bf16i16),
]  # fmt: skip


def network(format=None, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    return model.bfloat16() if format is None else mcf.as_expansion(model, format)


def train(model, optimizer, steps=3, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 32, generator=generator).to(model[0].weight.dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def values(model, optimizer):
    """Of every parameter and state, by name."""
    found = {name: numbers(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, x in optimizer.state[p].items():
            if isinstance(x, torch.Tensor) and x.shape == p.shape:
                found[f"{name}.{key}"] = numbers(x)
    return found


def trained(format, path="for-loop", make=torch.optim.AdamW, mode=None, **settings):
    model = network(format)
    optimizer = make(model.parameters(), lr=1e-2, **settings, **PATHS[path])
    if mode is not None:
        mcf.collage(optimizer, mode)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("old", "new"), WIDER, ids=str)
def test_values_and_states_are_kept_where_the_new_format_holds_them(old, new, path):
    model, optimizer = trained(old, path)
    before, parameters = values(model, optimizer), list(model.parameters())
    done = mcf.change_format(model, optimizer, new)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert {p.format for p in parameters} == {new}
    after = values(model, optimizer)
    assert after.keys() == before.keys()
    assert not done.lost
    for name, x in before.items():
        assert torch.equal(x, after[name]), name
    states = [x for p in parameters for x in optimizer.state[p].values() if x.shape == p.shape]
    assert len(states) == 12
    assert {x.format for x in states} == {new.of_states}
    train(model, optimizer, first=3)
    assert all(not torch.equal(numbers(p), before[k]) for k, p in model.named_parameters())


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("path", ["foreach", "fused"])
def test_steps_go_on_as_of_a_run_that_starts_there(path, make):
    settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
    model, optimizer = trained(ALONE, path, make, **settings)
    mcf.change_format(model, optimizer, mcf.bf16i16)
    twin = mcf.as_expansion(copy.deepcopy(mcf.as_plain(copy.deepcopy(model), torch.float32)),
                            mcf.bf16i16)  # fmt: skip
    other = make(twin.parameters(), lr=1e-2, **settings, **PATHS[path])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        other.state[q] = {
            k: mcf.as_expansion(numbers(x), mcf.bf16i16) if x.dim() else x.clone()
            for k, x in optimizer.state[p].items()
        }
    for m, o in ((model, optimizer), (twin, other)):
        train(m, o, 5, first=3)
    assert_same_bits(list(model.parameters()), list(twin.parameters()))


def test_what_is_lost_is_said():
    model, optimizer = trained(mcf.bf16i16, mode="full")
    before = values(model, optimizer)
    done = mcf.change_format(model, optimizer, mcf.bf16i8.nearest, "compact")
    after = values(model, optimizer)
    assert [x.format.name for x in list(optimizer.state[model[0].weight].values())[1:]] == [
        "mxfp8", "ue5m3",
    ]  # fmt: skip
    for name, x in before.items():
        differ = int((x != after[name]).sum())
        assert (name in done.lost) == bool(differ), name
        if differ:
            loss = done.lost[name]
            assert (loss.elements, loss.of) == (differ, x.numel())
            share = ((x - after[name]).norm() / x.norm()).item()
            assert abs(loss.share - share) <= 1e-9 + 1e-6 * share
    kept = {name for name in before if name not in done.lost}
    assert all(name.endswith(("exp_avg", "exp_avg_sq")) for name in kept)
    assert kept >= {"0.bias.exp_avg", "1.weight.exp_avg_sq"}  # vectors stay float32
    assert "lost in 0.weight: " in str(done)


def test_terms_beyond_float64_are_told_from_what_is_kept():
    model, optimizer = trained(mcf.bf16x2)
    with torch.no_grad():
        far = mcf.MCFTensor([torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-60]).bfloat16()])
        model[1].bias[:1] = far
    exact = fractions(model[1].bias)
    done = mcf.change_format(model, optimizer, mcf.bf16i16)
    assert done.lost["1.bias"].elements >= 1
    assert fractions(model[1].bias)[1:] == exact[1:]
    assert fractions(model[1].bias)[0] != exact[0]


@pytest.mark.wing("tools")
def test_memory_is_that_of_the_summaries():
    model, optimizer = trained(ALONE)
    first = mcf.meters.summary(model, optimizer)
    done = mcf.change_format(model, optimizer, mcf.bf16i16)
    assert done.before == first
    assert done.after == mcf.meters.summary(model, optimizer)
    counts_of_steps = 4 * 6 / sum(p.numel() for p in model.parameters())
    assert done.after.bytes_per_parameter == 14 + counts_of_steps
    assert str(done).splitlines() == [
        "8.13 to 14.02 bytes a parameter",
        "bf16br to bf16i16: 18 tensors",
    ]


def test_counts_and_salts_begin_anew():
    model, optimizer = trained(ALONE)
    assert model[0].weight.writes == 7  # decay and update of each step
    mcf.change_format(model, optimizer, mcf.bf16i8)
    assert {p.writes.item() for p in model.parameters()} == {1}
    fresh = mcf.as_expansion(mcf.as_plain(copy.deepcopy(model), torch.float32), mcf.bf16i8)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p._writes, q._writes)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "mode", ["light", "plus", "full", "compact", "compact4", {"exp_avg": mcf.bf16i16}]
)
def test_a_mode_is_kept(mode):
    model, optimizer = trained(mcf.bf16i8, mode=mode)
    kinds = [getattr(x, "format", x.dtype) for x in optimizer.state[model[0].weight].values()]
    mcf.change_format(model, optimizer, mcf.bf16i16)
    train(model, optimizer, first=3)
    found = [getattr(x, "format", x.dtype) for x in optimizer.state[model[0].weight].values()]
    assert found == [mcf.bf16i16 if x is mcf.bf16i8 else x for x in kinds]


def test_states_that_somebody_chose_stay():
    model, optimizer = trained(ALONE)
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = chosen = mcf.as_plain(state["exp_avg"], torch.float32)
    mcf.change_format(model, optimizer, mcf.bf16i16)
    assert optimizer.state[model[0].weight]["exp_avg"] is chosen
    assert optimizer.state[model[0].weight]["exp_avg_sq"].format is mcf.bf16i16


def test_one_parameter_alone():
    model, optimizer = trained(None)
    only = {"1.weight": mcf.bf16i16, "*": None}
    done = mcf.change_format(model, optimizer, None, overrides=only)
    assert set(done.formats) == {"1.weight", "1.weight.exp_avg", "1.weight.exp_avg_sq"}
    assert [type(p.data).__name__ for p in model.parameters()].count("MCFTensor") == 1
    train(model, optimizer, first=3)


def test_what_holds_parameters_goes_on():
    """References, graphs, schedulers, averages and compiled models, in formats of one base."""
    model, optimizer = trained(ALONE)
    held = weakref.ref(model[0].weight)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 32).bfloat16()
    compiled(x).sum().backward()
    graph = model(x).sum()
    mcf.change_format(model, optimizer, mcf.bf16i16)
    assert held() is model[0].weight
    graph.backward()
    for _ in range(4):
        train(model, optimizer, 1)
        schedule.step()
        average.update_parameters(model)
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4
    assert torch.equal(compiled(x), model(x))
    assert average.module[0].weight.format is ALONE
    off = numbers(average.module[0].weight) - numbers(model[0].weight)
    assert 0 < off.norm() < 0.1 * numbers(model[0].weight).norm()


EXTRAS = {
    "released": mcf.step_in_backward,
    "accumulated": lambda model, optimizer: mcf.accumulate_gradients(model),
    "order-free": lambda model, optimizer: mcf.order_free_gradients(model, microbatches=1),
    "metered": lambda model, optimizer: mcf.EDQ(optimizer, names=model),
}


@pytest.mark.wing("reproducible")
@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("extra", EXTRAS)
def test_with_what_else_hangs_on_training(extra):
    """Attached before or after the change."""
    runs = []
    for is_first in (True, False):
        model, optimizer = trained(ALONE)
        hung = EXTRAS[extra](model, optimizer) if is_first else None
        mcf.change_format(model, optimizer, mcf.bf16i16)
        hung = hung or EXTRAS[extra](model, optimizer)
        train(model, optimizer, 2, first=3)
        runs.append(list(model.parameters()))
        if extra == "metered":
            assert hung.last["lost"] < 0.01
    assert_same_bits(*runs)


def test_errors_leave_all_as_it_was():
    model, optimizer = trained(mcf.bf16i16, mode="plus")
    with torch.no_grad():
        model[1].weight[3] = 1e6
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    calls = {
        r"as_expansion: 1\.weight: fp16i16 has the range of float16": lambda: mcf.change_format(
            model, optimizer, mcf.fp16i16
        ),
        "unknown mode 'most'": lambda: mcf.change_format(model, optimizer, mcf.bf16i8, "most"),
        "no state 'velocity'": lambda: mcf.change_format(
            model, optimizer, mcf.bf16i8, {"velocity": None}
        ),
        r"mode\['exp_avg'\] is bf16x2, beside parameters in fp32x2": lambda: mcf.change_format(
            model, optimizer, mcf.fp32x2, {"exp_avg": mcf.bf16x2}
        ),
        "matches none": lambda: mcf.change_format(
            model, optimizer, mcf.bf16i8, overrides={"head": None}
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="change_format: got AdamW and Sequential; give a module"):
        mcf.change_format(optimizer, model, mcf.bf16i8)
    with pytest.raises(TypeError, match=r"change_format: torch\.float32 is a plain dtype"):
        mcf.change_format(model, optimizer, torch.float32)

    def within(*_):
        mcf.change_format(model, optimizer, mcf.bf16i8)

    class Reaching(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            within()

    with pytest.raises(RuntimeError, match="a step is under way; call it between two steps"):
        Reaching(model.parameters(), lr=1e-3).step()
    assert_same_bits((model.state_dict(), optimizer.state_dict()), before)


# ------------------------------------------------------------------------------------- schedules


def formats(model):
    return [p.format.name if isinstance(p, mcf.MCFTensor) else None for p in model.parameters()]


def test_at_a_step():
    model = network(ALONE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = mcf.PrecisionSchedule(model, optimizer, "bf16i16", when={"step": 2}, mode="full")
    found = []
    for step in range(4):
        train(model, optimizer, 1, step)
        found.append(schedule.step())
        assert set(formats(model)) == {"bf16br" if step < 1 else "bf16i16"}
    assert [x is None for x in found] == [True, False, True, True]
    assert schedule.changes == [found[1]]
    assert repr(optimizer.state[model[0].weight]["exp_avg"].format) == "mcf.bf16i16"


def test_at_a_learning_rate_that_has_fallen():
    """Not in the warm-up, which begins below."""
    model = network(ALONE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    rates = [1e-5, 1e-3, 1e-3, 1e-4, 1e-5]
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, 4)])
    schedule = mcf.PrecisionSchedule(model, optimizer, mcf.bf16i16, when={"lr": 1e-4})
    found = []
    for step in range(4):
        train(model, optimizer, 1, step)
        decay.step()
        schedule.step()
        found.append(formats(model)[0])
    assert found == ["bf16br", "bf16br", "bf16i16", "bf16i16"]


def test_where_updates_are_lost_alone():
    """Gains near 1 lose updates of 1e-4; weights and biases of another size do not."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name != "1.weight":
                p.mul_(0.001)
        model[1].bias.fill_(1e-3)
    meter = mcf.EDQ(optimizer, names=model)
    schedule = mcf.PrecisionSchedule(
        model, optimizer, mcf.bf16i16, when={"lost": 0.01}, meter=meter
    )
    train(model, optimizer, 1)
    done = schedule.step()
    lost = {name for name, x in meter.per_parameter.items() if x["lost"] > 0.01}
    assert "1.weight" in lost != set(meter.per_parameter)
    assert {name for name in done.formats if name in meter.per_parameter} == lost
    assert schedule.step() is None
    train(model, optimizer, 1, first=1)
    assert meter.per_parameter["1.weight"]["lost"] == 0
    names = [name for name, _ in model.named_parameters()]
    assert {n for n, f in zip(names, formats(model), strict=True) if f} == lost


def test_a_schedule_resumes():
    def start():
        model = network(ALONE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return (
            model,
            optimizer,
            mcf.PrecisionSchedule(model, optimizer, mcf.bf16i8, when={"step": 2}),
        )

    def go_on(model, optimizer, schedule, steps, first):
        for step in range(first, first + steps):
            train(model, optimizer, 1, step)
            schedule.step()

    whole = start()
    go_on(*whole, 5, 0)
    first = start()
    go_on(*first, 3, 0)
    saved = copy.deepcopy([x.state_dict() for x in first])
    resumed = start()
    resumed[2].load_state_dict(saved[2])
    assert set(formats(resumed[0])) == {"bf16i8"}
    resumed[0].load_state_dict(saved[0])
    resumed[1].load_state_dict(saved[1])
    go_on(*resumed, 2, 3)
    assert resumed[2].steps == 5
    assert_same_bits(list(whole[0].parameters()), list(resumed[0].parameters()))
    assert_same_bits(whole[1].state_dict(), resumed[1].state_dict())


def test_what_a_schedule_refuses():
    model, optimizer = trained(ALONE)
    for when in ({}, {"epoch": 3}, 900, {"step": 1, "lr": 1e-3}):
        with pytest.raises(TypeError, match=r"when=.*; give one of \{'step': 900\}"):
            mcf.PrecisionSchedule(model, optimizer, mcf.bf16i16, when=when)
    for when in ({"step": -1}, {"lost": 1.0}):
        with pytest.raises(ValueError, match="not negative"):
            mcf.PrecisionSchedule(model, optimizer, mcf.bf16i16, when=when)
    with pytest.raises(ValueError, match=r"'lost' needs one, meter=mcf\.EDQ"):
        mcf.PrecisionSchedule(model, optimizer, mcf.bf16i16, when={"lost": 0.01})
    with pytest.raises(TypeError, match="PrecisionSchedule: 'bf17' is not a format"):
        mcf.PrecisionSchedule(model, optimizer, "bf17", when={"step": 1})
    with mcf.EDQ(optimizer) as meter:
        schedule = mcf.PrecisionSchedule(
            model, optimizer, mcf.bf16i16, when={"lost": 0.01}, meter=meter
        )
        train(model, optimizer, 1)
        with pytest.raises(ValueError, match=r"'0\.0', which is no parameter.*names=model"):
            schedule.step()
