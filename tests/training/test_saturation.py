"""One gradient that is too large: what it does to the weights beside it, and who says so."""

import math
import warnings

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.training import step_warnings
from support.helpers import exact
from support.kernel_cases import same
from support.optimizers import PATHS

HELD = [mcf.bf16i8, mcf.e4m3i8, mcf.e4m3i16, mcf.fp32x2]
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
}
FUSED = {"AdamW", "Adam-amsgrad", "SGD", "Adagrad"}
CASES = [(n, p) for n in OPTIMIZERS for p in PATHS if p != "fused" or n in FUSED]
PLACE = (1, 3)

slow = [pytest.mark.slow]


def trained(name, path, size, held, steps=5):
    """A parameter and its optimizer after steps of which the third has one large gradient."""
    make, settings = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(0)
    start = 0.1 * torch.randn(4, 64, generator=generator)
    p = nn.Parameter(start if held is None else mcf.as_expansion(start, held))
    optimizer = make([p], lr=1e-3, **settings, **PATHS[path])
    if held is not None:
        mcf.collage(optimizer, "compact")
    for step in range(steps):
        gradient = torch.randn(4, 64, generator=generator)
        if step == 2:
            gradient[PLACE] = size
        p.grad = gradient.to(p.dtype)
        optimizer.step()
    return p, optimizer


@pytest.mark.thinned(of=24)
@pytest.mark.parametrize("size", [2e19, 1e25, 3e38, math.inf, math.nan], ids=str)
@pytest.mark.parametrize(("name", "path"), CASES)
@pytest.mark.parametrize(
    "held",
    [pytest.param(f, id=f.name, marks=[pytest.mark.slow] * (i > 1)) for i, f in enumerate(HELD)],
)
def test_no_weight_is_lost_that_float32_keeps(held, name, path, size):
    lost = ~exact(trained(name, path, size, held)[0]).isfinite()
    if not math.isfinite(size):
        assert lost[PLACE]
        lost[PLACE] = False
    assert not lost.any()
    reference = trained(name, path, size, None)[0].detach()
    assert reference.isfinite().sum() >= reference.numel() - 1


@pytest.mark.thinned(of=5)
@pytest.mark.parametrize("size", [2e19, math.inf, math.nan], ids=str)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("name", ["cpp", "triton"])
@pytest.mark.parametrize("held", [mcf.bf16i8, mcf.e4m3i8], ids=lambda f: f.name)
def test_kernels_have_the_bits_of_eager_steps(held, name, size):
    if name == "triton":
        pytest.importorskip("triton")

    def step():
        p, optimizer = trained("Adam-amsgrad", "fused", size, held)
        return [p.detach(), *(x for x in optimizer.state[p].values() if x.dim())]

    same(name, step)


@pytest.mark.parametrize("path", PATHS)
def test_saving_warns_once(path):
    _, optimizer = trained("AdamW", path, 1e30, mcf.bf16i8)
    where = r"AdamW: .*exp_avg_sq of 0\.0 of shape \(4, 64\) in ue5m3: 1 block\. .*Clip gradients"
    with pytest.warns(mcf.errors.SaturationWarning, match=where) as caught:
        optimizer.state_dict()
    assert [x.filename for x in caught] == [__file__]
    optimizer.state_dict()


def test_saving_says_nothing_of_what_is_right():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained("AdamW", "fused", 1e9, mcf.e4m3i8)[1].state_dict()


def test_saving_warns_of_weights():
    p, optimizer = trained("SGD", "fused", 1.0, mcf.e4m3i8)
    with torch.no_grad():
        numbers = mcf.as_plain(p)
        numbers[2, 40] = math.inf
        p.copy_(numbers)
    with pytest.warns(
        mcf.errors.SaturationWarning, match=r"0\.0 of shape \(4, 64\) in e4m3i8: 1 block"
    ):
        optimizer.state_dict()


def test_a_meter_counts_blocks_and_warns():
    p, optimizer = trained("AdamW", "fused", 1.0, mcf.bf16i8)
    edq = mcf.EDQ(optimizer, names=[("weight", p)])
    p.grad = torch.ones_like(p.grad)
    optimizer.step()
    assert edq.states[-1]["exp_avg_sq"]["saturated"] == 0
    p.grad[PLACE] = p.grad[3, 60] = 1e30
    with pytest.warns(mcf.errors.SaturationWarning, match=r"exp_avg_sq of weight .*: 2 blocks"):
        optimizer.step()
    assert edq.states[-1]["exp_avg_sq"]["saturated"] == 2
    assert edq.states[-1]["exp_avg"]["saturated"] == 0
    p.grad = torch.ones_like(p.grad)
    optimizer.step()
    assert edq.per_state["weight"]["exp_avg_sq"]["saturated"] == 2


