"""torch.nextafter among the numbers of a format."""

import pytest
import torch

import mcftensor as mcf
from common.oracle import is_normalized, value
from support.helpers import assert_same_terms, exact, sample


def rationals(x):
    return [value([t.reshape(-1)[i : i + 1] for t in x.components]) for i in range(x.numel())]


def hard(format):
    """Random values, powers of two, and tails at half an ulp of the term before."""
    x = sample(format, 40)
    terms = [t.clone() for t in x.components]
    for t in terms[1:]:
        t[::4] = 0
    terms[0][::4] = torch.exp2(torch.arange(-5, 5).double()).to(format.base)
    terms[-1][1::4] = (
        (terms[-2][1::4].double().frexp().exponent.double() - 1).exp2().to(format.base)
        * format.u
        * torch.tensor([1, -1] * 5).to(format.base)
    )
    return mcf.MCFTensor(mcf.expansion.renormalize(terms), format)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("direction", [1, -1])
def test_steps(format, direction):
    x = hard(format)
    towards = torch.full_like(x, direction * 1000)
    y = x
    for _ in range(5):
        stepped = torch.nextafter(y, towards)
        assert is_normalized(stepped.components)
        for a, b in zip(rationals(y), rationals(stepped), strict=True):
            assert (b - a) * direction > 0
        y = stepped
    for _ in range(5):
        y = torch.nextafter(y, -towards)
    assert_same_terms(y, x)


def test_of_what_is_equal_and_of_what_is_not_a_number(format):
    inf, nan = float("inf"), float("nan")
    x = mcf.as_expansion(torch.tensor([1.0, nan, 1.0, inf, 0.0]), format)
    y = mcf.as_expansion(torch.tensor([1.0, 1.0, nan, 0.0, 1.0]), format)
    found = torch.nextafter(x, y)
    plain = mcf.as_plain(found)
    assert plain[0] == 1
    assert plain[1:3].isnan().all()
    assert plain[3] == torch.finfo(format.base).max
    smallest = torch.nextafter(
        torch.zeros((), dtype=format.base), torch.ones((), dtype=format.base)
    )
    assert plain[4] == smallest
    assert rationals(found[4:]) == [value([smallest.view(1)])]


def test_the_neighbour_of_one():
    one = mcf.as_expansion(torch.ones(1), mcf.bf16x2)
    up = torch.nextafter(one, one * 2)
    assert up.components[1].item() == 2.0**-133
    assert exact(up) == 1
