"""Between any two formats with one rounding, against exact rationals."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcftensor as mcf
from common.oracle import BASES, is_normalized, total
from common.strategies import expansion, expansions
from mcftensor.passes.expansion import convert
from support.helpers import assert_same_terms, sample

FORMATS = [
    *mcf.formats.FORMATS,
    mcf.Format(torch.bfloat16, 4),
    mcf.Format(torch.bfloat16, 6),
    mcf.Format(torch.float32, 4),
    mcf.Format(torch.float64, 3),
]
PAIRS = list(itertools.product(FORMATS, repeat=2))
every_pair = pytest.mark.parametrize(
    ("source", "target"), PAIRS, ids=[f"{a.name}-{b.name}" for a, b in PAIRS]
)


def assert_rounded_once(x, source, target):
    """At most half a unit in the last place away, as the nearest number is, and normalized."""
    result = convert(x, target)
    assert is_normalized(result)
    half = Fraction(mcf.finfo(target).eps) / 2
    least = Fraction(mcf.finfo(target).smallest_subnormal) / 2
    scale = max(-BASES[f.base].quantum for f in (source, target))
    for exact, found, *terms in zip(
        total(x, scale), total(result, scale), *(t.double().tolist() for t in result), strict=True
    ):
        exact, found = Fraction(int(exact), 2**scale), Fraction(int(found), 2**scale)
        assert abs(found - exact) <= max(half * abs(exact), least)
        # And the last term is a rounding of what the others leave.
        rest = exact - sum(map(Fraction, terms[:-1]), Fraction(0))
        spacing = Fraction(2) ** -target.base_precision * Fraction(abs(terms[-1]))
        assert abs(Fraction(terms[-1]) - rest) <= max(spacing, least)


@pytest.mark.thinned(of=6)
@every_pair
def test_hard_cases(source, target):
    rng = np.random.default_rng(0)
    low, high = (1, 4) if torch.float16 in (source.base, target.base) else (-8, 8)
    assert_rounded_once(expansion(rng, source.base, source.terms, 300, low, high), source, target)


@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_single_cases(data, pair):
    source, target = pair
    low, high = (1, 4) if torch.float16 in (source.base, target.base) else (-8, 8)
    x = data.draw(expansions(source.base, source.terms, low, high))
    assert_rounded_once(tuple(t.reshape(1) for t in x), source, target)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a, b in PAIRS if torch.float16 not in (a.base, b.base)],  # it has too small a range
    ids=str,
)
def test_what_the_format_holds_comes_back(source, target):
    x = mcf.as_expansion(sample(source, 200), mcf.bf16x2)  # 16 bits or so, which all hold
    y = mcf.as_expansion(x, source)
    assert_same_terms(mcf.as_expansion(mcf.as_expansion(y, target), source), y)


def test_a_tie_is_decided_by_what_lies_far_behind():
    # Halfway between two numbers of bf16x2, and 2^-60 to either side: rounding by way of float64
    # would not see it.
    for hair in (2.0**-60, -(2.0**-60)):
        x = mcf.exact.from_exact(
            1 + Fraction(3, 2**10) + Fraction(1, 2**18) + Fraction(hair), mcf.fp64x2
        )
        y = mcf.as_expansion(x, mcf.bf16x2)
        assert mcf.exact.to_fraction(y) == mcf.exact.to_fraction(
            mcf.exact.from_exact(mcf.exact.to_fraction(x), mcf.bf16x2)
        )


@pytest.mark.thinned(of=4)
@every_pair
def test_special_values(source, target):
    plain = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=source.base)
    x = mcf.as_expansion(plain, source)
    y = mcf.as_expansion(x, target)
    expected = plain.to(target.base)
    torch.testing.assert_close(y.components[0], expected, equal_nan=True, rtol=0, atol=0)
    assert y.components[0].signbit().tolist()[3:] == [False, True]
    assert all((t == 0).all() for t in y.components[1:])
    largest = mcf.as_expansion(torch.tensor([mcf.finfo(source).max]), source)
    narrower = mcf.as_expansion(largest, target)
    if source.max_exponent > target.max_exponent:
        assert narrower.components[0].isinf().all()
        assert all((t == 0).all() for t in narrower.components[1:])


def test_assignment_converts_too():
    x, y = sample(mcf.fp64x2, 20), torch.zeros_like(sample(mcf.bf16x3, 20))
    y.copy_(x)
    assert_same_terms(y, mcf.as_expansion(x, mcf.bf16x3))
