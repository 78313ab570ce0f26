"""`collage(optimizer, "compact4")`: states of four bits, and what training makes of them."""

import copy

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import exact
from support.optimizers import PATHS

FIRST, SECOND, WIDE = mcf.q4, mcf.ue4, mcf.bf16i16
FOUR = {"exp_avg": FIRST, "exp_avg_sq": SECOND}


def gradients(shape, steps, spread):
    """Normal, of other sizes for each weight, with a drift."""
    generator = torch.Generator().manual_seed(1)
    sizes, drift = (torch.randn(shape, generator=generator) for _ in range(2))
    for _ in range(steps):
        noise = torch.randn(shape, generator=generator)
        yield ((noise + 0.3 * drift) * 1e-4 * (spread * sizes).exp()).bfloat16()


def trained(make, mode, steps=60, shape=(32, 64), held=mcf.bf16i16, spread=1.0):
    """The optimizer, and by how much its weights moved; in float64 without a mode."""
    start = torch.zeros(shape)
    p = nn.Parameter(start.double() if mode is None else mcf.as_expansion(start, held))
    optimizer = make([p]) if mode is None else mcf.collage(make([p]), mode)
    for gradient in gradients(shape, steps, spread):
        p.grad = gradient.to(p.dtype)
        optimizer.step()
    return optimizer, exact(p)


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradient and momentum (X. Chen et al., 2023, arXiv:2302.06675)."""

    def __init__(self, params, lr=1e-4):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("exp_avg", torch.zeros_like(p))
                update = momentum.mul(0.9).add(p.grad, alpha=0.1).sign()
                p.add_(update, alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


def adamw(**options):
    return lambda ps: torch.optim.AdamW(ps, lr=1e-4, betas=(0.9, 0.999), **options)


@pytest.mark.parametrize(("spread", "most"), [(1.0, 0.4), (0.0, 0.15)])
@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("path", PATHS)
def test_moments_are_right_in_the_mean(path, spread, most):
    """Most exact in blocks of like sizes. Of numbers rounded to nearest, second moments stop, and
    updates are too large."""
    of = {"spread": spread, "steps": 160}
    _, wanted = trained(adamw(foreach=False), None, **of)
    reference, _ = trained(adamw(foreach=False), "full", **of)
    errors = {}
    modes = {"compact4": "compact4", "nearest": {name: f.nearest for name, f in FOUR.items()}}
    for name, mode in modes.items():
        optimizer, moved = trained(adamw(**PATHS[path]), mode, **of)
        errors[name] = (moved - wanted).norm() / wanted.norm()
        (own,), (theirs,) = optimizer.state.values(), reference.state.values()
        ratio = (exact(own["exp_avg_sq"]) / exact(theirs["exp_avg_sq"])).median()
        if name == "compact4":
            assert 0.9 < ratio < 1.12
    assert 0.1 < errors["compact4"] < most
    assert errors["nearest"] > 1.25 * errors["compact4"]


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=1, momentum=0.9), {"momentum_buffer": FIRST}),
        (lambda ps: torch.optim.Muon(ps, lr=1e-3), {"momentum_buffer": FIRST}),
        (Lion, {"exp_avg": FIRST}),
        (lambda ps: torch.optim.NAdam(ps, lr=1e-4), FOUR),
        (lambda ps: torch.optim.Adamax(ps, lr=1e-4), {"exp_avg": FIRST, "exp_inf": SECOND}),
        (lambda ps: torch.optim.RMSprop(ps, lr=1e-4), {"square_avg": SECOND}),
        (
            lambda ps: torch.optim.Adam(ps, lr=1e-4, amsgrad=True),
            FOUR | {"max_exp_avg_sq": SECOND.nearest},
        ),
        (lambda ps: torch.optim.Adagrad(ps, lr=1e-4), {"sum": WIDE}),
    ],
    ids=["SGD", "Muon", "Lion", "NAdam", "Adamax", "RMSprop", "AMSGrad", "Adagrad"],
)
@pytest.mark.parametrize(("spread", "most"), [(0.3, 0.3), (1, 0.55)], ids=["alike", "unlike"])
def test_stock_optimizers(make, states, spread, most):
    """Muon orthogonalizes decoded numbers."""
    optimizer, moved = trained(make, "compact4", spread=spread)
    (state,) = optimizer.state.values()
    assert {name: state[name].format for name in states} == states
    _, wanted = trained(make, None, spread=spread)
    assert (moved - wanted).norm() < most * wanted.norm()


def test_shapes():
    """Vectors stay float32, and an odd second dimension has no halves."""
    shapes = {
        (8, 6): (FIRST, SECOND),
        (3, 4, 3, 3): (FIRST, SECOND),
        (8, 5): (mcf.mxfp8, mcf.ue5m3),
        (4, 3, 2): (mcf.mxfp8, mcf.ue5m3),
        (7,): (WIDE, WIDE),
        (1, 6): (WIDE, WIDE),
        (): (WIDE, WIDE),
    }
    for mode in ("compact4", FOUR):
        ps = [nn.Parameter(mcf.as_expansion(torch.zeros(s), mcf.bf16i8)) for s in shapes]
        optimizer = mcf.collage(torch.optim.AdamW(ps), mode)
        for p in ps:
            p.grad = torch.ones(p.shape).bfloat16()
        optimizer.step()
        found = {
            tuple(p.shape): tuple(optimizer.state[p][name].format for name in FOUR) for p in ps
        }
        assert found == shapes
    with pytest.raises(ValueError, match=r"negative numbers.*mcf\.mxfp8"):
        mcf.collage(optimizer, {"exp_avg": SECOND})


@pytest.mark.parametrize(("released", "wanted"), [(False, 6.125), (True, 4.125)])
def test_bytes_a_parameter(released, wanted):
    """By storages: 3 of the weight, 2 of the gradient, 18 for 32 of each moment."""
    model = mcf.as_expansion(nn.Linear(256, 128, bias=False), mcf.bf16i8)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-3), "compact4")
    if released:
        mcf.step_in_backward(model, optimizer)
    model(torch.randn(4, 256).bfloat16()).square().mean().backward()
    optimizer.step()
    p = model.weight
    held = [p.detach(), *(optimizer.state[p][name] for name in FOUR)]
    storages = [y.untyped_storage() for x in held for y in x.components]
    storages += [] if p.grad is None else [p.grad.untyped_storage()]
    assert sum(x.nbytes() for x in storages) == wanted * p.numel()
    assert mcf.meters.summary(model, optimizer).bytes_per_parameter == pytest.approx(
        wanted, rel=1e-3
    )


def test_a_change_of_the_mode_and_back():
    optimizer, _ = trained(adamw(), "compact", steps=20)
    (before,) = copy.deepcopy(optimizer).state.values()
    mcf.collage(optimizer, "compact4")
    (state,) = optimizer.state.values()
    assert {name: state[name].format for name in FOUR} == FOUR
    for name in FOUR:
        old, new = exact(before[name]), exact(state[name])
        assert ((new - old).abs() <= old.abs().amax(1, keepdim=True)).all()
    mcf.collage(optimizer, "full")
    (wide,) = optimizer.state.values()
    assert wide["exp_avg"].format is mcf.bf16i16
