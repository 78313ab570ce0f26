"""EDQ on every optimizer of torch: every parameter measured, not one bit changed."""

import math

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.metering import MATRICES, PLAIN, SHAPES, assert_metered, bits, gradients, make
from support.optimizers import CASES, OPTIMIZERS

pytestmark = [
    pytest.mark.usefixtures("one_by_one"),
    pytest.mark.filterwarnings("ignore::mcftensor.errors.NarrowStateWarning"),
]


def test_all_classes_of_torch_are_here():
    assert {case.values[0] for case in CASES} == set(OPTIMIZERS)


@pytest.mark.thinned(of=48)
@pytest.mark.parametrize("kind", [*PLAIN, mcf.bf16x2, mcf.bf16x3], ids=str)
@pytest.mark.parametrize(("cls", "flags"), CASES)
def test_torch_optimizers(cls, flags, kind):
    keywords = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    shapes = MATRICES if cls is torch.optim.Muon else SHAPES
    edq = assert_metered(lambda groups: cls(groups, lr=1e-2, **keywords, **flags), kind, shapes)
    if kind is torch.float32:
        assert edq.last["ratio"] == pytest.approx(1.0, abs=5e-5)


@pytest.mark.thinned(of=10)
@pytest.mark.parametrize("kind", [mcf.fp16x2, mcf.fp32x2, mcf.fp32x3, mcf.fp64x2], ids=str)
@pytest.mark.parametrize(
    ("cls", "flags"),
    [case for case in CASES if case.values[0] in (torch.optim.SGD, torch.optim.AdamW)],
)
def test_all_formats(cls, flags, kind):
    edq = assert_metered(lambda groups: cls(groups, lr=1e-3, **flags), kind, SHAPES)
    assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-3)


def test_mixed_kinds_in_one_optimizer():
    parameters = [make(kind, 8, scale=0.1) for kind in (*PLAIN, *mcf.formats.FORMATS)]
    optimizer = torch.optim.AdamW(parameters, lr=2e-5, foreach=False)
    edq = mcf.EDQ(optimizer)
    gradients(parameters, 0)
    optimizer.step()
    ratios = [reading["ratio"] for reading in edq.per_parameter.values()]
    assert ratios[0] < 0.5  # bf16
    assert ratios[2:] == pytest.approx([1.0] * 7, abs=0.05)


@pytest.mark.with_float64("without it, sparse elements of states round")
def test_sparse_gradients():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    edq = mcf.EDQ(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 3, 3])).square().sum().backward()
        optimizer.step()
    assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("mode", ["light", "plus", "full"])
@pytest.mark.parametrize("fused", [True, False])
def test_collage_modes(mode, fused):
    def build(groups):
        return mcf.collage(torch.optim.AdamW(groups, lr=1e-3, fused=fused, foreach=False), mode)

    edq = assert_metered(build, mcf.bf16x2, SHAPES)
    assert edq.last["ratio"] == pytest.approx(1.0, abs=0.02)


def test_steps_of_a_gradient_scaler():
    def run(metered, factor):
        p = make(torch.float16, 16, seed=3)
        optimizer = torch.optim.AdamW([p], lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        edq = mcf.EDQ(optimizer) if metered else None
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(
                (p * torch.linspace(1, 2, 16) * (factor if step == 1 else 1)).sum()
            ).backward()
            scaler.step(optimizer)
            scaler.update()
        return bits([p, list(optimizer.state.values()), vars(scaler)["_scale"]]), edq

    for factor in (1.0, 1e6):
        found, edq = run(True, factor)
        assert found == run(False, factor)[0]
        assert edq.not_metered == {}
        assert [reading["step"] for reading in edq.history] == [1, 2, 3]
    assert [reading["ratio"] is None for reading in edq.history] == [False, True, False]


def test_steps_that_a_gradient_scaler_skips_are_no_steps():
    p = make(torch.float32, 4)
    optimizer = torch.optim.SGD([p], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    edq = mcf.EDQ(optimizer)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [reading["step"] for reading in edq.history] == [1, 2]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_brings_the_gradient(by_name):
    target = torch.randn(8)

    def run(metered):
        p = make(torch.bfloat16, 8)
        optimizer = torch.optim.AdamW([p], lr=1e-4)
        edq = mcf.EDQ(optimizer) if metered else None
        calls = []

        def closure():
            calls.append(None)
            optimizer.zero_grad()
            loss = (p - target).square().sum()
            loss.backward()
            return loss

        losses = [
            (optimizer.step(closure=closure) if by_name else optimizer.step(closure)).item()
            for _ in range(3)
        ]
        assert len(calls) == 3
        return bits([p, list(optimizer.state.values()), losses]), edq

    found, edq = run(True)
    assert found == run(False)[0]
    assert [reading["step"] for reading in edq.history] == [1, 2, 3]
    assert edq.last["ratio"] == 0  # the smallest steps of these weights are larger
    assert edq.last["update_norm"] == pytest.approx(1e-4 * math.sqrt(8), rel=0.02)


def test_lbfgs_is_reported_as_not_metered():
    p = make(torch.float32, 8)
    optimizer = torch.optim.LBFGS([p], max_iter=4)
    edq = mcf.EDQ(optimizer, names=[("w", p)])

    def closure():
        optimizer.zero_grad()
        loss = (p - torch.arange(8)).square().sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="LBFGS cannot be measured for w: its step asks for the"):
        optimizer.step(closure)
    assert edq.not_metered == {"w": "its step asks for the loss at more than one point"}
    assert edq.last is None


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, mcf.bf16x2, mcf.fp32x3], ids=str)
def test_limits_of_the_dtype_are_the_real_ones(kind):
    # Adafactor's default eps is that of the parameter's dtype, and large beside these gradients.
    p = make(kind, 32, 32, scale=0.02)
    optimizer = torch.optim.Adafactor([p], lr=0.5)
    edq = mcf.EDQ(optimizer)
    p.grad = (1e-3 * torch.randn(32, 32)).to(p.dtype)
    optimizer.step()
    assert edq.last["ratio"] == pytest.approx(1.0, abs=0.1)
    assert torch.finfo(torch.float64).eps == 2**-52
