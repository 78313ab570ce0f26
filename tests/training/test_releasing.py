"""Steps in backward, held against steps after it."""

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import mcftensor as mcf
from support.helpers import assert_same_bits, expansions_alive, small_model
from support.metering import Stepper
from support.optimizers import CASES

FORMATS = {
    "float32": None,
    "bf16": torch.bfloat16,
    **{f.name: f for f in (mcf.bf16x2, mcf.bf16i16, mcf.bf16i8)},
}
PATHS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
OPTIMIZERS = {
    "AdamW": lambda ps, **flags: torch.optim.AdamW(ps, lr=1e-2, **flags),
    "SGD": lambda ps, **flags: torch.optim.SGD(ps, lr=0.1, momentum=0.9, **flags),
}


def network(kind=mcf.bf16x2) -> nn.Module:
    model = small_model()
    if isinstance(kind, mcf.Format):
        return mcf.as_expansion(model, kind)
    return model.to(kind) if kind else model


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def loss_of(model, step=0):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def left(model, optimizer):
    """What training leaves."""
    states = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return list(model.parameters()), states, groups


def train(model, optimizer, steps=3, backward=lambda model, step: loss_of(model, step).backward()):
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return left(model, optimizer)


def both(build, options=None, **kwargs):
    """What training leaves with steps after backward, and in it."""
    found = []
    for given in (None, options or {}):
        model, optimizer = build()
        if given is not None:
            mcf.step_in_backward(model, optimizer, **given)
        torch.manual_seed(1)
        found.append(train(model, optimizer, **kwargs))
    return found


def assert_alike(build, options=None, **kwargs):
    assert_same_bits(*both(build, options, **kwargs))


# ------------------------------------------------------------------------------------ the same bits


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize("bucket", [0, 100, 1 << 22])
@pytest.mark.parametrize("flags", PATHS, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_a_step_after_backward(name, kind, flags, bucket):
    if (name, kind, flags) == ("SGD", "bf16", {"fused": True}):
        pytest.skip("torch's own fused SGD leaves its bf16 buffers without values")

    def build():
        model = network(FORMATS[kind])
        return model, OPTIMIZERS[name](model.parameters(), **flags)

    assert_alike(build, {"bucket_bytes": bucket})


@pytest.mark.parametrize("mode", ["light", "plus", "full", {"exp_avg": mcf.bf16x3}], ids=str)
def test_modes(mode):
    def build():
        model = network()
        return model, mcf.collage(adamw(model), mode)

    assert_alike(build, {"bucket_bytes": 0})


def test_modes_with_momentum():
    def build():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, mcf.collage(optimizer, "full")

    assert_alike(build, {"bucket_bytes": 0})


def test_the_first_step_needs_no_more_memory_than_the_others(monkeypatch):
    """States of one parameter take the format of the mode before those of the next are made."""
    model = network()
    optimizer = mcf.collage(adamw(model), "light")
    mcf.step_in_backward(model, optimizer, bucket_bytes=0)
    alive = expansions_alive(optimizer, monkeypatch)
    train(model, optimizer, steps=1)
    assert len(alive) == 2 * len(list(model.parameters()))
    assert max(alive) <= 1


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize(("cls", "flags"), CASES)
def test_every_optimizer_of_torch(cls, flags):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), nn.Linear(8, 2, bias=False))
        model = mcf.as_expansion(model)
        return model, cls(model.parameters(), **flags)

    assert_alike(build, {"bucket_bytes": 0})


def test_sparse_gradients():
    def build():
        torch.manual_seed(0)
        model = mcf.as_expansion(nn.Embedding(5, 3, sparse=True))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(model, step):
        model(torch.tensor([step, 1])).float().square().sum().backward()

    assert_alike(build, backward=backward)


class OfViews(Stepper):
    """Makes its states of views of parameters."""

    def update(self, p, group):
        state = self.state[p]
        if not state:
            state["sum"] = torch.zeros_like(p.detach().view(-1))
        state["sum"].add_(p.grad.view(-1), alpha=0.1)
        p.view(-1).sub_(state["sum"], alpha=group["lr"])


