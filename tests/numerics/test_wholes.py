"""Whole numbers and remainders against fractions: exact on all terms, in every format."""

import math
from fractions import Fraction

import pytest
import torch

import mcftensor as mcf
from common.oracle import value
from support.helpers import assert_same_terms

FORMATS = [*mcf.formats.FORMATS, mcf.Format(torch.float64, 3), mcf.Format(torch.bfloat16, 4)]
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def hard(format, count=50):
    """Numbers about whole numbers and the middles of two, with tails of any size, and some more."""
    top = min(format.max_exponent - 2, 3 * format.precision)
    least = max(format.min_exponent - 4, -300)
    generator = torch.Generator().manual_seed(7)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    numbers = [Fraction(0), Fraction(1, 2), Fraction(3, 2), Fraction(5, 2), Fraction(1)]
    while len(numbers) < count:
        size = Fraction(draw(0, 2**20), 2**20) * Fraction(2) ** draw(-3, top)
        tail = Fraction(2) ** draw(least, 0) * draw(-1, 1)
        numbers.append(size + tail)
        numbers.append(Fraction(draw(0, 40), 2) + tail)
    x = mcf.exact.from_exact(numbers, format)
    return torch.cat([x, -x])


def rationals(x):
    return [value([t[i : i + 1] for t in x.components]) for i in range(x.numel())]


def assert_exact(found, expected, format):
    assert found.format is format
    assert_same_terms(found.abs(), mcf.exact.from_exact(expected, format).abs())
    assert rationals(found) == rationals(mcf.exact.from_exact(expected, format))


EXACT = {
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
    "trunc": lambda x: Fraction(math.trunc(x)),
    "round": lambda x: Fraction(round(x)),
    "frac": lambda x: x - math.trunc(x),
}


@pytest.mark.thinned(of=8)
@by_format
@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers(name, format):
    x = hard(format)
    found = getattr(torch, name)(x)
    exact = list(map(EXACT[name], rationals(x)))
    assert rationals(found) == exact
    assert_exact(found, exact, format)
    own = x.clone()
    assert_same_terms(getattr(own, name + "_")(), found)


@pytest.mark.thinned(of=4)
@by_format
@pytest.mark.parametrize("decimals", [1, 3, -1])
def test_decimals(decimals, format):
    x = torch.cat(
        [hard(format, 20), mcf.exact.from_exact(["0.25", "0.35", "-2.5", "15", "25"], format)]
    )
    assert_exact(x.round(decimals=decimals), [round(r, decimals) for r in rationals(x)], format)


@pytest.mark.thinned(of=8)
@by_format
@pytest.mark.parametrize("name", ["fmod", "remainder"])
def test_remainders(name, format):
    x = hard(format, 40)
    x = x[x.abs() < 1e4]
    y = x.flip(0)
    x, y = x[y != 0], y[y != 0]

    def exact(a, b):
        return a - b * (math.floor(a / b) if name == "remainder" else math.trunc(a / b))

    pairs = list(zip(rationals(x), rationals(y), strict=True))
    function = getattr(torch, name)
    assert_exact(function(x, y), [exact(*p) for p in pairs], format)
    assert_exact(function(x, 0.7), [exact(r, Fraction(0.7)) for r in rationals(x)], format)
    plain = torch.full_like(x.components[0], -3, dtype=torch.float64)
    assert_exact(function(x, plain), [exact(r, Fraction(-3)) for r in rationals(x)], format)


@pytest.mark.thinned(of=2)
@by_format
def test_special_values_and_signs_are_those_of_torch(format):
    inf, nan = math.inf, math.nan
    plain = torch.tensor([0.0, -0.0, -0.25, 0.25, -1.0, 3.0, -3.0, inf, -inf, nan]).double()
    x = mcf.as_expansion(plain, format)
    for name in ("floor", "ceil", "trunc", "round", "frac"):
        found, expected = getattr(x, name)(), getattr(plain, name)()
        signs = ~torch.isnan(expected)
        assert torch.equal(torch.signbit(found)[signs], torch.signbit(expected)[signs])
        torch.testing.assert_close(
            mcf.as_plain(found, torch.float64), expected, rtol=0, atol=0, equal_nan=True
        )
    for name in ("fmod", "remainder"):
        function = getattr(torch, name)
        for divisor in plain.tolist():
            found, expected = function(x, divisor), function(plain, divisor)
            torch.testing.assert_close(
                mcf.as_plain(found, torch.float64), expected, rtol=0, atol=0, equal_nan=True
            )
            signs = ~torch.isnan(expected)
            assert torch.equal(torch.signbit(found)[signs], torch.signbit(expected)[signs])
    assert_same_terms(3 % x[3:4], mcf.as_expansion((3 % plain)[3:4], format) * 0)


def test_tails_count():
    x = mcf.exact.from_exact(
        [1 - Fraction(1, 2**100), Fraction(5, 2) + Fraction(1, 2**100)], mcf.bf16x2
    )
    assert mcf.exact.to_fraction(x.floor()) == [0, 2]
    assert mcf.exact.to_fraction(x.round()) == [1, 3]
    assert mcf.exact.to_fraction(torch.fmod(x, 1.0))[1] == Fraction(1, 2) + Fraction(1, 2**100)
    y = mcf.exact.from_exact([2**80 + Fraction(1, 3)], mcf.fp64x2)
    assert mcf.exact.to_fraction(y.trunc()) == [2**80]
    assert 0 < mcf.exact.to_fraction(y % 1)[0] < Fraction(1, 2)


def test_a_whole_number_beyond_the_base_overflows():
    """The largest number of fp16x2 lies below 65520, which float16 rounds to an infinity."""
    x = mcf.MCFTensor([torch.tensor([65504.0]).half(), torch.tensor([15.9921875]).half()])
    assert x.ceil().item() == x.round().item() == (-x).floor().neg().item() == math.inf
    assert x.floor().item() == 65519