def test_a_meter_warns_of_neighbours_that_are_raised():
    """A gradient of 1e9 is not too large for the format, but for its block."""
    p, optimizer = trained("AdamW", "fused", 1.0, mcf.bf16i8)
    edq = mcf.EDQ(optimizer, names=[("weight", p)])
    p.grad = torch.ones_like(p.grad)
    p.grad[2] = 0.01  # rows of different sizes share no scale
    optimizer.step()
    assert edq.states[-1]["exp_avg_sq"]["raised"] == 0
    p.grad[PLACE] = 1e9
    match = (
        r"raised to the smallest .*: exp_avg_sq of weight of shape \(4, 64\) in ue5m3: 1 block\."
    )
    with pytest.warns(mcf.errors.SaturationWarning, match=match) as caught:
        optimizer.step()
    assert [x.filename for x in caught] == [__file__]
    reading = edq.per_state["weight"]
    assert (reading["exp_avg_sq"]["raised"], reading["exp_avg_sq"]["saturated"]) == (1, 0)
    assert reading["exp_avg"]["raised"] == 0, "small first moments become zero"
    optimizer.step()


def test_raised_elements_have_a_scale_apart():
    """Second moments of a block that lie 2^20 apart are stored as they are."""
    v = torch.full((2, 64), 2.0**-20)
    v[:, 0] = 1.0
    assert step_warnings.raised_blocks(mcf.as_expansion(v, mcf.ue5m3)) == 0
    v[1, 0] = 2.0**40
    assert step_warnings.raised_blocks(mcf.as_expansion(v, mcf.ue5m3)) == 1
    v[1, 1:16] = 2.0**40
    assert step_warnings.raised_blocks(mcf.as_expansion(v, mcf.ue5m3)) == 0, "half of them"
    assert step_warnings.raised_blocks(mcf.as_expansion(v, mcf.mxfp8)) is None
    assert step_warnings.raised_blocks(v) is None


def taken(p, optimizer, sizes):
    """Take a step with each of these gradients at one place, and ones elsewhere."""
    for size in sizes:
        p.grad = torch.ones_like(mcf.as_plain(p))
        p.grad[PLACE] = size
        optimizer.step()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e30, math.inf, math.nan])
def test_steps_without_a_meter_warn_soon(path, size):
    """Of 32 second moments, 31 are raised by the one that is infinite, and their weights stand."""
    p = nn.Parameter(mcf.as_expansion(torch.ones(4, 64), mcf.bf16i8))
    optimizer = mcf.collage(torch.optim.AdamW([p], lr=1e-3, **PATHS[path]), "compact")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken(p, optimizer, [1.0] * 40)
    match = r"exp_avg_sq of 0\.0 .* 1 block"
    with pytest.warns(mcf.errors.SaturationWarning, match=match) as caught:
        taken(p, optimizer, [size] + [1.0] * 39)
    assert len(caught) == 1


def test_large_gradients_that_the_formats_hold_are_not_told():
    p = nn.Parameter(mcf.as_expansion(torch.ones(4, 64), mcf.bf16i8))
    optimizer = mcf.collage(torch.optim.AdamW([p], lr=1e-3), "compact")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (1e-12, 1.0, 1e6, 1e15):
            for _ in range(20):
                p.grad = torch.full((4, 64), size, dtype=torch.bfloat16)
                optimizer.step()


def test_steps_without_a_meter_warn_of_raised_neighbours():
    """A gradient of 1e15 is not too large for the format, but for its block."""
    p = nn.Parameter(mcf.as_expansion(torch.ones(16, 64), mcf.bf16i8))
    optimizer = mcf.collage(torch.optim.AdamW([p], lr=1e-3, fused=True), "compact")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken(p, optimizer, [1.0] * 300)
    match = r"raised to the smallest .*: exp_avg_sq of 0\.0 .* 1 block"
    with pytest.warns(mcf.errors.SaturationWarning, match=match) as caught:
        taken(p, optimizer, [1e15] + [1.0] * 300)
    assert len(caught) == 1
