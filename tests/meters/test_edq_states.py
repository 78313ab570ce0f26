"""What EDQ says of the states of optimizers, against the same step in float64."""

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.kernels.without_float64 import has_float64

BETA2 = 0.999


def measured(mode, held=mcf.bf16i8, steps=1, make=torch.optim.AdamW, rows=32, **settings):
    torch.manual_seed(0)
    start = 0.02 * torch.randn(rows, 64)
    weight = nn.Parameter(mcf.as_expansion(start, held) if isinstance(held, mcf.Format) else start)
    if not isinstance(held, mcf.Format):
        weight.data = weight.data.to(held)
    optimizer = make([weight], lr=1e-3, **settings)
    if mode is not None:
        mcf.collage(optimizer, mode)
    edq = mcf.EDQ(optimizer, every=max(1, steps - 1), names=[("weight", weight)])
    for _ in range(steps):
        weight.grad = (torch.randn(rows, 64) * 1e-3).to(weight.dtype)
        optimizer.step()
    assert not edq.not_metered
    return edq, optimizer, weight


def test_a_frozen_second_moment_shows():
    """bfloat16 cannot decay at 0.999: all but the largest gradients are lost."""
    edq, _, _ = measured("light", steps=400)
    frozen, exact = edq.states[-1]["exp_avg_sq"], edq.states[-1]["exp_avg"]
    assert frozen["lost"] > 0.5
    assert frozen["ratio"] < 0.99
    assert exact["ratio"] == pytest.approx(1, abs=0.02)
    edq, _, _ = measured("full", steps=400)
    assert edq.states[-1]["exp_avg_sq"]["ratio"] == pytest.approx(1, abs=1e-3)
    assert edq.states[-1]["exp_avg_sq"]["lost"] < 0.01


@pytest.mark.parametrize("path", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_codes_keep_the_mean(path):
    edq, _, _ = measured("compact", steps=200, rows=1024, **path)
    # The changes of a second moment are a hundredth of a step between codes: one in a hundred
    # elements moves, by all of it.
    for name, noise in (("exp_avg", 0.02), ("exp_avg_sq", 0.15)):
        assert edq.states[-1][name]["ratio"] == pytest.approx(1, abs=noise)
        assert edq.states[-1][name]["numel"] == 1024 * 64
    assert edq.states[-1]["exp_avg_sq"]["lost"] > 0.9  # at one step few elements move
    assert edq.states[-1]["exp_avg_sq"]["zero"] == 0
    assert edq.states[-1]["exp_avg"]["zero"] is None
    assert edq.last["largest"] < 3


def test_the_figures_are_those_of_the_step():
    edq, optimizer, weight = measured("light", steps=1)
    before = {"exp_avg": torch.zeros(32, 64), "exp_avg_sq": torch.zeros(32, 64)}
    gradient = weight.grad.double()
    for name, intended in (
        ("exp_avg", 0.1 * gradient),
        ("exp_avg_sq", (1 - BETA2) * gradient**2),
    ):
        moved = optimizer.state[weight][name].double() - before[name]
        reading = edq.per_state["weight"][name]
        ratio = ((moved * intended).sum() / (intended * intended).sum()).item()
        # Without float64, changes of states are float32.
        assert reading["ratio"] == pytest.approx(ratio, rel=1e-9 if has_float64() else 2.0**-20)
        assert reading["lost"] == ((intended != 0) & (moved == 0)).sum() / (intended != 0).sum()
        assert reading == edq.states[-1][name]


def test_zeros_beside_a_first_moment_are_counted():
    class Coarse(torch.optim.AdamW):
        """Its second moment has a share of the largest as its unit."""

        def step(self, closure=None):
            super().step()
            for state in self.state.values():
                unit = state["exp_avg_sq"].max() / 16
                state["exp_avg_sq"].div_(unit).round_().mul_(unit)

    edq, optimizer, weight = measured(None, torch.float32, make=Coarse, foreach=False)
    state = optimizer.state[weight]
    share = ((state["exp_avg_sq"] == 0) & (state["exp_avg"] != 0)).double().mean().item()
    assert 0.1 < share < 0.9
    assert edq.states[-1]["exp_avg_sq"]["zero"] == pytest.approx(share, abs=1e-3)


def test_zeros_that_matter_are_warned_of():
    """Squares of 1e-5 are zero in a pair of float16, and the step divides by eps alone."""
    weight = nn.Parameter(mcf.as_expansion(torch.randn(4, 8), mcf.fp16x2))
    optimizer = mcf.collage(torch.optim.AdamW([weight], lr=1e-6), "full")
    edq = mcf.EDQ(optimizer, names=[("weight", weight)])
    weight.grad = torch.full((4, 8), 1e-5, dtype=torch.float16)
    with pytest.warns(mcf.errors.ZeroMomentWarning, match="are zero where gradients are not"):
        optimizer.step()  # whose own square is not rounded yet
    weight.grad.zero_()
    where = r"AdamW: second moments in fp16x2 are zero .*: exp_avg_sq of weight\. .*'compact'"
    with pytest.warns(mcf.errors.ZeroMomentWarning, match=where) as caught:
        optimizer.step()
    assert [x.filename for x in caught] == [__file__]
    assert edq.states[-1]["exp_avg_sq"]["zero"] == 1
    optimizer.step()  # once


def test_zeros_that_do_not_matter_are_not_warned_of():
    """A gradient of 1e-30 has a square of zero in float32 too, and moves nothing."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    edq = mcf.EDQ(optimizer)
    weight.grad = torch.full((4,), 1e-30)
    optimizer.step()
    assert edq.states[-1]["exp_avg_sq"]["zero"] == 1


def test_the_largest_movement_is_in_learning_rates():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}], lr=1.0)
    edq = mcf.EDQ(optimizer)
    weight.grad = torch.linspace(-3, 2, 8)
    optimizer.step()
    assert edq.last["largest"] == pytest.approx(3)
    assert edq.states[-1] == {}


def test_readings_survive_a_checkpoint_and_are_shown():
    edq, optimizer, weight = measured("compact")
    table = edq.state_table()
    assert table.row_count == 2 + 2
    assert [*table.columns[2].cells] == [f"{weight.numel():,}"] * 4
    again = mcf.EDQ(optimizer, names=[("weight", weight)])
    again.load_state_dict(edq.state_dict())
    assert again.states == edq.states
    assert again.per_state == edq.per_state
    old = {name: x for name, x in edq.state_dict().items() if "state" not in name}
    mcf.EDQ(optimizer).load_state_dict(old)
