"""EDQ, memory and audits of scaled parameters, beside what they say of plain ones."""

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.scales import FP16, exact, normal

TAILED = mcf.scaling.scaled(torch.float16, tail=8)
PATHS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def leading_of(x):
    return exact(mcf.MCFTensor([x.components[0], x.exponent], x.format.lead))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "format", [FP16, TAILED, mcf.scaling.scaled(mcf.fp16x2)], ids=lambda f: f.name
)
def test_updates(format, path):
    """Against what the parameters really moved by, and float64 optimizers on the same gradients."""
    p = nn.Parameter(mcf.as_expansion(exact(normal(40, 30)) / 3, format))
    q = nn.Parameter(exact(p))
    optimizers = [torch.optim.AdamW([x], lr=2e-4, **PATHS[path]) for x in (p, q)]
    meter = mcf.EDQ(optimizers[0])
    p.grad = normal(40, 30, exponent=-30, seed=1)
    q.grad = exact(p.grad)
    before, leading = exact(p), leading_of(p)
    for optimizer in optimizers:
        optimizer.step()
    moved, intended = exact(p) - before, q.detach() - before
    of_leading = leading_of(p) - leading
    assert not meter.not_metered
    found = meter.last
    along = (intended * moved).sum() / intended.square().sum()
    assert found["ratio"] == pytest.approx(along.item(), abs=1e-3)
    assert found["lost"] == pytest.approx((moved == 0).double().mean().item(), abs=1e-3)
    assert found["lost_leading"] == pytest.approx(
        (of_leading == 0).double().mean().item(), abs=1e-3
    )
    assert found["update_norm"] == pytest.approx(intended.norm().item(), rel=1e-3)
    assert (found["lost"] > 0.1) == (format is FP16)
    assert {"exp_avg", "exp_avg_sq"} <= set(meter.states[0])
    assert meter.states[0]["exp_avg_sq"]["zero"] == 0


def test_a_meter_changes_no_bit():
    results = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = mcf.scaling.scalify(nn.Linear(7, 5))  # rounded stochastically
        optimizer = torch.optim.AdamW(model.parameters())
        meter = every and mcf.EDQ(optimizer, every)
        for i in range(3):
            optimizer.zero_grad()
            model(exact(normal(4, 7, seed=i)).float()).square().mean().backward()
            optimizer.step()
        results.append([exact(p) for p in model.parameters()])
        assert meter is None or meter.last["ratio"] == pytest.approx(1, abs=0.1)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("format", [FP16, TAILED], ids=lambda f: f.name)
def test_memory(format):
    model = mcf.scaling.scalify(nn.Linear(7, 5), format)
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = mcf.meters.summary(model, optimizer)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    measured = mcf.meters.summary(model, optimizer)
    of_parameters = sum(sum(x.nbytes for x in p.components) for p in model.parameters())
    assert measured.bytes_of("parameters") == of_parameters == 40 * format.bytes + 2 * 4
    assert measured.bytes_of("gradients") == 40 * 2 + 2 * 4
    assert measured.by_format("parameters") == {format.name: of_parameters}
    assert measured.by_format("states") == predicted.by_format("states")
    assert measured.total == predicted.total


def test_audits():
    model = mcf.scaling.scalify(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5)), FP16)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.mul_(1.5)
        model[1].weight[0].mul_(2.0**-3)
    found = {x.name: x for x in mcf.meters.audit(before, model.state_dict()).tensors}
    assert found["0.bias"].verdict == "frozen"
    assert found["0.weight"].verdict == "moving"
    assert found["1.weight"].unchanged == pytest.approx(0.8)
    with pytest.raises(
        mcf.errors.CheckpointError, match=r"scaled\(float16\) in before and scaled\(fp16"
    ):
        mcf.meters.audit(before, mcf.scaling.scalify(model, TAILED).state_dict())
