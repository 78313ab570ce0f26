"""Parameters in the functions of models: the bits of plain bf16, whoever looks on."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor import dispatch
from mcftensor.dispatch import torch_functions
from support.helpers import exact, parameter, sample

# Shapes of plain operands, of parameters, and a call, where it is not of these in order.
CALLS = {
    F.linear: ([(4, 5)], [(3, 5), (3,)], lambda x, w, b: F.linear(x, w, bias=b)),
    F.bilinear: ([(4, 5), (4, 6)], [(3, 5, 6), (3,)], None),
    F.layer_norm: ([(4, 5)], [(5,), (5,)], lambda x, w, b: F.layer_norm(x, (5,), w, b, eps=1e-3)),
    F.group_norm: ([(2, 4, 3)], [(4,), (4,)], lambda x, w, b: F.group_norm(x, 2, w, b)),
    F.rms_norm: ([(4, 5)], [(5,)], lambda x, w: F.rms_norm(x, (5,), w)),
    F.prelu: ([(2, 4, 3)], [(4,)], None),
    **{
        getattr(F, f"{name}{n}d"): ([(2, 4, *[6] * n)], [(4, 4, *[3] * n), (4,)], None)
        for name in ("conv", "conv_transpose")
        for n in (1, 2, 3)
    },
    torch.addmm: ([(4, 5)], [(3,), (5, 3)], lambda x, b, w: torch.addmm(b, x, w)),
    torch.baddbmm: ([(2, 4, 5)], [(2, 1, 3), (2, 5, 3)], lambda x, b, w: torch.baddbmm(b, x, w)),
    **{f: ([(2, 4, 5)], [(2, 5, 3)], None) for f in (torch.bmm, torch.Tensor.bmm)},
    **{f: ([(4, 5)], [(5,)], None) for f in (torch.mv, torch.Tensor.mv)},
    **{f: ([(4, 5)], [(5, 3)], None) for f in (torch.mm, torch.Tensor.mm)},
    **{f: ([(4, 5)], [(5, 3)], None) for f in (torch.matmul, torch.Tensor.matmul)},
    torch.Tensor.__matmul__: ([(4, 5)], [(5, 3)], lambda x, w: x @ w),
    torch.Tensor.__rmatmul__: ([(5, 4)], [(3, 5)], lambda x, w: w @ x),
}  # fmt: skip


def test_every_function_is_tested():
    assert set(CALLS) == torch_functions.FUNCTIONS


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("function", CALLS)
def test_as_plain_parameters(function, with_grad):
    shapes, own, call = CALLS[function]
    call = call or function
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    weights = [parameter(mcf.bf16x2, *shape, seed=i) for i, shape in enumerate(own)]
    plain = [nn.Parameter(w.components[0].detach().clone()) for w in weights]
    with torch.set_grad_enabled(with_grad):
        got, expected = call(*inputs, *weights), call(*inputs, *plain)
    assert type(got) is torch.Tensor
    assert torch.equal(got, expected)
    assert got.requires_grad == with_grad
    if not with_grad:
        return
    seed = torch.randn_like(got)
    grads = [
        torch.autograd.grad(y, [*inputs, *xs], seed)
        for y, xs in ((got, weights), (expected, plain))
    ]
    for one, other in zip(*grads, strict=True):
        assert type(one) is torch.Tensor
        assert torch.equal(one, other)


@pytest.mark.usefixtures("no_grad")
def test_dispatch_sees_none_of_it(monkeypatch):
    weight, x = parameter(mcf.bf16x2, 3, 5), torch.randn(4, 5).bfloat16()
    monkeypatch.setattr(dispatch, "_handler", None)
    F.linear(x, weight)


def test_frozen_parameters_and_values():
    weight, x = parameter(mcf.bf16x2, 3, 5), torch.randn(4, 5).bfloat16()
    weight.requires_grad_(False)
    assert not F.linear(x, weight).requires_grad
    value = sample(mcf.bf16x2, 4, 5)
    assert isinstance(F.linear(value, weight), mcf.MCFTensor)  # all terms of both


def test_second_derivatives():
    weight, x = parameter(mcf.bf16x2, 3, 5), torch.randn(4, 5).bfloat16().requires_grad_()
    plain = nn.Parameter(weight.components[0].detach().clone())
    found = []
    for w in (weight, plain):
        (first,) = torch.autograd.grad(F.linear(x, w).square().sum(), w, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [w, x]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("path", [{"foreach": True}, {"foreach": False}])  # torch's fused do not
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("size", [1, 64])
def test_a_step_between_the_passes_is_noticed(kind, path, size):
    weight = parameter(mcf.bf16x2, size, size)
    optimizer = kind([weight], lr=1e-3, **path)
    x = torch.randn(4, size).bfloat16().requires_grad_()
    for _ in range(30):  # until kernels are compiled
        weight.grad = torch.ones(size, size).bfloat16()
        y = F.linear(x, weight)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_other_changes_between_the_passes_are_noticed():
    x = torch.randn(4, 5).bfloat16().requires_grad_()
    for change in (
        lambda w: w.mul_(0.5),
        lambda w: w.copy_(torch.ones(3, 5)),
        lambda w: w.zero_(),
        lambda w: w[0].add_(1),
        lambda w: torch._foreach_mul_([w, w], 0.5),
        lambda w: torch._foreach_add_([w], [torch.ones(3, 5)]),
    ):
        weight = parameter(mcf.bf16x2, 3, 5)
        y = F.linear(x, weight)
        with torch.no_grad():
            change(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.usefixtures("no_grad")
def test_results_go_into_all_terms_of_an_expansion():
    x, weight, target = (
        torch.randn(4, 5).bfloat16(),
        parameter(mcf.bf16x2, 5, 3),
        parameter(mcf.bf16x2, 4, 3),
    )
    torch.mm(x, weight, out=target)
    torch.testing.assert_close(exact(target), x.double() @ exact(weight), rtol=2**-14, atol=2**-14)


@pytest.mark.usefixtures("no_grad")
def test_tangents_are_carried_on():
    weight, x = parameter(mcf.bf16x2, 3, 5), torch.randn(4, 5).bfloat16()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, torch.ones(3, 5).bfloat16())
        tangent = forward_ad.unpack_dual(F.linear(x, dual)).tangent
    assert torch.equal(tangent, F.linear(x, torch.ones(3, 5).bfloat16()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_grad", [True, False])
def test_traced_graphs_keep_their_parameters(with_grad):
    model = mcf.as_expansion(nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)))
    x = torch.randn(4, 5).bfloat16()
    with torch.set_grad_enabled(with_grad):
        traced = torch.jit.trace(model, x)
    traced(x).sum().backward()
    assert all(p.grad is not None for p in traced.parameters())


@pytest.mark.usefixtures("no_grad")
def test_autocast_casts_a_parameter_once(monkeypatch):
    weight, x = parameter(mcf.fp32x2, 3, 5), torch.randn(4, 5)
    weight.requires_grad_()
    casts = []
    handler = dispatch._handler
    monkeypatch.setattr(dispatch, "_handler", lambda func: casts.append(str(func)) or handler(func))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [F.linear(x, weight) for _ in range(3)]
    assert len([name for name in casts if "to_copy" in name]) == 1
    assert all(r.dtype == torch.bfloat16 for r in results)


@pytest.mark.filterwarnings("ignore")
def test_backward_passes_of_compiled_autograd():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = mcf.as_expansion(nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)))
        loss = model(torch.randn(4, 5).bfloat16()).square().sum()
        compiler = torch.compile(backend="eager")
        with compiled_autograd._enable(compiler) if compiled else nullcontext():
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
