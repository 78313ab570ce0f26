"""Collage modes: which states are expansions, and what they survive."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_bits, assert_same_terms, expansions_alive, small_model

SECOND = ("exp_avg_sq", "max_exp_avg_sq")


def train(model, optimizer, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def build(path="fused", mode=None, kind=torch.optim.AdamW, **keywords):
    model = mcf.as_expansion(small_model())
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    optimizer = kind(model.parameters(), lr=1e-3, **flags[path], **keywords)
    return model, mcf.collage(optimizer, mode) if mode else optimizer


def kinds(optimizer):
    found = {}
    for p, state in optimizer.state.items():
        for name, x in state.items():
            if isinstance(x, torch.Tensor) and x.shape == p.shape:
                same = isinstance(x, mcf.MCFTensor) and x.format == p.format
                found.setdefault(name, set()).add("expansion" if same else str(x.dtype))
    return {name: kind.pop() for name, kind in found.items() if len(kind) == 1}


EXPECTED = {
    "light": {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16"},
    "plus": {"exp_avg": "torch.bfloat16", "exp_avg_sq": "expansion"},
    "full": {"exp_avg": "expansion", "exp_avg_sq": "expansion"},
    None: {"exp_avg": "expansion", "exp_avg_sq": "expansion"},
}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("path", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("mode", EXPECTED)
def test_modes(path, mode):
    model, optimizer = build(path, mode)
    train(model, optimizer)
    assert kinds(optimizer) == EXPECTED[mode]


def test_called_after_the_first_step_and_again():
    model, optimizer = build()
    train(model, optimizer)
    assert mcf.collage(optimizer, "light") is optimizer
    assert kinds(optimizer) == EXPECTED["light"]
    train(model, optimizer)
    mcf.collage(optimizer, "plus")
    train(model, optimizer)
    assert kinds(optimizer) == EXPECTED["plus"]


def test_before_the_first_step_equals_after_construction():
    model, optimizer = build(mode="plus")
    other, late = build()
    mcf.collage(late, "plus")
    train(model, optimizer)
    train(other, late)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_terms(p, q)


def test_a_dict_by_name():
    model, optimizer = build(mode={"exp_avg": None}, amsgrad=True)
    train(model, optimizer)
    assert kinds(optimizer) == {"exp_avg": "torch.bfloat16"} | dict.fromkeys(SECOND, "expansion")
    mcf.collage(optimizer, {"exp_avg": mcf.bf16x3, "exp_avg_sq": None})
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].format == mcf.bf16x3
    assert type(state["exp_avg_sq"]) is torch.Tensor
    train(model, optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].format == mcf.bf16x3


@pytest.mark.parametrize("path", ["fused", "foreach", "for-loop"])
def test_momentum_buffers_of_sgd(path):
    kept = dict.fromkeys(["plus", "full"], "expansion")
    for mode, kind in {"light": "torch.bfloat16", **kept}.items():
        model, optimizer = build(path, mode, torch.optim.SGD, momentum=0.9)
        train(model, optimizer)
        assert kinds(optimizer) == {"momentum_buffer": kind}


@pytest.mark.parametrize("mode", ["light", "plus", "full"])
def test_survives_a_checkpoint(mode):
    model, optimizer = build(mode=mode)
    train(model, optimizer)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    weights, states = torch.load(buffer, weights_only=True)
    other, resumed = build(mode=mode)
    other.load_state_dict(weights)
    resumed.load_state_dict(states)
    assert kinds(resumed) == EXPECTED[mode]
    train(model, optimizer, seed=1)
    train(other, resumed, seed=1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_terms(p, q)
        for name, x in optimizer.state[p].items():
            assert torch.equal(x, resumed.state[q][name])


def test_holds_where_the_checkpoint_is_of_another_mode():
    model, optimizer = build(mode="full")
    train(model, optimizer)
    _, other = build(mode="light")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert kinds(other) == EXPECTED["light"]


@pytest.mark.parametrize("mode", [None, "light", "plus", "full"])
@pytest.mark.parametrize("source", [torch.float32, mcf.fp32x2])
def test_states_of_another_dtype_take_the_format(source, mode):
    weights = torch.linspace(0.5, 1, 12).view(3, 4)
    wide = nn.Parameter(mcf.as_expansion(weights, source) if source is mcf.fp32x2 else weights)
    trained = torch.optim.AdamW([wide])
    wide.grad = weights / 3
    trained.step()
    p = nn.Parameter(mcf.as_expansion(weights, mcf.bf16x2))
    optimizer = torch.optim.AdamW([p])
    if mode is not None:
        mcf.collage(optimizer, mode)
    optimizer.load_state_dict(trained.state_dict())
    for name, is_whole in {
        "exp_avg": mode in (None, "full"),
        "exp_avg_sq": mode != "light",
    }.items():
        x, expected = optimizer.state[p][name], trained.state[wide][name].to(torch.float64)
        assert isinstance(x, mcf.MCFTensor) == is_whole
        error = (mcf.as_plain(x, torch.float64) / expected - 1).abs().max()
        assert error < (2**-16 if is_whole else 2**-8)
    assert optimizer.state[p]["step"] == 1
    p.grad = torch.ones(3, 4).bfloat16()
    optimizer.step()


def test_holds_for_groups_added_later():
    model, optimizer = build(mode="plus")
    train(model, optimizer)
    late = mcf.as_expansion(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(late.parameters())})
    train(late, optimizer)
    assert kinds(optimizer) == EXPECTED["plus"]


def test_holds_for_parameters_that_take_part_later():
    model, optimizer = build(mode="plus")
    train(model[1:], optimizer)
    assert len(optimizer.state) == 4
    train(model, optimizer)
    assert len(optimizer.state) == 6
    assert kinds(optimizer) == EXPECTED["plus"]


def test_holds_for_momentum_that_is_given_up_and_made_anew():
    model, optimizer = build("for-loop", "full", torch.optim.SGD, momentum=0.9)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["momentum_buffer"] = None
    train(model, optimizer)
    assert kinds(optimizer) == {"momentum_buffer": "expansion"}


@pytest.mark.parametrize("path", ["fused", "for-loop"])
@pytest.mark.parametrize("make", [lambda x: None, lambda x: torch.zeros(x.shape).to(x.dtype)])
def test_holds_for_states_that_are_replaced(make, path):
    model, optimizer = build(path, "full", torch.optim.SGD, momentum=0.9, dampening=0.1)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["momentum_buffer"] = make(state["momentum_buffer"])
    train(model, optimizer, steps=1)
    assert kinds(optimizer) == {"momentum_buffer": "expansion"}


def test_plain_parameters_are_left_alone():
    model = mcf.as_expansion(small_model(), overrides={"0.weight": None})
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters()), "light")
    train(model, optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_the_first_step_needs_no_more_memory_than_the_others(monkeypatch):
    """States of one parameter are converted before those of the next one are made."""
    model, optimizer = build(mode="light")
    alive = expansions_alive(optimizer, monkeypatch)
    train(model, optimizer, steps=1)
    assert len(alive) == 2 * len(list(model.parameters()))
    assert max(alive) <= 1


class TestBadInput:
    def check(self, error, match, call):
        model, optimizer = build()
        train(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(error, match=match):
            call(optimizer)
        assert kinds(optimizer) == EXPECTED["full"]
        for index, state in optimizer.state_dict()["state"].items():
            for name, x in state.items():
                assert torch.equal(x, before["state"][index][name])

    def test_unknown_modes(self):
        self.check(ValueError, r"unknown mode 'heavy'.*'light'", lambda o: mcf.collage(o, "heavy"))
        self.check(TypeError, "mode 3", lambda o: mcf.collage(o, 3))

    def test_a_state_the_optimizer_does_not_have(self):
        match = r"no state 'momentum_buffer'.*'exp_avg', 'exp_avg_sq'"
        self.check(ValueError, match, lambda o: mcf.collage(o, {"momentum_buffer": None}))
        _, fresh = build()
        with pytest.raises(ValueError, match=match):
            mcf.collage(fresh, {"momentum_buffer": None})
        _, sgd = build(kind=torch.optim.SGD, momentum=0.9)
        mcf.collage(sgd, {"momentum_buffer": None})

    def test_a_value_that_is_no_format(self):
        self.check(TypeError, r"exp_avg.*fp32", lambda o: mcf.collage(o, {"exp_avg": "fp32"}))
        self.check(ValueError, r"fp32x2.*bf16", lambda o: mcf.collage(o, {"exp_avg": mcf.fp32x2}))

    def test_no_expansions_or_no_optimizer(self):
        with pytest.raises(ValueError, match=r"mcf\.as_expansion\(model\) first"):
            mcf.collage(torch.optim.SGD(nn.Linear(2, 2).parameters()), "full")
        with pytest.raises(TypeError, match="Linear"):
            mcf.collage(nn.Linear(2, 2), "full")

    def test_the_trial_step_leaves_no_trace(self):
        model, optimizer = build()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
        before = [p.clone() for p in model.parameters()]
        mcf.collage(optimizer, {"exp_avg": None})
        assert not optimizer.state
        assert scheduler.get_last_lr() == [1e-3]
        for p, q in zip(model.parameters(), before, strict=True):
            assert_same_terms(p, q)

    def test_every_group_counts(self):
        model = mcf.as_expansion(small_model())
        groups = [{"params": [p], "amsgrad": p.dim() > 1} for p in model.parameters()]
        groups.sort(key=lambda group: group["amsgrad"])
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        mcf.collage(optimizer, {"max_exp_avg_sq": None})
        train(model, optimizer)
        assert kinds(optimizer)["max_exp_avg_sq"] == "torch.bfloat16"
        with pytest.raises(ValueError, match="no state 'step'"):
            mcf.collage(optimizer, {"step": mcf.bf16x2})

    def test_a_step_that_reaches_for_others_is_not_tried(self):
        class Around(torch.optim.Optimizer):
            def __init__(self, base):
                self.base = base
                super().__init__(base.param_groups, {})

            def step(self):
                self.base.step()

        model, base = build()
        before = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones(p.shape, dtype=p.dtype)
        mcf.collage(Around(base), {"exp_avg": None})
        for p, q in zip(model.parameters(), before, strict=True):
            assert_same_terms(p, q)

    def test_optimizers_without_a_trial_are_checked_at_the_first_step(self):
        class Odd(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {})

            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    if not isinstance(p, mcf.MCFTensor):
                        raise RuntimeError
                    self.state[p].setdefault("trace", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(self.state[p]["trace"], alpha=0.1)

        model = mcf.as_expansion(nn.Linear(2, 2))
        optimizer = mcf.collage(Odd(model.parameters()), {"track": None})
        with pytest.raises(ValueError, match=r"no state 'track'.*'trace'"):
            train(model, optimizer, steps=1)
        mcf.collage(optimizer, {"trace": None})
        train(model, optimizer)
        assert kinds(optimizer) == {"trace": "torch.bfloat16"}


class TestFusedPath:
    """What is taken where the path was left open."""

    @staticmethod
    def optimizer(kind, model=None, **options):
        model = model or mcf.as_expansion(nn.Linear(4, 3))
        return mcf.collage(kind(model.parameters(), lr=0.1, **options), "full")

    @pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
    def test_it_is_taken_and_said(self, name):
        optimizer = self.optimizer(getattr(torch.optim, name))
        assert "fused: True" in repr(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(mcf.as_expansion(torch.ones(3)))]})
        assert [group["fused"] for group in optimizer.param_groups] == [True, True]
        saved = getattr(torch.optim, name)(nn.Linear(4, 3).parameters()).state_dict()
        again = self.optimizer(getattr(torch.optim, name))
        again.load_state_dict(saved)
        assert again.param_groups[0]["fused"]

    @pytest.mark.parametrize(
        "options",
        [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}],
    )
    def test_a_choice_is_kept(self, options):
        optimizer = self.optimizer(torch.optim.AdamW, **options)
        assert not optimizer.param_groups[0]["fused"]

    def test_classes_without_one(self):
        class Own(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        assert not self.optimizer(Own).param_groups[0]["fused"]
        assert "fused" not in self.optimizer(torch.optim.RMSprop).param_groups[0]

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @pytest.mark.parametrize("name", ["SGD", "Adagrad"])
    def test_sparse_gradients_leave_it(self, name):
        model = mcf.as_expansion(nn.Embedding(5, 4, sparse=True))
        optimizer = self.optimizer(getattr(torch.optim, name), model)
        before = mcf.as_plain(model.weight.detach(), torch.float64)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).float().sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["fused"] is False
        moved = mcf.as_plain(model.weight.detach(), torch.float64) - before
        assert moved[1:3].all()
        assert not moved[[0, 3, 4]].any()


class TestCopies:
    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize(
        "mode", ["light", "plus", "full", "compact", "compact4", {"exp_avg": None}]
    )
    @pytest.mark.parametrize("stepped", [False, True])
    def test_a_deep_copy_is_in_the_same_mode(self, mode, stepped):
        model, optimizer = build(mode=mode)
        if stepped:
            train(model, optimizer)
        second, copied = copy.deepcopy((model, optimizer))
        assert copied.param_groups[0]["params"][0] is next(second.parameters())
        train(model, optimizer)
        train(second, copied)
        assert kinds(copied) == kinds(optimizer)
        again = copy.deepcopy(copied)
        assert kinds(again) == kinds(optimizer)
        for p, q in zip(model.parameters(), second.parameters(), strict=True):
            assert_same_terms(p.detach(), q.detach())

    def test_the_copy_is_its_own(self):
        model, optimizer = build(mode="plus")
        second, copied = copy.deepcopy((model, optimizer))
        mcf.collage(copied, "full")
        train(model, optimizer)
        train(second, copied)
        assert kinds(copied) != kinds(optimizer)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "mode", ["light", "plus", "full", "compact", "compact4", {"exp_avg": mcf.bf16x3}]
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_pickled_optimizer_keeps_its_mode(mode, steps):
    def train(model, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()

    model = mcf.as_expansion(nn.Linear(64, 3))
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-2), mode)
    for i in range(steps):
        train(model, optimizer, i)
    for dump, load in (
        (pickle.dumps, pickle.loads),
        (functools.partial(pickle.dumps, protocol=2), pickle.loads),
        (through_torch, lambda content: torch.load(content, weights_only=False)),
    ):
        second, copied = load(dump(copy.deepcopy((model, optimizer))))
        first, own = copy.deepcopy((model, optimizer))
        for each in ((first, own), (second, copied)):
            train(*each, 7)
        assert_same_bits(copied.state_dict(), own.state_dict())
        assert_same_bits(second.state_dict(), first.state_dict())
        again = pickle.loads(pickle.dumps(copied))
        assert again.__dict__["_collage"].mode == copied.__dict__["_collage"].mode


def through_torch(x):
    content = io.BytesIO()
    torch.save(x, content)
    content.seek(0)
    return content
