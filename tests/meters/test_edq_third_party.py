"""EDQ on optimizers of other packages."""

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.metering import MATRICES, SHAPES, assert_metered, gradients, make, train

prodigyopt = pytest.importorskip("prodigyopt")
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")

pytestmark = [
    pytest.mark.usefixtures("one_by_one"),
    pytest.mark.filterwarnings("ignore::mcftensor.errors.NarrowStateWarning"),
]


PACKAGE = [
    "AdaBelief", "AdaBound", "Adan", "ADOPT", "AdamP",
    pytest.param("CAME", marks=pytest.mark.with_float64("without it, its own factors round")),
    "DiffGrad", "Grams", "Lion", "MADGRAD", "RAdam", "StableAdamW", "Tiger",
    *[
        pytest.param(name, marks=pytest.mark.with_float64("without it, its own states round"))
        for name in ("NovoGrad", "SOAP", "Shampoo")
    ],
]  # fmt: skip


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, mcf.bf16x2], ids=str)
@pytest.mark.parametrize("name", PACKAGE)
def test_classes_of_pytorch_optimizer(name, kind):
    cls = getattr(pytorch_optimizer, name)
    if kind is torch.bfloat16 and name in ("SOAP", "Shampoo"):
        pytest.skip("torch has no decomposition of bf16 matrices on the CPU")
    assert_metered(lambda groups: cls(groups, lr=1e-3), kind, MATRICES)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, mcf.bf16x2], ids=str)
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedulefree(name, kind):
    cls = getattr(schedulefree, name)
    edq = assert_metered(lambda groups: cls(groups, lr=1e-2), kind, SHAPES, steps=8)
    if kind is torch.float32 and edq.last["ratio"] is not None:
        assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_prodigy_is_measured_as_a_whole(kind):
    def build(groups):
        return prodigyopt.Prodigy(groups, lr=1.0, d0=1e-3)

    edq = assert_metered(build, kind, SHAPES, steps=4, steady=True, coupled=True)
    if kind is torch.float32:
        assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-4)


def test_prodigy_gives_itself_away():
    def build(groups):
        return prodigyopt.Prodigy(groups, lr=1.0, d0=1e-3)

    options = {"steps": 4, "steady": True}
    without, _ = train(build, torch.float32, SHAPES, metered=False, **options)
    _, whole = train(build, torch.float32, SHAPES, metered=True, coupled=True, **options)
    with pytest.warns(UserWarning, match="Prodigy does not treat parameters one by one"):
        found, edq = train(build, torch.float32, SHAPES, metered=True, **options)
    assert found == without
    (discarded,) = {reading["step"] for reading in whole.history} - {
        reading["step"] for reading in edq.history
    }
    kept = [reading for reading in whole.history if reading["step"] != discarded]
    for found, reading in zip(edq.history, kept, strict=True):
        assert found == pytest.approx(reading, rel=1e-6)


def test_a_discarded_sample_is_made_up_for():
    parameters = [make(torch.float32, 8, seed=i) for i in range(2)]
    optimizer = prodigyopt.Prodigy(parameters, d0=1e-3)
    edq = mcf.EDQ(optimizer, every=3)

    def step():
        gradients(parameters, 0)
        optimizer.step()

    step()  # with the step size that it was given; from the third step on it adapts it
    step()
    step()
    with pytest.warns(UserWarning, match="one by one"):
        step()
    for _ in range(3):
        step()
    assert [reading["step"] for reading in edq.history] == [1, 5, 7]


def test_an_optimizer_that_needs_its_closure():
    p = make(torch.float32, 4)
    optimizer = pytorch_optimizer.AliG([p], max_lr=0.1)
    edq = mcf.EDQ(optimizer)

    loss = p.square().sum()
    loss.backward()
    optimizer.step(lambda: float(loss))
    assert edq.last["ratio"] == pytest.approx(1.0, abs=1e-4)


def test_frozen_weights_do_not_hide_coupling():
    p, q = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = pytorch_optimizer.Adan([p, q], lr=1e-3, max_grad_norm=1.0)
    edq = mcf.EDQ(optimizer)
    p.grad, q.grad = torch.full_like(p, 30), torch.full_like(q, 40)
    with pytest.warns(UserWarning, match="one by one"):
        optimizer.step()
    p.grad, q.grad = torch.full_like(p, 0.3), torch.full_like(q, 0.4)
    optimizer.step()
    assert (p == 1).all()
    assert edq.last["lost"] == 1
    assert edq.last["step"] == 2
