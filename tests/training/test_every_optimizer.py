"""Every optimizer of torch, in every path, over expansions, against itself in float64."""

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import exact
from support.optimizers import CASES

STEPS = 30

# Adafactor's default eps is that of the dtype of its parameters.
OPTIONS = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.Adafactor: {"eps": (1e-30, 1e-3)}}

# Orthogonalizes in bfloat16 whatever it is given, and then moves by that.
IN_BFLOAT16 = (torch.optim.Muon,)


def displacement(cls, flags, kind, gradients="expansions"):
    """What parameters move by in some steps, in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 3)] if cls is torch.optim.Muon else [(6, 4), (5,)]
    expansion = isinstance(kind, mcf.Format)

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().double()

    def enter(x):
        return mcf.as_expansion(x, kind) if expansion else x.to(kind)

    parameters = [nn.Parameter(enter(draw(shape) / 2)) for shape in shapes]
    start = [exact(p.detach()).clone() for p in parameters]
    optimizer = cls(parameters, lr=1e-3, **OPTIONS.get(cls, {}), **flags)
    for _ in range(STEPS):
        for p in parameters:
            g = draw(p.shape)
            p.grad = enter(g) if gradients == "expansions" else g.to(p.dtype)
        optimizer.step()
    moved = [exact(p.detach()) - s for p, s in zip(parameters, start, strict=True)]
    return torch.cat([x.flatten() for x in moved])


def error(cls, flags, kind, **options):
    reference = displacement(cls, flags, torch.float64)
    return float((displacement(cls, flags, kind, **options) - reference).norm() / reference.norm())


@pytest.mark.thinned(of=30)
@pytest.mark.parametrize("gradients", ["plain", "expansions"])
@pytest.mark.parametrize("kind", [mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
@pytest.mark.parametrize(("cls", "flags"), CASES)
def test_more_exact_than_float32(cls, flags, kind, gradients):
    found = error(cls, flags, kind, gradients=gradients)
    if cls in IN_BFLOAT16:
        assert found < 1e-2
        return
    of_float32 = error(cls, flags, torch.float32)
    assert 1e-7 < of_float32 < 1e-2
    assert found <= of_float32


def test_lbfgs():
    def run(kind):
        torch.manual_seed(0)
        target = torch.randn(8, dtype=torch.float64)
        start = torch.zeros(8, dtype=torch.float64)
        expansion = isinstance(kind, mcf.Format)
        p = nn.Parameter(mcf.as_expansion(start, kind) if expansion else start.to(kind))
        optimizer = torch.optim.LBFGS([p], lr=0.5, max_iter=3)

        def closure():
            value = exact(p.detach())
            gradient = 2 * (value - target) * torch.arange(1, 9)
            p.grad = mcf.as_expansion(gradient, kind) if expansion else gradient.to(kind)
            return ((value - target).square() * torch.arange(1, 9)).sum()

        for _ in range(6):
            optimizer.step(closure)
        return exact(p.detach()).clone()

    wide = run(torch.float64)
    errors = [float((run(kind) - wide).norm()) for kind in (torch.bfloat16, mcf.bf16x3)]
    assert errors[1] < errors[0] / 100


def test_fused_steps_take_gradients_as_expansions_with_all_their_terms():
    for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        p = nn.Parameter(mcf.as_expansion(torch.ones(4), mcf.bf16x3))
        fine = torch.full((4,), 1 + 2**-20, dtype=torch.float64)
        optimizer = cls([p], lr=0.125, fused=True)
        p.grad = mcf.as_expansion(fine, mcf.bf16x3)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        optimizer.step()
        assert exact(p.grad).eq(fine / 2).all()
        if cls is torch.optim.SGD:
            assert exact(p.detach()).eq(1 - 0.125 * fine / 2).all()
