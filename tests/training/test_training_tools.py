"""What stands between a training loop and its optimizer: schedulers, clipping, gradient scaling."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mcftensor as mcf
from common.trial import Subject, Way, by_gradient, displacement, error
from support.helpers import assert_same_terms, exact

SCHEDULERS = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-3, cycle_momentum=True),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=40),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
}


def scheduled(make_scheduler, lr=1e-3, **keywords):
    """AdamW whose every step is followed by one of a scheduler."""

    def make(weights):
        optimizer = torch.optim.AdamW(list(weights.tensors), lr=lr, **keywords)
        optimizer.schedule = make_scheduler(optimizer)
        return optimizer

    def drive(optimizer, weights, step):
        by_gradient(optimizer, weights, optimizer.step)
        optimizer.schedule.step()

    return Subject(make, drive=drive, steps=10)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name):
    subject = scheduled(SCHEDULERS[name])
    exact_one = displacement(subject, Way(torch.float64))
    of_float32 = error(displacement(subject, Way(torch.float32)), exact_one)
    assert error(displacement(subject, Way(mcf.bf16x3)), exact_one) <= of_float32


def test_a_scheduler_of_a_learning_rate_in_a_tensor():
    subject = scheduled(SCHEDULERS["OneCycleLR"], lr=torch.tensor(1e-3), fused=True)
    exact_one = displacement(subject, Way(torch.float64))
    assert error(displacement(subject, Way(mcf.bf16x3)), exact_one) < 1e-5


def test_reduction_on_a_plateau():
    p = nn.Parameter(mcf.as_expansion(torch.ones(3), mcf.bf16x2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, p.detach().sum() / 3, 1.0):  # an expansion compares as a number does
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


class TestClipping:
    def gradients(self, way):
        p = nn.Parameter(mcf.as_expansion(torch.zeros(64), mcf.bf16x3))
        g = torch.randn(64, dtype=torch.float64).bfloat16()
        p.grad = mcf.as_expansion(g, mcf.bf16x3) if way == "expansions" else g.clone()
        return p, g.double()

    @pytest.mark.parametrize(("way", "allowed"), [("plain", 2**-7), ("expansions", 2**-22)])
    @pytest.mark.parametrize("foreach", [False, True])
    def test_by_norm(self, way, allowed, foreach):
        p, g = self.gradients(way)
        norm = nn.utils.clip_grad_norm_([p], 1.0, foreach=foreach)
        expected = g / (g.norm() + 1e-6)
        assert float(abs(exact(norm) - g.norm()) / g.norm()) <= allowed
        assert float((exact(p.grad) - expected).norm()) <= allowed

    @pytest.mark.parametrize("way", ["plain", "expansions"])
    @pytest.mark.parametrize("foreach", [False, True])
    def test_by_value(self, way, foreach):
        p, g = self.gradients(way)
        nn.utils.clip_grad_value_([p], 0.5, foreach=foreach)
        assert exact(p.grad).equal(g.clamp(-0.5, 0.5))


class TestScaling:
    @pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}])
    @pytest.mark.parametrize("unscaled_first", [False, True])
    def test_a_step_with_infinities_is_none(self, flags, unscaled_first):
        """And one without is that of the unscaled gradients."""
        start = mcf.as_expansion(torch.randn(8, dtype=torch.float64), mcf.bf16x2)
        p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        optimizer, reference = (torch.optim.AdamW([x], lr=1e-2, **flags) for x in (p, q))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for bad in (False, True, False):
            optimizer.zero_grad()
            x = torch.randn(8).bfloat16()
            q.grad = x.clone()
            x[0] = torch.inf if bad else x[0]
            scale = scaler.get_scale()
            before = p.detach().clone()
            scaler.scale((p * x).sum()).backward()
            if unscaled_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if bad:
                assert_same_terms(p.detach(), before)
                assert scaler.get_scale() == scale / 2
            else:
                reference.step()
                assert_same_terms(p.detach(), q.detach())
