"""EDQ on optimizers that are in its way: measured right, or refused by name."""

import collections
import math
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import mcftensor as mcf
from support.metering import Stepper, bits, gradients, make, with_gradient
from support.releases import GRAD_DTYPE

pytestmark = pytest.mark.usefixtures("one_by_one")


class Derived(Stepper):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.5)
        return super().step(closure)


class Failing(Stepper):
    fail = True

    def update(self, p, group):
        if self.fail:
            raise KeyError("not today")
        super().update(p, group)


class Noisy(Stepper):
    def update(self, p, group):
        p.add_(torch.randn_like(p), alpha=0.25)


class Rounding(Stepper):
    """Rounds at random, as stochastic rounding does."""

    def update(self, p, group):
        exact = p.double() - p.grad.double()
        p.copy_(exact + (torch.rand(p.shape) - 0.5) * 2**-8 if p.dtype == torch.bfloat16 else exact)


class Holder(Stepper):
    """Keeps its parameters in an attribute and updates them there."""

    def __init__(self, params):
        super().__init__(params)
        self.flat = list(self.param_groups[0]["params"])
        self.counts = {"steps": [0]}

    @torch.no_grad()
    def step(self, closure=None):
        self.counts["steps"][0] += 1
        for p in self.flat:
            self.update(p, self.param_groups[0])


class Untold(Stepper):
    """Takes more than a closure."""

    @torch.no_grad()
    def step(self, closure=None, scale=1.0):
        for p in self.param_groups[0]["params"]:
            p.sub_(scale * p.grad)


def test_a_step_that_calls_that_of_its_base_class():
    Stepper([make(torch.float32, 1)])  # now the base class has hooks of its own
    (p,), optimizer, edq = with_gradient(Derived, torch.float32)
    before = p.detach().clone()
    for _ in range(2):
        gradients([p], 0)
        optimizer.step()
    assert [reading["step"] for reading in edq.history] == [1, 2]
    assert edq.history[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(p, before - p.grad - p.grad)  # grad is the halved one
    assert edq.last["update_norm"] == pytest.approx(p.grad.norm().item(), rel=1e-5)


def test_a_step_that_raises_is_not_the_end():
    _, optimizer, edq = with_gradient(Failing)
    with pytest.raises(KeyError, match="not today"):
        optimizer.step()
    optimizer.fail = False
    optimizer.step()
    assert edq.last["step"] == 1
    assert edq.not_metered == {}


def test_random_steps_are_the_same_with_a_meter():
    (p,), optimizer, _ = with_gradient(Noisy)
    torch.manual_seed(7)
    optimizer.step()
    other = Noisy([make(torch.bfloat16, 64)])
    gradients(other.param_groups[0]["params"], 0)
    torch.manual_seed(7)
    other.step()
    assert torch.equal(p, other.param_groups[0]["params"][0])


def test_stochastic_rounding_is_measured():
    _, optimizer, edq = with_gradient(Rounding, count=2, coupled=True)
    optimizer.step()
    assert edq.last["ratio"] == pytest.approx(1.0, abs=0.01)
    _, optimizer, edq = with_gradient(Rounding, count=2)
    with pytest.warns(UserWarning, match="one by one"):
        optimizer.step()
    optimizer.step()
    assert edq.last["ratio"] == pytest.approx(1.0, abs=0.01)


def test_an_optimizer_that_holds_its_parameters_elsewhere():
    parameters, optimizer, edq = with_gradient(Holder, torch.float32, count=2)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert optimizer.counts == {"steps": [1]}
    for p, old in zip(parameters, before, strict=True):
        assert torch.equal(p, old - p.grad)
    assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-5)


def test_a_step_that_depends_on_what_is_not_copied():
    state = {"scale": 1.0}

    class Global(Stepper):
        def update(self, p, group):
            state["scale"] += 1
            p.sub_(state["scale"] * p.grad)

    _, optimizer, edq = with_gradient(Global, torch.float32, count=2, coupled=True)
    with pytest.warns(UserWarning, match="cannot be repeated on copies to the bit"):
        optimizer.step()
    optimizer.step()  # tries again, and says it once
    assert edq.last is None
    assert len(edq.not_metered) == 2


