"""`benchmarks/floor.py`: its bound of fluctuations, and the ideal format."""

import pytest
import torch

from floor import Ideal
from mcftensor.arithmetic.noise import noise_of


@pytest.mark.parametrize(("rounding", "excess"), [("balanced", 1.0), ("stochastic", 1.57)])
def test_balanced_rounding_reaches_the_bound(rounding, excess):
    """Jumps by squares of normal gradients: half the mean difference of two is 2 / pi of the mean,
    and independent noise has the variance of rare events, which is the mean."""
    generator = torch.Generator().manual_seed(0)
    writes, elements, share = 4000, 4000, 0.02
    jumps = torch.zeros(elements, dtype=torch.float64)
    for write in range(writes):
        moved = share * torch.randn(elements, generator=generator).square()
        key = torch.tensor(write) if rounding == "balanced" else torch.tensor(write << 33 | 12345)
        jumps += noise_of(rounding, key, torch.arange(elements)).uniform() < moved
    assert jumps.mean() == pytest.approx(writes * share, rel=0.01)
    bound = writes * share * 2 / torch.pi
    assert jumps.var() == pytest.approx(excess * bound, rel=0.1)


def test_the_ideal_format_moves_by_whole_steps_of_its_block():
    """Of 14 from the smallest to the largest, right in the mean of the root; zeros stay."""
    x = torch.logspace(-9, -3, 32, dtype=torch.float64).repeat(4096, 1)
    x[:, 5] = 0
    ideal = Ideal()
    assert torch.equal(ideal(x), x)
    y = 1.1 * x
    z = ideal(y)
    steps = (z / x).log10() * 14 / 6
    assert torch.equal(steps.nan_to_num(0).round(), steps.nan_to_num(0).round(decimals=6))
    assert (z[:, 5] == 0).all()
    assert torch.allclose(z.sqrt().mean(0), y[0].sqrt(), rtol=0.02)
