"""Gradients without order on one process: what a step is, and every interleaving of its parts."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import mcftensor as mcf
from mcftensor.reproducible import order_free_sums
from mcftensor.reproducible.binned_sums import layout_of
from mcftensor.reproducible.order_free_leaves import Leaves, most_kept

LEAVES = [1.0, 256.0, -256.0, 2.0**-20, -(2.0**30), 3.0, 2.0**30, -0.0]


def model_of(convert=nn.Module.bfloat16) -> nn.Module:
    """Its leaves are its inputs."""
    return convert(nn.Linear(1, 1, bias=False))


def leaf(model: nn.Module, x: float) -> None:
    model(torch.full((1, 1), x).to(model.weight.dtype)).sum().backward()


def right(leaves: list[float], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What a step's gradient has to be, by accumulators, which have tests of their own."""
    layout = layout_of(len(leaves))
    total = order_free_sums.accumulators(1, torch.device("cpu"))
    for x in leaves:
        order_free_sums.add_to(total, [torch.tensor([x]).to(dtype)], layout)
    out = torch.empty(1, dtype=dtype)
    order_free_sums.round_into(out, total, layout)
    return out.view(1, 1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("convert", [nn.Module.bfloat16, mcf.as_expansion, nn.Module.half])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_a_step(convert, count):
    model = model_of(convert)
    handle = mcf.order_free_gradients(model, microbatches=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    leaves = [x for x in LEAVES if abs(x) < 1000][:count] + [1.0] * (count - 6)
    for _ in range(2):
        for x in leaves:
            assert model.weight.grad is None
            leaf(model, x)
        assert same(model.weight.grad, right(leaves, model.weight.dtype))
        assert handle.passes == count
        optimizer.step()
        optimizer.zero_grad()


class Interleavings(RuleBasedStateMachine):
    """A training loop that does everything in any order, beside a list of leaves."""

    @initialize(count=st.integers(1, 9))
    def start(self, count):
        self.model = model_of()
        self.count = count
        self.handle = mcf.order_free_gradients(self.model, microbatches=count)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.leaves = []
        self.factors = []

    @rule(x=st.sampled_from(LEAVES))
    def backward(self, x):
        self.factors = []
        if len(self.leaves) == self.count:
            if self.model.weight.grad is not None:
                with pytest.raises(RuntimeError, match="has got another gradient"):
                    leaf(self.model, x)
                self.handle.reset()
                self.model.zero_grad()
                self.leaves = []
                return
            self.leaves = []
        leaf(self.model, x)
        self.leaves.append(x)

    @rule()
    def reset(self):
        if len(self.leaves) < self.count - 1:
            self.handle.reset()
            self.leaves = []

    @rule()
    def zero_grad(self):
        """Of a step that is not complete, it drops nothing."""
        self.model.zero_grad()

    @rule(most=st.sampled_from([1e30, 1.0, 1e-3]))
    def clip(self, most):
        grad = self.model.weight.grad
        before = np.float32(0 if grad is None else abs(grad.item()))
        norm = clip_grad_norm_(self.model.parameters(), most)
        assert norm == before
        self.factors.append(min(np.float32(most) / (before + np.float32(1e-6)), np.float32(1)))

    @rule()
    def step(self):
        if 0 < len(self.leaves) < self.count:
            with pytest.raises(RuntimeError, match="the step is not complete"):
                self.optimizer.step()
        else:
            self.optimizer.step()

    @rule(x=st.sampled_from(LEAVES))
    def frozen_forward(self, x):
        with torch.no_grad():
            self.model(torch.full((1, 1), x).bfloat16())

    @invariant()
    def gradients_are_those_of_complete_steps(self):
        grad = self.model.weight.grad
        if len(self.leaves) < self.count:
            assert grad is None
        elif grad is not None:
            expected = right(self.leaves)
            for factor in self.factors:
                expected = (expected.float() * float(factor)).bfloat16()
            assert same(grad, expected)

    def teardown(self):
        self.handle.remove()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class Processes(RuleBasedStateMachine):
    """Leaves come to any process, which keep or accumulate them, and send them to any other."""

    def __init__(self):
        super().__init__()
        self.layout = layout_of(40)
        self.held = [self.new(i % 2 == 0) for i in range(4)]
        self.all = []

    def new(self, accumulates):
        return Leaves(3, self.layout, accumulates)

    @rule(process=st.integers(0, 3), seed=st.integers(0, 2**16), span=st.integers(0, 120))
    def leaf(self, process, seed, span):
        if len(self.all) < 40:
            torch.manual_seed(seed)
            x = (torch.randn(3) * torch.exp2(torch.randint(-span, span + 1, (3,)))).bfloat16()
            self.held[process].add(x.clone())
            self.all.append(x)

    @rule(source=st.integers(0, 3), to=st.integers(0, 3))
    def send(self, source, to):
        if source == to:
            return
        sent = self.held[source]
        if sent.accumulator is None and sent.kept:
            self.held[to].add(*sent.kept)
        elif sent.accumulator is not None:
            own = self.held[to].accumulated(torch.device("cpu"))
            order_free_sums.merge_into(own, [sent.accumulated(own.device)], self.layout)
        self.held[source] = self.new(source % 2 == 0)

    @rule()
    def zero_grad(self):
        self.held = [self.new(i % 2 == 0) for i in range(4)]
        self.all = []

    @invariant()
    def the_sum_is_that_of_all(self):
        copies = copy.deepcopy(self.held)
        total = copies[0].accumulated(torch.device("cpu"))
        for other in copies[1:]:
            order_free_sums.merge_into(total, [other.accumulated(total.device)], self.layout)
        expected = order_free_sums.accumulators(3, total.device)
        order_free_sums.add_to(expected, self.all[::-1], self.layout)
        assert torch.equal(total, expected)


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_orders_of_microbatches():
    torch.manual_seed(0)
    batches = torch.randn(8, 4, 6).bfloat16()
    results = []
    for seed in range(4):
        torch.manual_seed(1)
        model = mcf.as_expansion(nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)))
        mcf.order_free_gradients(model, microbatches=8)
        for i in torch.randperm(8, generator=torch.Generator().manual_seed(seed)):
            model(batches[i]).float().square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for x in results for a, b in zip(x, results[0], strict=True))