def test_other_arguments_of_a_step():
    _, optimizer, edq = with_gradient(Untold, torch.float32)
    with pytest.warns(UserWarning, match="arguments other than a closure"):
        optimizer.step(scale=2.0)
    assert "0.0" in edq.not_metered


def test_a_dtype_that_the_optimizer_does_not_expect():
    class Picky(Stepper):
        def update(self, p, group):
            if p.dtype != torch.bfloat16:
                raise RuntimeError("bfloat16 only\nreally")
            super().update(p, group)

    _, optimizer, edq = with_gradient(Picky)
    with pytest.warns(UserWarning, match="bfloat16 only"):
        optimizer.step()
    assert edq.not_metered == {"0.0": "RuntimeError: bfloat16 only"}


def test_states_in_a_dtype_of_the_optimizers_choice():
    class Master(Stepper):
        def update(self, p, group):
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros(p.shape)
            state["momentum"].lerp_(p.grad.float(), 0.5)
            p.sub_(state["momentum"].to(p.dtype))

    _, optimizer, edq = with_gradient(Master)
    optimizer.step()
    optimizer.step()
    assert edq.last["ratio"] == pytest.approx(1.0, abs=0.01)


def test_a_scheduler_binds_the_step_to_the_instance():
    (p,), optimizer, edq = with_gradient(Stepper, torch.float32)
    before = p.detach().clone()
    LambdaLR(optimizer, lambda step: 0.5)
    assert "step" in vars(optimizer)
    optimizer.step()
    assert torch.equal(p, before - 0.5 * p.grad)
    assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-5)


def test_a_compiled_step():
    p = nn.Parameter(mcf.as_expansion(torch.ones(8), mcf.bf16x2))
    optimizer = torch.optim.AdamW([p], lr=1e-4, fused=True)
    edq = mcf.EDQ(optimizer)
    step = torch.compile(optimizer.step)
    for i in range(2):
        gradients([p], i)
        step()
    assert [reading["step"] for reading in edq.history] == [1, 2]
    assert edq.last["ratio"] == pytest.approx(1.0, abs=0.05)


def test_a_failure_in_a_batch_is_that_of_one_parameter(monkeypatch):
    monkeypatch.setattr("mcftensor.meters.edq.meter._SMALL", 100)

    class Picky(Stepper):
        def update(self, p, group):
            if p.dtype != torch.bfloat16 and p.dim() == 2:
                raise RuntimeError("no matrices")
            super().update(p, group)

    parameters = [make(torch.bfloat16, 4), make(torch.bfloat16, 2, 2)]
    edq = mcf.EDQ(optimizer := Picky(parameters))
    gradients(parameters, 0)
    with pytest.warns(UserWarning, match="no matrices"):
        optimizer.step()
    assert list(edq.per_parameter) == ["0.0"]
    assert list(edq.not_metered) == ["0.1"]


class Attached(Stepper):
    """Steps with the help of an attribute that a test sets."""

    @torch.no_grad()
    def step(self, closure=None):
        self.help(self)