def test_states_that_are_made_of_views_of_parameters():
    """In backward formulas they would be plain."""

    def build():
        model = network()
        return model, OfViews(model.parameters(), lr=0.1)

    assert_alike(build, {"bucket_bytes": 0})


def test_groups_have_options_of_their_own():
    def build():
        model = network()
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.1}, {"params": others}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    assert_alike(build, {"bucket_bytes": 100})


def third_party(name):
    if name == "AdamWScheduleFree":
        return pytest.importorskip("schedulefree").AdamWScheduleFree
    return getattr(pytest.importorskip("pytorch_optimizer"), name)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "Lion", "Adan", "StableAdamW", "CAME"])
def test_optimizers_of_other_packages(name):
    """Some of them count steps in their groups."""

    def build():
        model = network()
        optimizer = third_party(name)(model.parameters(), lr=1e-2)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return model, optimizer

    assert_alike(build, {"bucket_bytes": 0})


# -------------------------------------------------------------------------------- the loop as it is


def test_gradients_are_gone_and_step_has_nothing_to_do():
    model = network()
    optimizer = adamw(model)
    handle = mcf.step_in_backward(model, optimizer)
    loss_of(model).backward()
    assert set(handle.stepped) == {name for name, _ in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    stepped = copy.deepcopy(left(model, optimizer)[:2])
    optimizer.step()
    assert_same_bits(left(model, optimizer)[:2], stepped)
    assert handle.stepped == []


def test_schedulers():
    found = []
    for release in (False, True):
        model = network()
        optimizer = adamw(model)
        if release:
            mcf.step_in_backward(model, optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                loss_of(model, step).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        found.append(left(model, optimizer))
    assert_same_bits(*found)


class Subclass(torch.optim.SGD):
    """Calls the step of its base, and so the hooks again."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(("cls", "times"), [(torch.optim.SGD, 1), (Subclass, 2)])
def test_hooks_on_steps_run_as_often_as_ever(cls, times):
    model = network()
    optimizer = cls(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    mcf.step_in_backward(model, optimizer, bucket_bytes=0)
    train(model, optimizer, steps=2)
    assert calls == (["before"] * times + ["after"] * times) * 2


def test_state_dicts():
    """Between backward and step too; and a run goes on from one."""
    states = []
    for release in (False, True):
        model = network()
        optimizer = adamw(model)
        if release:
            mcf.step_in_backward(model, optimizer, bucket_bytes=0)
        train(model, optimizer, steps=2)
        loaded = network()
        loaded.load_state_dict(model.state_dict())
        resumed = adamw(loaded)
        if release:
            mcf.step_in_backward(loaded, resumed)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        states.append(train(loaded, resumed, steps=2))
    assert_same_bits(*states)
    loss_of(model).backward()
    groups = optimizer.state_dict()["param_groups"]
    assert [len(group["params"]) for group in groups] == [6]


def test_a_closure():
    found = []
    for release in (False, True):
        model = network()
        optimizer = adamw(model)
        if release:
            mcf.step_in_backward(model, optimizer, bucket_bytes=0)

        def closure(step, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses = [optimizer.step(lambda step=step: closure(step)).detach() for step in range(3)]
        found.append((losses, left(model, optimizer)))
    assert_same_bits(*found)


class Counting(Stepper):
    """Notes how many parameters each step goes through."""

    def __init__(self, params):
        super().__init__(params)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(sum(len(group["params"]) for group in self.param_groups))
        super().step()


def test_the_work_of_many_steps_is_that_of_one():
    """No step but the one at the end goes through parameters that it does not step."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    optimizer = Counting(model.parameters())
    mcf.step_in_backward(model, optimizer, bucket_bytes=0)
    optimizer.seen.clear()
    model(torch.ones(2)).sum().backward()
    assert optimizer.seen == [1] * 40
    optimizer.step()
    assert optimizer.seen == [*[1] * 40, 40]


def test_small_tensors_step_together():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    optimizer = Counting(model.parameters())
    mcf.step_in_backward(model, optimizer, bucket_bytes=10 * 4 * (4 + 2))
    optimizer.seen.clear()
    model(torch.ones(2)).sum().backward()
    assert sum(optimizer.seen) == 40
    assert len(optimizer.seen) in (2, 3)


# ------------------------------------------------------------------------------------- parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4)
        self.twice = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.head(self.frozen(self.twice(self.twice(self.table(x)).relu())))


def tied():
    model = mcf.as_expansion(Tied())
    return model, adamw(model)


def backward_of_tied(model, step):
    model(torch.tensor([step % 6, 2, 3])).float().square().mean().backward()


def test_tied_frozen_and_unused_parameters_and_such_used_twice():
    assert_alike(tied, {"bucket_bytes": 0}, backward=backward_of_tied)
    model, optimizer = tied()
    handle = mcf.step_in_backward(model, optimizer)
    backward_of_tied(model, 0)
    assert sorted(handle.stepped) == ["table.weight", "twice.bias", "twice.weight"]


@pytest.mark.filterwarnings("ignore::mcftensor.errors.PlainParameterWarning")
def test_parameters_that_are_frozen_or_thawed_later():
    def backward(model, step):
        model.twice.requires_grad_(step != 1)
        model.frozen.requires_grad_(step == 1)
        backward_of_tied(model, step)

    assert_alike(tied, {"bucket_bytes": 0}, backward=backward)


def test_parameters_of_one_of_the_two_only():
    """Those outside of the model step when they always did, and others keep their gradients."""
    model, outside = network(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([model[0].weight, outside], lr=0.1)
    mcf.step_in_backward(model, optimizer)
    (loss_of(model) + outside.sum()).backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    assert outside.tolist() == [1, 1]
    optimizer.step()
    assert outside.tolist() == [pytest.approx(0.9)] * 2


def test_a_group_that_is_added_later_steps_at_the_end():
    model, later = network(), nn.Parameter(torch.ones(2))
    optimizer = adamw(model)
    mcf.step_in_backward(model, optimizer)
    train(model, optimizer, steps=1)
    optimizer.add_param_group({"params": [later], "lr": 0.5})
    (loss_of(model) + later.sum()).backward()
    assert model[0].weight.grad is None
    optimizer.step()
    assert later.tolist() == [pytest.approx(0.5, abs=0.01)] * 2


def test_models_that_are_moved_or_converted_afterwards():
    def build(moved):
        model = small_model()
        optimizer = adamw(model)
        if moved:
            handle = mcf.step_in_backward(model, optimizer, bucket_bytes=0)
        mcf.as_expansion(model)
        model.to("cpu").to(torch.device("cpu"))
        if moved:
            loss_of(model).backward()
            assert len(handle.stepped) == 6
            optimizer.step()
            return train(model, optimizer, steps=1)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        return train(model, optimizer, steps=1)

    assert_same_bits(build(False), build(True))


def test_copies_are_without_it(tmp_path):
    model = network()
    mcf.step_in_backward(model, adamw(model))
    torch.save(model, tmp_path / "model.pt")
    for twin in (
        copy.deepcopy(model),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        loss_of(twin).backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert list(twin._ddp_params_and_buffers_to_ignore) == []  # DDP may have it
    optimizer = pickle.loads(pickle.dumps(torch.optim.SGD(nn.Linear(1, 1).parameters())))
    assert optimizer.param_groups


def test_nothing_is_kept_alive():
    model = network()
    optimizer = adamw(model)
    mcf.step_in_backward(model, optimizer)
    train(model, optimizer, steps=1)
    references = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


# --------------------------------------------------------------------- microbatches and clipping


@pytest.mark.parametrize("summed", ["plain", "before", "after"])
def test_microbatches(summed):
    def build():
        model = network()
        return model, adamw(model)

    def run(release):
        model, optimizer = build()
        if summed == "before":
            mcf.accumulate_gradients(model)
        handle = mcf.step_in_backward(model, optimizer, bucket_bytes=0) if release else None
        if summed == "after":
            mcf.accumulate_gradients(model)
        for step in range(3):
            for part in range(4):
                hold = handle.no_step() if handle and part < 3 else contextlib.nullcontext()
                with hold:
                    loss_of(model, 4 * step + part).backward()
                if handle:
                    assert (len(handle.stepped) > 0) == (part == 3)
            optimizer.step()
            optimizer.zero_grad()
        return left(model, optimizer)

    assert_same_bits(run(False), run(True))


def test_a_parameter_that_the_last_microbatch_does_not_reach_steps_at_the_end():
    def backward(model, step):
        handle = handles.get(model)
        with handle.no_step() if handle else contextlib.nullcontext():
            loss_of(model, step).backward()
        model[3](torch.ones(8).to(model[3].weight.dtype)).float().sum().backward()

    found, handles = [], {}
    for release in (False, True):
        model = network()
        optimizer = adamw(model)
        if release:
            handles[model] = mcf.step_in_backward(model, optimizer, bucket_bytes=0)
        found.append(train(model, optimizer, backward=backward))
    assert_same_bits(*found)


def test_a_step_within_no_step_is_one_after_backward():
    def build():
        model = network()
        return model, adamw(model)

    model, optimizer = build()
    handle = mcf.step_in_backward(model, optimizer)
    with handle.no_step():
        meter = mcf.EDQ(optimizer)
        found = train(model, optimizer)
    assert_same_bits(found, train(*build()))
    assert meter.last["ratio"] > 0.9


def test_clipping_by_value():
    def run(release):
        model = network()
        optimizer = adamw(model)
        if release:
            mcf.step_in_backward(model, optimizer, clip_value=0.01, bucket_bytes=0)

        def backward(model, step):
            loss_of(model, step).backward()
            if not release:
                clip_grad_value_(model.parameters(), 0.01)

        return train(model, optimizer, backward=backward)

    assert_same_bits(run(False), run(True))


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_by_the_norm_in_two_passes(kind, max_norm):
    norms = []

    def run(release):
        model = network(FORMATS[kind])
        optimizer = adamw(model)
        handle = mcf.step_in_backward(model, optimizer, bucket_bytes=0) if release else None

        def backward(model, step):
            loss = loss_of(model, step)
            if handle:
                with handle.measure_norm(max_norm):
                    loss.backward(retain_graph=True)
                assert handle.stepped == []
                assert all(p.grad is None for p in model.parameters())
            loss.backward()
            norms.append(handle.norm if handle else clip_grad_norm_(model.parameters(), max_norm))

        return train(model, optimizer, backward=backward)

    assert_same_bits(run(False), run(True))
    assert_same_bits(norms[:3], norms[3:])
    assert float(norms[0]) > 0.1


def test_clipping_by_the_norm_of_the_step_before():
    def run(release):
        model = network()
        optimizer = adamw(model)
        previous = []
        if release:
            options = {"clip_by_previous_norm": 0.1, "bucket_bytes": 0}
            handle = mcf.step_in_backward(model, optimizer, **options)

        def backward(model, step):
            loss_of(model, step).backward()
            if release:
                return
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if previous:
                nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, previous[-1])
            previous.append(norm)

        found = train(model, optimizer, backward=backward)
        return found, handle.norm if release else previous[-1]

    assert_same_bits(run(False), run(True))


def test_the_measured_norm_holds_for_one_iteration():
    model = network(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = mcf.step_in_backward(model, optimizer)
    with handle.measure_norm(1e-30):
        loss_of(model).backward()
    before = model[0].weight.detach().clone()
    loss_of(model).backward()
    assert torch.equal(model[0].weight, before)
    optimizer.step()
    loss_of(model).backward()
    assert not torch.equal(model[0].weight, before)


def test_measuring_would_drop_what_is_there():
    model = network()
    handle = mcf.step_in_backward(model, adamw(model))
    with handle.no_step():
        loss_of(model).backward()
    with pytest.raises(ValueError, match=r"0\.weight, .* have gradients.*no_step"):
        handle.measure_norm(1.0).__enter__()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="no gradient was measured"), handle.measure_norm(1.0):
        pass


# ------------------------------------------------------------------------- compilers, checkpoints


def test_a_compiled_model():
    torch._dynamo.reset()

    def build():
        model = network()
        return model, adamw(model)

    compiled = {}

    def backward(model, step):
        if model not in compiled:
            compiled[model] = torch.compile(model, backend="aot_eager", fullgraph=True)
        loss_of_compiled = compiled[model](torch.full((3, 4), step / 2).bfloat16())
        loss_of_compiled.float().square().mean().backward()

    assert_alike(build, {"bucket_bytes": 0}, backward=backward)


@pytest.mark.slow
@pytest.mark.thinned(of=3)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch asks for it
@pytest.mark.parametrize("kind", [torch.bfloat16, mcf.bf16x2], ids=str)
@pytest.mark.parametrize("bucket", [0, 1 << 22])
def test_compiled_autograd(kind, bucket):
    """A bucket that is not full waits for optimizer.step()."""
    torch._dynamo.reset()

    def build():
        model = network(kind)
        return model, adamw(model)

    def backward(model, step):
        loss = loss_of(model, step)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()

    assert_alike(build, {"bucket_bytes": bucket}, backward=backward)


def test_checkpointed_activations():
    def build():
        model = network()
        return model, adamw(model)

    def backward(model, step):
        x = torch.full((3, 4), step / 2).bfloat16()
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        checkpoint(model[2:], hidden, use_reentrant=False).float().square().mean().backward()

    assert_alike(build, {"bucket_bytes": 0}, backward=backward)


class Reentrant(nn.Module):
    """Two checkpoints, over one layer or two."""

    def __init__(self, shared):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = self.first if shared else nn.Linear(4, 4)

    def forward(self, x):
        x = x.requires_grad_()
        return checkpoint(
            self.second, checkpoint(self.first, x, use_reentrant=True), use_reentrant=True
        )


def test_reentrant_checkpoints():
    def build(shared=False):
        model = mcf.as_expansion(Reentrant(shared))
        return model, adamw(model)

    def backward(model, step):
        model(torch.full((3, 4), step / 2).bfloat16()).float().square().mean().backward()

    for bucket in (0, 1 << 22):
        assert_alike(build, {"bucket_bytes": bucket}, backward=backward)
    model, optimizer = build(shared=True)
    mcf.step_in_backward(model, optimizer)
    with pytest.raises(
        mcf.errors.StepInBackwardError, match=r"first\.(weight|bias).*use_reentrant=False"
    ):
        backward(model, 1)


def test_a_graph_of_gradients_is_left():
    model = network(None)
    optimizer = adamw(model)
    mcf.step_in_backward(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model).backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters())
    (second,) = torch.autograd.grad(penalty, [model[0].weight])
    assert second.count_nonzero() > 0
    model.zero_grad()


@pytest.mark.parametrize("kind", [None, mcf.bf16x2, mcf.bf16i16])
def test_a_parameter_that_a_later_gradient_needs_is_not_changed_in_silence(kind):
    """`detach` uses a parameter without waiting for it."""
    model = nn.ParameterList([torch.ones(3), torch.ones(3)])
    if kind:
        model = mcf.as_expansion(model, kind)
    first, last = model
    optimizer = torch.optim.SGD([first, last], lr=1.0)
    mcf.step_in_backward(model, optimizer, bucket_bytes=0)
    x = torch.ones(3, dtype=first.dtype)
    loss = ((x * first).exp() * last.detach() * last).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -------------------------------------------------------------------------------------- failures


class Failing(torch.optim.SGD):
    """Raises at a parameter of this shape."""

    shape: tuple[int, ...] | None = None

    def step(self, closure=None):
        for group in self.param_groups:
            if any(p.shape == self.shape and p.grad is not None for p in group["params"]):
                raise ArithmeticError("no such step")
        return super().step(closure)


def half_stepped(bucket=0):
    model = network()
    optimizer = Failing(model.parameters(), lr=0.1)
    handle = mcf.step_in_backward(model, optimizer, bucket_bytes=bucket)
    optimizer.shape = model[0].weight.shape
    with pytest.raises(
        mcf.errors.StepInBackwardError, match="ArithmeticError: no such step"
    ) as raised:
        loss_of(model).backward()
    optimizer.shape = None
    return model, optimizer, handle, raised.value


def test_a_step_that_fails_half_way_says_who_has_stepped():
    model, optimizer, handle, error = half_stepped()
    assert isinstance(error.__cause__, ArithmeticError)
    assert error.failed == handle.failed == ["0.weight"]
    assert error.stepped == handle.stepped
    assert {"3.weight", "3.bias", "1.weight", "1.bias"} <= set(handle.stepped)
    assert "0.weight" not in handle.stepped
    assert f"{len(handle.stepped)} of 6 parameters have stepped" in str(error)
    assert len(optimizer.param_groups[0]["params"]) == 6
    assert model[0].weight.grad is None


def test_no_parameter_steps_twice():
    model, optimizer, handle, _ = half_stepped()
    stepped = copy.deepcopy(list(model.parameters()))
    for _ in range(2):
        with pytest.raises(
            mcf.errors.StepInBackwardError, match=r"another gradient after its step"
        ):
            loss_of(model).backward()
        optimizer.zero_grad()
        assert_same_bits(list(model.parameters()), stepped)
    optimizer.step()
    assert_same_bits(list(model.parameters()), stepped)
    assert handle.stepped == handle.failed == []
    train(model, optimizer)
    assert not torch.equal(model[0].weight, stepped[0])


def test_a_checkpoint_ends_what_has_failed():
    model, optimizer, handle, _ = half_stepped()
    before = copy.deepcopy((network(), Failing(network().parameters(), lr=0.1).state_dict()))
    model.load_state_dict(before[0].state_dict())
    optimizer.load_state_dict(before[1])
    twin = network()
    assert_same_bits(
        train(model, optimizer)[:2], train(twin, Failing(twin.parameters(), lr=0.1))[:2]
    )
    assert handle.failed == []


def test_a_bucket_that_fails_at_the_end_of_backward():
    model, optimizer, handle, error = half_stepped(bucket=1 << 22)
    assert handle.stepped == []
    assert len(error.failed) == 6
    with pytest.raises(mcf.errors.StepInBackwardError, match="another gradient"):
        loss_of(model).backward()
    optimizer.step()
    train(model, optimizer, steps=1)


def test_a_backward_that_fails_half_way():
    """What has a gradient by then steps in optimizer.step(), or is dropped by zero_grad."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError("no room")

    for bucket in (0, 1 << 22):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = mcf.step_in_backward(model, optimizer, bucket_bytes=bucket)
        with pytest.raises(MemoryError):
            model[3](Broken.apply(model[0](torch.ones(4).bfloat16()))).sum().backward()
        assert set(handle.stepped) == (set() if bucket else {"3.weight", "3.bias"})
        optimizer.zero_grad()
        optimizer.step()
        stepped = copy.deepcopy(list(model.parameters()))
        loss_of(model).backward()
        assert set(handle.stepped) == {name for name, _ in model.named_parameters()}
        assert not torch.equal(model[3].weight, stepped[4])
        optimizer.step()


@pytest.mark.parametrize("dropped", [True, False])
def test_what_waits_from_a_backward_that_failed_steps_once(dropped):
    def run(release):
        model = network(None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = mcf.step_in_backward(model, optimizer) if release else None
        model[0].weight.register_hook(interrupt_once())
        with pytest.raises(KeyboardInterrupt):
            loss_of(model).backward()
        if dropped:
            optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        if not dropped:
            return left(model, optimizer)
        optimizer.zero_grad()
        model[0].weight.register_hook(interrupt_once())
        with pytest.raises(KeyboardInterrupt):
            loss_of(model).backward()
        optimizer.zero_grad()
        model[0](torch.ones(4)).sum().backward()
        assert handle is None or set(handle.stepped) == {"0.weight", "0.bias"}
        optimizer.step()
        return left(model, optimizer)

    assert_same_bits(run(False), run(True))


def interrupt_once():
    times = iter([KeyboardInterrupt])

    def hook(grad):
        for error in times:
            raise error

    return hook


def test_an_interrupt_is_passed_on():
    model = network()
    optimizer = adamw(model)
    handle = mcf.step_in_backward(model, optimizer, bucket_bytes=0)
    model[1].weight.register_post_accumulate_grad_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model).backward()
    assert "3.weight" in handle.stepped
    optimizer.zero_grad()
    optimizer.step()


def interrupt(p):
    raise KeyboardInterrupt


def test_a_second_backward_is_no_second_step():
    model = network()
    optimizer = adamw(model)
    mcf.step_in_backward(model, optimizer)
    loss_of(model).backward()
    stepped = copy.deepcopy(left(model, optimizer)[:2])
    with pytest.raises(mcf.errors.StepInBackwardError, match=r"no_step\(\)"):
        loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_same_bits(left(model, optimizer)[:2], stepped)


# --------------------------------------------------------------------------------------- the handle


def test_removing():
    model = network()
    optimizer = adamw(model)
    with mcf.step_in_backward(model, optimizer) as handle:
        train(model, optimizer, steps=1)
    assert "removed" in repr(handle)
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert "_step_supports_amp_scaling" not in vars(optimizer)
    assert not any("_ddp_params_and_buffers_to_ignore" in vars(m) for m in model.modules())
    handle.remove()
    model.zero_grad()
    assert "0 of 6 parameters have stepped" in repr(mcf.step_in_backward(model, optimizer))


def test_one_handle():
    model = network()
    optimizer = adamw(model)
    handle = mcf.step_in_backward(model, optimizer)
    for other in (optimizer, torch.optim.SGD(model[0].parameters())):
        with pytest.raises(ValueError, match=r"has a handle; remove\(\)"):
            mcf.step_in_backward(model, other)
    handle.remove()
    handle = mcf.step_in_backward(model[0], optimizer)
    with pytest.raises(ValueError, match=r"has a handle; remove\(\)"):
        mcf.step_in_backward(model[3], optimizer)
    handle.remove()
    mcf.step_in_backward(model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_is_refused(fused):
    model = network(None)
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    handle = mcf.step_in_backward(model, optimizer)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(TypeError, match="GradScaler"):
        scaler.step(optimizer)
    handle.remove()
    optimizer = adamw(model, fused=fused)
    mcf.step_in_backward(model, optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(loss_of(model)).backward()
    disabled.step(optimizer)


class Holder(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(params, lr=0.1)


class ByTheGlobalNorm(Stepper):
    """Clips by the norm of all gradients."""

    def step(self, closure=None):
        grads = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        if grads:
            nn.utils.clip_grads_with_norm_(
                self.param_groups[0]["params"], 0.1, nn.utils.get_total_norm(grads)
            )
        super().step()


P = [nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((P, torch.optim.SGD(P)), {}, TypeError, "got list; give a module"),
        ((nn.Linear(1, 1), nn.Linear(1, 1)), {}, TypeError, r"got Linear; give a torch\.optim"),
        ((nn.Linear(1, 1), torch.optim.SGD(P)), {}, ValueError, "no parameter of Linear"),
        (
            (nn.ParameterList(P), torch.optim.LBFGS(P)),
            {},
            ValueError,
            "LBFGS cannot step one.*a line through all",
        ),
        ((nn.ParameterList(P), Holder(P)), {}, ValueError, r"other optimizers.*optimizer\.inner"),
        (
            (nn.ParameterList(P), ByTheGlobalNorm(P)),
            {},
            ValueError,
            "ByTheGlobalNorm cannot step one.*gradients of others",
        ),
        (
            (nn.ParameterList(P), torch.optim.SGD(P, differentiable=True)),
            {},
            ValueError,
            "differentiable=True",
        ),
        ((nn.ParameterList(P), torch.optim.SGD(P)), {"clip_value": 0}, ValueError, "clip_value=0"),
        (
            (nn.ParameterList(P), torch.optim.SGD(P)),
            {"clip_by_previous_norm": -1.0},
            ValueError,
            r"clip_by_previous_norm=-1\.0",
        ),
        ((nn.ParameterList(P), torch.optim.SGD(P)), {"bucket_bytes": -1}, ValueError, "bytes=-1"),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=message):
        mcf.step_in_backward(*arguments, **options)
    loss = arguments[0](torch.ones(1)).sum() if isinstance(arguments[0], nn.Linear) else P[0].sum()
    loss.backward()  # nothing was set
    assert P[0].eq(1).all()
    P[0].grad = None


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "Kron"])
def test_optimizers_that_couple_parameters_are_refused(name):
    model = network()
    optimizer = third_party(name)(model.parameters())
    with pytest.raises(ValueError, match=f"{name} cannot step one parameter after another"):
        mcf.step_in_backward(model, optimizer)


def test_optimizers_that_need_all_gradients_are_refused():
    class Needy(torch.optim.SGD):
        def step(self, closure=None):
            if any(p.grad is None for p in self.param_groups[0]["params"]):
                raise RuntimeError("a gradient is missing")
            return super().step(closure)

    model = network()
    with pytest.raises(ValueError, match="without gradients it raises RuntimeError: a gradient"):
        mcf.step_in_backward(model, Needy(model.parameters(), lr=0.1))


# --------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("bucket", [0, 3 * 2 * 64])
def test_few_gradients_are_alive_at_a_time(bucket):
    """Beside the one that has just been made, no more than a bucket."""
    model = mcf.as_expansion(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(32)]))
    optimizer = adamw(model)
    alive, sizes = {}, []

    def note(p):
        data = p.grad.untyped_storage()
        alive[id(p)] = weakref.ref(p.grad), data.nbytes()
        sizes.append(sum(size for grad, size in alive.values() if grad() is not None))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)
    mcf.step_in_backward(model, optimizer, bucket_bytes=bucket)
    for _ in range(2):
        model(torch.ones(1, 8).bfloat16()).sum().backward()
        optimizer.step()
    assert len(sizes) == 64
    assert max(sizes) == max(bucket, 2 * 64)


MEMORY = """
import sys, torch, mcftensor as mcf

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

def forget():  # the peak so far
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

torch.set_num_threads(1)
count, size = 24, 2**10
model = torch.nn.Sequential(*[torch.nn.Linear(size, size, bias=False) for _ in range(count)])
model = model.bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
if sys.argv[1] == "released":
    mcf.step_in_backward(model, optimizer)
x = torch.ones(1, size).bfloat16()
loss = model(x).sum()
forget()
before = peak()
loss.backward()
optimizer.step()
print((peak() - before) / (2 * count * size**2))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory():
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}

    def share(mode):
        command = [sys.executable, "-c", MEMORY, mode]
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | at_once
        )
        return float(run.stdout)

    # Of all gradients, which are 48 MiB; a bucket and the one that is made are 3 of 24.
    assert share("kept") > 0.9
    assert share("released") < 0.25


@pytest.mark.parametrize("format", [None, mcf.bf16x2])
def test_clipping_of_released_gradients_raises(format):
    model = nn.Linear(4, 4) if format is None else mcf.as_expansion(nn.Linear(4, 4), format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 4, dtype=model.weight.dtype)
    with mcf.step_in_backward(model, optimizer) as handle:
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0  # before any backward
        model(x).sum().backward()
        match = r"gradients of weight, bias were released.*clip_by_previous_norm"
        for given in (model.parameters(), list(model.parameters())):
            with pytest.raises(RuntimeError, match=match):
                nn.utils.clip_grad_norm_(given, 1.0)
        with pytest.raises(RuntimeError, match="gradients of weight were released"):
            nn.utils.clip_grad_norm_(model.weight, 1.0)
        for clip in (
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=False),
            lambda: nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.ones(())),
        ):
            with pytest.raises(RuntimeError, match=match):
                clip()
        optimizer.step()
        with handle.no_step():
            model(x).sum().backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()
        optimizer.zero_grad()
        with handle.measure_norm(1.0):
            model(x).sum().backward()
            with pytest.raises(RuntimeError, match="clip_by_previous_norm"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    model(x).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
