"""Optimizers that keep narrow states beside expansions are told of, once and by name."""

import warnings

import pytest
import torch
from torch import nn

import mcftensor as mcf


class Preconditioned(torch.optim.Optimizer):
    """Keeps a matrix of another shape than its parameter, in the dtype it is told."""

    def __init__(self, parameters, dtype=None):
        super().__init__(parameters, {"lr": 0.1, "dtype": dtype})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    size = len(p) + 1
                    dtype = group["dtype"] or p.dtype
                    state["step"] = 0
                    state["preconditioners"] = [torch.zeros(size, size, dtype=dtype)]
                    state["exp_avg"] = torch.zeros_like(p)


def steps(optimizer, count=3):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones(p.shape, dtype=p.dtype)
    for _ in range(count):
        optimizer.step()


def model(format=mcf.bf16x3):
    return mcf.as_expansion(nn.Linear(4, 3), format)


@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2], ids=lambda f: f.name)
def test_it_is_said_once(format):
    optimizer = Preconditioned(model(format).parameters())
    with pytest.warns(
        mcf.errors.NarrowStateWarning, match=r"Preconditioned keeps .*preconditioners \(b?float16\)"
    ):
        steps(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Preconditioned(model().parameters(), torch.float32),
        lambda: Preconditioned(model(mcf.fp32x2).parameters()),
        lambda: Preconditioned(nn.Linear(4, 3).bfloat16().parameters()),
        lambda: torch.optim.NAdam(model().parameters()),
        lambda: torch.optim.Adafactor(model().parameters()),
        lambda: mcf.collage(torch.optim.AdamW(model().parameters()), "light"),
    ],
)
def test_what_is_wide_enough_or_meant_is_not_told(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(make())


def test_second_moments_of_a_plain_run():
    plain = nn.Linear(4, 3).bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), foreach=False)
    steps(optimizer, 1)
    mcf.as_expansion(plain)
    states = r"exp_avg \(bfloat16\), exp_avg_sq \(bfloat16\)\. "
    match = rf"AdamW keeps .*: {states}.*mcf\.collage\(optimizer, 'full'\)"
    with pytest.warns(mcf.errors.NarrowStateWarning, match=match):
        steps(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(optimizer, 1)
        mcf.collage(optimizer, "light")
        mcf.as_expansion(nn.Linear(1, 1))
        steps(optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_learning_rate_of_16_bits(dtype):
    """It stays where a schedule multiplies it by 0.999."""
    rate = torch.tensor(1e-3, dtype=dtype)
    optimizer = torch.optim.AdamW(model().parameters(), lr=rate, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    if dtype == torch.float32:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps(optimizer)
        return
    match = r"AdamW: the learning rate is a tensor of torch\.bfloat16\. .*Give a number"
    with pytest.warns(mcf.errors.NarrowStateWarning, match=match) as caught:
        steps(optimizer)
    assert len(caught) == 1
    before = rate.clone()
    scheduler.step()
    assert torch.equal(optimizer.param_groups[0]["lr"], before)


class InTheDtypeOfTheGradient(torch.optim.Optimizer):
    """A sign optimizer: one average, or a copy of the gradient, in the gradient's dtype."""

    def __init__(self, parameters, keeps):
        super().__init__(parameters, {"lr": 0.1, "keeps": keeps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if group["keeps"] == "gradient":
                    state["previous"] = p.grad.clone()
                else:
                    average = state.setdefault(
                        group["keeps"], torch.zeros(p.shape, dtype=torch.bfloat16)
                    )
                    average.lerp_(p.grad.to(average.dtype), 0.1)
                p.add_(p.grad.sign(), alpha=-group["lr"])


@pytest.mark.parametrize("keeps", ["exp_avg", "trust", "gradient"])
def test_any_plain_average_is_told(keeps):
    optimizer = InTheDtypeOfTheGradient(model().parameters(), keeps)
    if keeps == "gradient":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps(optimizer)
        return
    match = rf"keeps states in 16 bits .*: {keeps} \(bfloat16\).*in the dtype of a gradient"
    with pytest.warns(mcf.errors.NarrowStateWarning, match=match) as caught:
        steps(optimizer)
    assert len(caught) == 1
    mcf.collage(optimizer, "full")
    assert {getattr(s[keeps], "format", None) for s in optimizer.state.values()} == {mcf.bf16x3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(optimizer)