def test_unused_and_tied_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))
            self.c.weight = self.a.weight

        def forward(self, x, name):
            return self.c(getattr(self, name)(x))

    model = Model().bfloat16()
    mcf.order_free_gradients(model, microbatches=3)
    x = torch.ones(1, 2).bfloat16()
    for name in ("a", "b", "a"):
        model(x, name).sum().backward()
    assert model.a.weight.grad is not None
    alone = Model().bfloat16()
    alone.load_state_dict(model.state_dict())
    alone(x, "b").sum().backward()
    assert same(model.b.weight.grad, alone.b.weight.grad)  # one leaf


def test_grad_scaler():
    """Scales are powers of two, so a scaled step has the bits of one that is not."""
    gradients = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        mcf.order_free_gradients(model, microbatches=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for i in range(2):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
            scaler.scale(model(x).square().sum()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        gradients.append(model.weight.detach().clone())
    assert torch.equal(*gradients)


def test_padding_counts_for_nothing():
    model = model_of()
    handle = mcf.order_free_gradients(model, microbatches=2)
    with handle.padding():
        leaf(model, 5.0)
    with pytest.raises(RuntimeError, match=r"a step of 1 microbatches .* not of the 2"):
        leaf(model, 1.0)
    handle.reset()


def test_a_failed_backward_pass_needs_a_reset():
    model = model_of()
    handle = mcf.order_free_gradients(model, microbatches=2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("lost")

    x = torch.ones(1, 1).bfloat16().requires_grad_()
    with pytest.raises(ValueError, match="lost"):
        model(Fails.apply(x)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has failed.*reset\(\)"):
        leaf(model, 1.0)
    handle.reset()
    leaf(model, 1.0)
    leaf(model, 2.0)
    assert model.weight.grad.item() == 3.0


def test_reentrant_checkpoints_are_refused():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).bfloat16()
    mcf.order_free_gradients(model, microbatches=2)
    x = torch.ones(1, 1).bfloat16().requires_grad_()

    def run() -> None:
        for _ in range(2):
            model[1](checkpoint(model[0], x, use_reentrant=True)).sum().backward()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run()


def test_the_norm_is_that_of_exact_sums():
    model = nn.Linear(100, 30)
    mcf.order_free_gradients(model, microbatches=1)
    model(torch.randn(4, 100) * torch.logspace(-12, 12, 100)).square().sum().backward()
    whole = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    assert clip_grad_norm_(model.parameters(), 1e30) == whole.square().sum().sqrt().float()
    model.weight.grad[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="norm of order 2 of the gradients is inf"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(model.parameters(), 1e30) == torch.inf
    model.weight.grad[0, 1] = torch.nan
    assert clip_grad_norm_(model.parameters(), 1e30).isnan()


def test_totals():
    handle = mcf.order_free_gradients(model_of(), microbatches=4)
    assert handle.total(torch.tensor([1e30, 1.0, -1e30])).item() == 1.0
    assert handle.total(torch.tensor([[2**53, 1], [1, 1]])).item() == 2**53 + 3
    assert handle.total(torch.tensor([torch.inf, -torch.inf])).isnan()
    assert handle.total(torch.tensor([1e308, 1e308], dtype=torch.float64)).item() == torch.inf
    assert handle.total(torch.tensor([-1e308] * 2, dtype=torch.float64)).item() == -torch.inf


def test_a_digest_is_of_the_leaf():
    torch.manual_seed(0)
    model = nn.Linear(3, 3).bfloat16()
    handle = mcf.order_free_gradients(model, microbatches=2)
    x = torch.randn(2, 3).bfloat16()
    first = handle.digest(lambda: model(x).sum().backward())
    assert first == handle.digest(lambda: model(x).sum().backward())
    assert first != handle.digest(lambda: model(x + 1).sum().backward())
    assert handle.passes == 0
    assert model.weight.grad is None


def test_removal_and_copies():
    model = model_of()
    gone = weakref.ref(model)
    with mcf.order_free_gradients(model, microbatches=2):
        other = copy.deepcopy(model)
        leaf(model, 1.0)
        pickle.loads(pickle.dumps(model))
    leaf(other, 1.0)
    assert other.weight.grad.item() == 1.0
    leaf(model, 4.0)
    assert model.weight.grad.item() == 4.0
    mcf.order_free_gradients(other, microbatches=2)
    del model
    gc.collect()
    assert gone() is None


def test_refusals():
    with pytest.raises(TypeError, match="give a module"):
        mcf.order_free_gradients([], microbatches=2)
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        mcf.order_free_gradients(nn.GELU(), microbatches=2)
    with pytest.raises(ValueError, match=r"weight is torch.float64 of shape \(1, 1\)"):
        mcf.order_free_gradients(model_of(nn.Module.double), microbatches=2)
    for count in (0, 2**19, 1.5):
        with pytest.raises(ValueError, match=f"microbatches={count}"):
            mcf.order_free_gradients(model_of(), microbatches=count)
    model = model_of()
    mcf.order_free_gradients(model, microbatches=2)
    with pytest.raises(ValueError, match="has a handle"):
        mcf.order_free_gradients(model, microbatches=2)
    with pytest.raises(ValueError, match="call it again, with the model in Distributed"):
        list(model._ddp_params_and_buffers_to_ignore)
    model = model_of(mcf.as_expansion)
    mcf.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="before step_in_backward"):
        mcf.order_free_gradients(model, microbatches=2)
    sparse = nn.Embedding(3, 2, sparse=True).bfloat16()
    mcf.order_free_gradients(sparse, microbatches=2)
    with pytest.raises(RuntimeError, match="sparse or has a graph"):
        sparse(torch.tensor([0])).sum().backward()


def test_parameters_that_have_been_replaced():
    model = model_of()
    mcf.order_free_gradients(model, microbatches=1)
    model.weight = nn.Parameter(model.weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="other trained parameters"):
        optimizer.step()


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, mcf.as_expansion])
@pytest.mark.parametrize("count", [2, 6])
def test_gradients_have_the_strides_of_parameters(convert, count):
    model = convert(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    mcf.order_free_gradients(model, microbatches=count)
    x = torch.randn(1, 3, 5, 5).bfloat16()
    for _ in range(count):
        model(x).sum().backward()
    alone(x).sum().backward()
    grad = model.weight.grad
    assert torch.equal(grad, (alone.weight.grad.float() * count).bfloat16())
    assert grad.stride() == model.weight.stride() == (27, 1, 9, 3)


def test_gradients_from_before_are_no_leaves():
    model = model_of()
    leaf(model, 5.0)
    handle = mcf.order_free_gradients(model, microbatches=1)
    with pytest.raises(RuntimeError, match="Call zero_grad"):
        leaf(model, 1.0)
    handle.reset()
    leaf(model, 1.0)
    assert model.weight.grad.item() == 1.0


def test_a_digest_that_fails_leaves_no_gradients():
    model = model_of()
    handle = mcf.order_free_gradients(model, microbatches=1)

    def fails() -> None:
        leaf(model, 5.0)
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        handle.digest(fails)
    leaf(model, 1.0)
    assert model.weight.grad.item() == 1.0


def test_leaves_are_plain():
    model = model_of()
    accumulation = mcf.accumulate_gradients(model)
    handle = mcf.order_free_gradients(model, microbatches=1)
    with pytest.raises(RuntimeError, match=r"an expansion in bf16x2 of shape \(1, 1\)"):
        leaf(model, 1.0)
    accumulation.remove()
    handle.reset()
    model.double()
    with pytest.raises(RuntimeError, match=r"weight is torch.float64 of shape \(1, 1\)"):
        leaf(model, 1.0)


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_at_the_end_of_backward_are_not_released(count):
    model = model_of(mcf.as_expansion)
    mcf.order_free_gradients(model, microbatches=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    released = mcf.step_in_backward(model, optimizer)
    with released, pytest.raises(RuntimeError, match=r"remove\(\) the handle of step_in_backward"):
        leaf(model, 1.0)


def test_as_many_leaves_are_kept_as_take_the_memory_of_an_accumulator():
    assert (most_kept(torch.bfloat16), most_kept(torch.float32)) == (4, 2)