def _subtract(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.sub_(p.grad)


def _closure_over(optimizer):
    return lambda _: _subtract(optimizer)


class Holding:
    """Cannot be copied, and steps what it was given."""

    def __init__(self, optimizer):
        self.optimizer, self.lock = optimizer, threading.Lock()

    def __call__(self, _):
        _subtract(self.optimizer)


@pytest.mark.parametrize(("make_help", "reason"), [(_closure_over, "holds"), (Holding, "copied")])
def test_an_attribute_that_would_step_the_real_parameters(make_help, reason):
    (p,), optimizer, edq = with_gradient(Attached, torch.float32)
    optimizer.help = make_help(optimizer)
    before = p.detach().clone()
    with pytest.warns(UserWarning, match=f"attribute help .*{reason}"):
        optimizer.step()
    assert torch.equal(p, before - p.grad)
    assert edq.last is None


def test_a_step_that_writes_to_the_real_parameters_is_told():
    everything = []

    class Global(Stepper):
        def update(self, p, group):
            for real in everything:
                real.sub_(1)

    (p,), optimizer, edq = with_gradient(Global, torch.float32)
    everything.append(p)
    with pytest.warns(UserWarning, match="has changed them"):
        optimizer.step()
    assert edq.last is None


def test_states_on_the_parameter_itself():
    class OnParameter(Stepper):
        def update(self, p, group):
            p.momentum.mul_(0.5).add_(p.grad)
            p.sub_(p.momentum)

    (p,), optimizer, edq = with_gradient(OnParameter)
    p.momentum = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p.momentum, p.grad)
    assert edq.last["ratio"] == pytest.approx(1.0, abs=0.01)


def test_all_random_states_are_restored():
    numpy_random = np.random.random

    class Random(Stepper):
        def update(self, p, group):
            p.sub_(p.grad, alpha=random.random() + numpy_random() + torch.rand(()).item())

    def run(metered):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        (p,), optimizer, edq = with_gradient(Random, torch.float32)
        if not metered:
            edq.remove()
        optimizer.step()
        return bits(p), random.random(), numpy_random(), edq

    *found, edq = run(True)
    *without, _ = run(False)
    assert found == without
    assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-5)


def test_a_step_that_runs_backward_by_itself():
    class Backward(Stepper):
        def step(self, closure):
            with torch.enable_grad():
                loss = closure()
                loss.backward()
            return super().step()

    Stepper([make(torch.float32, 1)])
    p = make(torch.float32, 4)
    before = p.detach().clone()
    optimizer = Backward([p])
    mcf.EDQ(optimizer)
    with pytest.warns(UserWarning, match="makes its gradients by itself"):
        optimizer.step(lambda: p.sum() * 2)
    assert torch.equal(p, before - 2)


def test_a_closure_with_arguments():
    class Asking(Stepper):
        @torch.no_grad()
        def step(self, closure):
            closure(3.0, twice=True)
            return super().step()

    p = make(torch.float32, 4)
    optimizer = Asking([p])
    edq = mcf.EDQ(optimizer)

    def closure(value, twice=False):
        p.grad = torch.full((4,), value * (1 + twice))

    optimizer.step(closure)
    assert edq.last["update_norm"] == pytest.approx(12)


def test_an_argument_that_is_no_closure():
    class Scaled(Stepper):
        @torch.no_grad()
        def step(self, scale):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * scale)

    (p,), optimizer, _ = with_gradient(Scaled, torch.float32)
    before = p.detach().clone()
    with pytest.warns(UserWarning, match="arguments other than a closure"):
        optimizer.step(0.5)
    assert torch.equal(p, before - 0.5 * p.grad)


def test_a_closure_that_is_not_called():
    _, optimizer, edq = with_gradient(Stepper)
    with pytest.warns(UserWarning, match="did not call its closure"):
        optimizer.step(lambda: 1.0)
    assert edq.not_metered == {"0.0": "its step did not call its closure"}
    optimizer.step()
    assert edq.not_metered == {}
    assert edq.last["step"] == 2


def test_not_a_number_stays_where_it_is():
    p = nn.Parameter(torch.full((4,), math.nan))
    optimizer = torch.optim.SGD([p], lr=1.0)
    edq = mcf.EDQ(optimizer)
    p.grad = torch.ones(4)
    optimizer.step()
    assert math.isnan(edq.last["ratio"])
    assert edq.last["lost"] == 1


@GRAD_DTYPE
def test_gradients_of_another_dtype():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    p.grad = torch.full((4,), 0.25)
    optimizer = Stepper([p])
    edq = mcf.EDQ(optimizer)
    optimizer.step()
    assert edq.last["ratio"] == 1


