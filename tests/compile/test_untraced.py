"""`torch.compile` leaves steps over expansions as they are, and all else as it was."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.lr_scheduler import LinearLR

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, small_model

PATHS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def with_gradients(model):
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.1).to(p.dtype)
    return model


def inside(optimizer, scheduler):
    """A user's function that takes a step."""

    def function():
        optimizer.step()
        scheduler.step()

    return function


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("mode", [None, "plus"])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_no_graph_and_no_recompilation_where_the_rate_changes(path, mode):
    models = [with_gradients(mcf.as_expansion(small_model())) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    graphs = CompileCounter()
    steps = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **path)
        if mode:
            mcf.collage(optimizer, mode)
        steps.append(inside(optimizer, LinearLR(optimizer)))
    steps[1] = torch.compile(steps[1], backend=graphs)
    for step in steps:
        step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            for step in steps:
                step()
    assert graphs.frame_count == 0
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert_same_terms(p, q)


def test_over_plain_parameters_steps_are_compiled():
    graphs = CompileCounter()
    model = with_gradients(small_model().bfloat16())
    torch.compile(torch.optim.AdamW(model.parameters(), foreach=True).step, backend=graphs)()
    assert graphs.frame_count == 1
    assert graphs.op_count > 10


def test_parameters_may_be_of_both_kinds():
    graphs = CompileCounter()
    model = with_gradients(mcf.as_expansion(small_model(), overrides={"*bias": None}))
    plain = [p for p in model.parameters() if not isinstance(p, mcf.MCFTensor)]
    assert plain
    before = [p.detach().clone() for p in plain]
    torch.compile(torch.optim.SGD(model.parameters(), lr=0.1).step, backend=graphs)()
    assert graphs.frame_count == 0
    assert all((p != q).any() for p, q in zip(plain, before, strict=True))


def test_a_step_that_finds_infinities_is_skipped():
    model = with_gradients(mcf.as_expansion(small_model()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    step = torch.compile(optimizer.step, backend="aot_eager")
    before = torch.cat([exact(p.detach()).flatten() for p in model.parameters()])
    for found, moved in ((1.0, False), (0.0, True)):
        optimizer.found_inf.fill_(found)
        step()
        after = torch.cat([exact(p.detach()).flatten() for p in model.parameters()])
        assert ((after != before) == moved).all()


@pytest.mark.parametrize("convert", [mcf.as_expansion, nn.Module.bfloat16])
def test_hooks_run_once_and_a_closure_is_called(convert):
    optimizer = torch.optim.AdamW(with_gradients(convert(small_model())).parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    assert optimizer.step(lambda: 7.0) == 7.0
    assert calls == ["before", "after"]
    assert "closure" in inspect.signature(optimizer.step).parameters


def test_optimizers_made_before_the_import_and_classes_derived_after():
    """Hooks of a derived class run once as long as none of its base has been made."""
    script = """
import torch
from torch._dynamo.testing import CompileCounter

def with_calls(optimizer):
    optimizer.calls = []
    optimizer.register_step_post_hook(lambda optimizer, *args: optimizer.calls.append(None))
    return optimizer

model = torch.nn.Linear(3, 2)
earlier = with_calls(torch.optim.AdamW(model.parameters()))

import mcftensor as mcf

class Derived(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

mcf.as_expansion(model)
for p in model.parameters():
    p.grad = torch.ones(p.shape).bfloat16()
derived = with_calls(Derived(model.parameters()))
later = with_calls(torch.optim.AdamW(model.parameters()))
for optimizer in (earlier, derived, later):
    graphs = CompileCounter()
    torch.compile(optimizer.step, backend=graphs)()
    assert graphs.frame_count == 0
    optimizer.step()
    assert len(optimizer.calls) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True)
