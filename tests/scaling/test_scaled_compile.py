"""Scaled models under torch.compile: one graph, of which exponents are data."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from support.scales import FP16, exact, is_scaled


def build():
    return mcf.scaling.scalify(
        nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)), FP16
    )


def gradients(loss, model, x, y):
    model.zero_grad()
    value = loss(x, y)
    value.backward()
    return value.item(), [p.grad for p in model.parameters()]


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_and_backward_pass(backend):
    torch._dynamo.reset()
    model, x, y = build(), torch.randn(12, 6), torch.arange(12) % 5

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    value, expected = gradients(loss, model, x, y)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(loss, backend=count, fullgraph=True)
    again, found = gradients(compiled, model, x, y)
    assert again == pytest.approx(value, rel=2**-9)
    for a, b in zip(expected, found, strict=True):
        assert is_scaled(b)
        if backend == "aot_eager":
            assert torch.equal(a.components[0], b.components[0])
            assert torch.equal(a.exponent, b.exponent)
        # a compiler keeps float32 between operations that it fuses
        assert (exact(a) - exact(b)).norm() <= 2.0**-8 * exact(a).norm()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0**3)
    value, _ = gradients(loss, model, x, y)
    assert gradients(compiled, model, x, y)[0] == pytest.approx(value, rel=2**-8)
    assert len(graphs) == 1


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=False),
}


@pytest.mark.slow
@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer(name):
    torch._dynamo.reset()
    model, x, y = build(), torch.randn(12, 6), torch.arange(12) % 5
    other = build()
    other.load_state_dict(model.state_dict())
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, other)]
    compiled = torch.compile(optimizers[1].step, backend="aot_eager")
    for _ in range(3):
        for m in (model, other):
            gradients(lambda x, y, m=m: F.cross_entropy(m(x), y), m, x, y)
        optimizers[0].step()
        compiled()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(exact(p), exact(q))


def test_a_patched_function():
    def function(x):
        return torch.special.ndtr(x)

    x = mcf.as_expansion(torch.tensor([-5.0, -1.0, 2.0]), FP16)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(exact(compiled(x)), exact(function(x)))
    plain = exact(x)
    assert torch.equal(compiled(plain), function(plain))