def test_states_that_count():
    class Counting(Stepper):
        def update(self, p, group):
            self.state["steps"] = self.state.get("steps", 0) + 1
            state = self.state.setdefault(p, collections.defaultdict(int))
            state["steps"] += 1
            p.sub_(p.grad)

    parameters, optimizer, edq = with_gradient(Counting, torch.float32, count=2)
    for _ in range(3):
        optimizer.step()
    assert optimizer.state["steps"] == 6
    assert optimizer.state[parameters[0]]["steps"] == 3
    assert len(edq.history) == 3


class Coded(Stepper):
    """Keeps its momentum in codes and scales of its own, and reads scales as float32 whatever their
    dtype, as kernels written in C++ do."""

    def update(self, p, group):
        state = self.state[p]
        if not state:
            state["codes"] = torch.zeros_like(p, dtype=torch.uint8)
            state["scale"] = torch.ones(1)
        scale = state["scale"].view(torch.float32)[:1]
        momentum = (state["codes"].float() - 128) * scale / 128
        momentum = 0.5 * momentum + p.grad.float()
        p.copy_(p.float() - 0.5 * momentum)
        scale.copy_(momentum.abs().amax())
        state["codes"].copy_((momentum / scale * 127 + 128).round())


class Choosy(Stepper):
    """Does nothing for states of another dtype than float32."""

    def update(self, p, group):
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
        if state["momentum"].dtype == torch.float32:
            state["momentum"].lerp_(p.grad.float(), 0.5)
            p.copy_(p.float() - state["momentum"])


class Pair(torch.Tensor):
    """Numbers kept by a class of another package, which cannot be cloned or split."""

    @staticmethod
    def __new__(cls, halves):
        return torch.Tensor._make_wrapper_subclass(cls, halves.shape[1:], dtype=torch.float32)

    def __init__(self, halves):
        self.halves = halves

    def __tensor_flatten__(self):
        return ["halves"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, shape, stride):
        return cls(inner["halves"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].halves)
        raise NotImplementedError(str(func))


class Foreign(Stepper):
    def update(self, p, group):
        state = self.state[p]
        if not state:
            state["momentum"] = Pair(torch.zeros(2, *p.shape))
        halves = state["momentum"].halves
        halves.mul_(0.5).add_(p.grad.float(), alpha=0.25)
        p.copy_(p.float() - halves.sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(
            Coded, marks=pytest.mark.with_float64("without it, its float32 scale rounds pairs")
        ),
        Choosy,
        Foreign,
    ],
)
def test_kernels_that_take_their_own_types_alone(cls, dtype):
    p = make(dtype, 64)
    optimizer = cls([p])
    ratios = []
    with mcf.EDQ(optimizer) as edq:
        for step in range(3):
            gradients([p], step)
            p.grad.mul_(2**-9)
            before = p.detach().double()
            exact = p.detach().clone().float()
            twin = nn.Parameter(exact)
            twin.grad = p.grad.float()
            other = cls([twin])
            other.state[twin] = {
                name: Pair(x.halves.clone()) if isinstance(x, Pair) else x.clone()
                for name, x in optimizer.state[p].items()
            }
            other.step()
            optimizer.step()
            intended, moved = twin.detach().double() - before, p.detach().double() - before
            ratios.append(float(intended @ moved / intended.square().sum()))
    assert edq.not_metered == {}
    assert [reading["ratio"] for reading in edq.history] == pytest.approx(ratios, rel=1e-4)


@pytest.mark.with_float64("the step ignores numbers of it")
def test_a_step_that_does_nothing_in_float64_is_told():
    class Deaf(Stepper):
        def update(self, p, group):
            if p.dtype != torch.float64:
                super().update(p, group)

    _, optimizer, edq = with_gradient(Deaf)
    with pytest.warns(UserWarning, match="in float64 its step does nothing"):
        optimizer.step()
    assert edq.last is None
