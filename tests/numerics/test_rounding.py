"""Rounding once: conversions, collapsing and splitting, against exact rationals."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.oracle import (
    BASES,
    fractions,
    integers,
    is_normalized,
    round_fraction,
    round_integers,
    scale_of,
    total,
    value,
)
from common.strategies import expansion, expansions, numbers, tensors, terms_after
from mcftensor.arithmetic.rounding import (
    add_odd,
    collapse_odd,
    collapse_terms,
    peel,
    round_to,
    round_to_terms,
    split_terms,
)
from mcftensor.formats import FORMATS, Format
from mcftensor.passes.expansion import collapse, expand
from support.helpers import Given

DTYPES = list(BASES)
every_format = pytest.mark.parametrize("f", FORMATS, ids=lambda f: f.name)
# Exponents of leading terms: no tail is lost, and every dtype can hold the sum.
MIDDLE = {
    torch.bfloat16: (-60, 60),
    torch.float16: (-2, 14),
    torch.float32: (-45, 60),
    torch.float64: (-60, 60),
}


def near_ties(base, size, seed):
    """float64 numbers at, and a hair beside, the ties of a base: a normalized expansion's sum."""
    low, high = MIDDLE[base]
    lead, tie = expansion(np.random.default_rng(seed), base, 2, size, low, high)
    hair = torch.tensor([0.0, 2.0**-40, -(2.0**-40)], dtype=torch.float64).repeat(size)[:size]
    return lead.double() + tie.double() + lead.double() * hair


def bits_equal(a, b):
    pattern = BASES[a.dtype].pattern
    return bool((a.view(pattern) == b.view(pattern)).all())


# ------------------------------------------------------------------------------------ round_to


@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [(torch.bfloat16, 1 + 2**-8 + 2**-40), (torch.float16, 1 + 2**-11 + 2**-40)],
)
def test_what_torch_rounds_twice(dtype, inputs):
    x = torch.tensor([inputs, -inputs], dtype=torch.float64)
    up = 1 + 2 * Fraction(2) ** -BASES[dtype].precision
    assert fractions(x.to(dtype)) == [1, -1]  # torch's conversion, which this is not
    assert fractions(round_to(x, dtype)) == [up, -up]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float64_is_rounded_once(dtype):
    rng = np.random.default_rng(0)
    base = BASES[dtype]
    everywhere = numbers(rng, torch.float64, 20_000, base.quantum - 3, base.emax + 2).tensor()
    x = torch.cat([near_ties(dtype, 20_000, 1), everywhere])
    scale = scale_of(torch.float64)
    exact = integers(x)
    assert (integers(round_to(x, dtype), scale) == round_integers(exact, dtype, scale)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_is_rounded_once(dtype):
    base = BASES[dtype]
    low, high = max(base.quantum - 3, -149), min(base.emax + 2, 127)
    x = numbers(np.random.default_rng(1), torch.float32, 20_000, low, high).tensor()
    scale = scale_of(torch.float64)
    rounded = integers(round_to(x, dtype), scale)
    assert (rounded == round_integers(integers(x, scale), dtype, scale)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_survive(dtype):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=torch.float64)
    rounded = round_to(x, dtype)
    assert rounded[:2].tolist() == [torch.inf, -torch.inf]
    assert rounded[2].isnan()
    assert torch.signbit(rounded[3:]).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_overflow_and_underflow(dtype):
    base = BASES[dtype]
    limit = 2.0 ** (base.emax + 1) - 2.0 ** (base.emax - base.precision)
    quantum = 2.0**base.quantum
    x = torch.tensor([limit, -limit, 1e300, -1e300], dtype=torch.float64)
    assert round_to(x, dtype).tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf]
    assert round_to(torch.nextafter(x[:1], x[:1] * 0), dtype) == torch.finfo(dtype).max
    half = torch.tensor([quantum / 2, -quantum / 2, 1e-300, -1e-300], dtype=torch.float64)
    rounded = round_to(half, dtype)
    assert (rounded == 0).all()
    assert torch.signbit(rounded).tolist() == [False, True, False, True]
    assert round_to(torch.nextafter(half[:1], half[:1] * 4), dtype) == quantum


def test_add_odd():
    a, b = expansion(np.random.default_rng(2), torch.float32, 2, 20_000, -40, 40)
    result = add_odd(a, b)
    exact = total((a, b), scale_of(torch.float64))
    assert (integers(result, scale_of(torch.float64)) != exact).mean() > 0.3
    assert_odd_and_next_to(exact, result)


def assert_odd_and_next_to(exact, result):
    """An inexact result has an odd last bit, and is a neighbour of the exact sum."""
    scale = scale_of(torch.float64)
    inexact = integers(result, scale) != exact
    assert (result.view(torch.int32).numpy()[inexact] & 1).all()
    below = integers(torch.nextafter(result, torch.full_like(result, -torch.inf)), scale)
    above = integers(torch.nextafter(result, torch.full_like(result, torch.inf)), scale)
    assert ((below < exact) & (exact < above)).all()


# ------------------------------------------------------------------------------------ collapse


@pytest.mark.thinned(of=2)
@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_collapse_is_rounded_once(f, dtype):
    rng = np.random.default_rng(3)
    terms = expansion(rng, f.base, f.terms, 10_000, *MIDDLE[f.base])
    scale = scale_of(torch.float64)
    exact = total(terms, scale)
    assert (integers(collapse(terms, dtype), scale) == round_integers(exact, dtype, scale)).all()


@pytest.mark.parametrize("f", [f for f in FORMATS if f.base != torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collapse_of_ties_that_a_far_tail_decides(f, dtype):
    # The leading term is a tie of a narrower dtype; only the tails say to which side it goes.
    base = BASES[dtype]
    if base.precision >= BASES[f.base].precision:
        pytest.skip("the leading term is the result")
    rng = np.random.default_rng(4)
    lead = numbers(rng, f.base, 5_000, 0, 10)
    keep = BASES[f.base].precision - base.precision
    lead.significand[:] = ((lead.significand >> keep) << keep) | (1 << (keep - 1))
    terms = tensors(terms_after(rng, [lead], f.terms))
    exact = total(terms, 1074)
    assert (integers(collapse(terms, dtype), 1074) == round_integers(exact, dtype, 1074)).all()


@pytest.mark.thinned(of=2)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
@every_format
def test_collapse_of_single_expansions(f, data):
    terms = data.draw(expansions(f.base, f.terms, *MIDDLE[f.base]))
    for dtype in DTYPES:
        (result,) = fractions(collapse_terms(terms, dtype))
        assert result == round_fraction(value(terms), dtype)


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("base", DTYPES, ids=str)
def test_collapse_odd(base, terms):
    x = expansion(np.random.default_rng(5), base, terms, 10_000, *MIDDLE[base])
    result = collapse_odd(x)
    exact = total(x, scale_of(torch.float64))
    assert result.dtype == torch.float32
    assert_odd_and_next_to(exact, result)
    # Two terms of few bits fit float32 unless they lie far apart.
    share = (integers(result, scale_of(torch.float64)) != exact).mean()
    assert share == 0 if terms == 1 and base != torch.float64 else share > 0.01


@every_format
def test_collapse_keeps_special_values(f):
    leading = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=f.base)
    terms = (leading, *[torch.zeros_like(leading)] * (f.terms - 1))
    for dtype in DTYPES:
        plain = collapse(terms, dtype)
        assert plain[:2].tolist() == [torch.inf, -torch.inf]
        assert plain[2].isnan()
        assert torch.signbit(plain[3:]).tolist() == [False, True]


def test_collapse_to_the_base_is_a_copy_of_the_leading_term():
    terms = expansion(np.random.default_rng(5), torch.bfloat16, 2, 10, 0, 3)
    plain = collapse(terms, torch.bfloat16)
    assert bits_equal(plain, terms[0])
    assert plain.data_ptr() != terms[0].data_ptr()


# --------------------------------------------------------------------------------------- split


def sums_beside_ties(f, size, seed):
    """float64 numbers whose tails, rounded, fall onto ties of the terms before, or nearly."""
    rng = np.random.default_rng(seed)
    terms = expansion(rng, f.base, f.terms, size, *MIDDLE[f.base])
    x = terms[0].double()
    for term in terms[1:]:
        x = x + term.double()
    step = torch.from_numpy(rng.integers(-2, 3, size))
    return (x.view(torch.int64) + step).view(torch.float64)


@pytest.mark.thinned(of=6)
@every_format
@pytest.mark.parametrize("source", [torch.float64, torch.float32])
def test_splits_are_normalized_and_nearest(f, source):
    x = torch.cat([sums_beside_ties(f, 20_000, 6), near_ties(f.base, 20_000, 7)])
    x = x.to(source)
    terms = split_terms(x, f.base, f.terms)
    assert is_normalized(terms)
    exact = integers(x, 1074)
    error = abs(total(terms, 1074) - exact)
    # Two terms: u²/2; three: u³/4; and half the least subnormal.
    quantum = 1 << (1074 + BASES[f.base].quantum)
    bound = abs(exact) * 2 >> (f.precision + f.terms)
    assert (error <= np.maximum(bound, quantum // 2)).all()


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [2, 3])
def test_the_bound_of_splits_is_reached(base, terms):
    f = Format(base, terms)
    rng = np.random.default_rng(8)
    x = numbers(rng, torch.float64, 200_000, 12, 14).tensor()
    # One and a little: where the ulp is largest beside the number.
    x = torch.cat([x, 2.0**14 * (1 + torch.rand(50_000, dtype=torch.float64) * f.u)])
    error = x - sum(t.double() for t in reversed(split_terms(x, base, terms)))
    if base == torch.float16 and terms == 3:
        return  # the third term is subnormal everywhere
    worst = (error / x).abs().max().item() / f.u**terms
    bound = {2: 1 / 2, 3: 1 / 4}[terms]
    assert 0.9 * bound < worst <= bound


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("f", [f for f in FORMATS if f.base != torch.float64], ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_last_term_needs_no_rounding(f, stochastic):
    base = BASES[f.base]
    rng = np.random.default_rng(13)
    ranges = ((base.quantum - 2, base.emin + base.precision), (base.emax - 1, base.emax))
    edges = [numbers(rng, torch.float64, 20_000, *ends).tensor() for ends in ranges]
    middle = [sums_beside_ties(f, 100_000, 6), near_ties(f.base, 100_000, 7)]
    for source in (torch.float64, torch.float32)[: 2 if f.base.itemsize == 2 else 1]:
        x = torch.cat([*middle, *edges]).to(source)
        noise = Given(torch.from_numpy(rng.random(len(x)))) if stochastic else None
        whole = round_to_terms(x, f.base, f.terms, noise)
        terms = peel(whole, f.base, f.terms)
        finite = torch.stack(terms).isfinite().all(0)
        assert is_normalized([t[finite] for t in terms])
        assert sum(t.double() for t in reversed(terms))[finite].equal(whole.double()[finite])
        assert (whole[~finite].to(f.base) == terms[0][~finite]).all()


@pytest.mark.slow
@pytest.mark.parametrize("f", [f for f in FORMATS if f.base.itemsize == 2], ids=str)
def test_the_split_of_every_float32_significand(f):
    exponent = 3  # float16 has subnormal tails below
    x = torch.arange(2**23, 2**24, dtype=torch.float32) * 2.0 ** (exponent - 23)
    terms = [t.double() for t in split_terms(x, f.base, f.terms)]
    # Sums of all that follow fit into float32, and torch rounds that once.
    rest = torch.zeros_like(terms[0])
    for term in reversed(terms):
        rest = rest + term
        assert (rest.float().double() == rest).all()
        assert (rest.float().to(f.base).double() == term).all()
    error = (rest - x.double()).abs().max().item()
    assert error <= 2.0 ** (exponent - f.precision - f.terms + 1)


def test_splits_without_the_second_pass_would_not_be_normalized():
    # Guards the generator: rounding twice, one after the other, fails on its inputs.
    f = FORMATS[0]
    x = sums_beside_ties(f, 20_000, 9)
    hi = round_to(x, f.base)
    lo = round_to(x - hi.double(), f.base)
    assert not is_normalized((hi, lo))


@every_format
def test_splitting_again_changes_nothing(f):
    terms = expansion(np.random.default_rng(10), f.base, f.terms, 5_000, *MIDDLE[f.base])
    if f.base == torch.float64:
        plain = split_terms(terms[0], f.base, f.terms)
        assert bits_equal(plain[0], terms[0])
        assert (plain[1] == 0).all()
        return
    for dtype in (torch.float32, torch.float64):
        if dtype == f.base:
            continue
        once = expand(collapse(terms, dtype), f)
        twice = expand(collapse(once, torch.float64), f)
        assert all(bits_equal(a, b) for a, b in zip(once, twice, strict=True))


@every_format
@pytest.mark.parametrize("source", [*DTYPES, torch.int32, torch.uint8, torch.bool])
def test_numbers_that_fit_are_split_exactly(f, source):
    if source.is_floating_point and BASES[source].emax > BASES[f.base].emax:
        x = torch.randint(-2000, 2000, (50,)).to(source)
    elif source.is_floating_point:
        lowest = max(-5, BASES[source].quantum)
        x = numbers(np.random.default_rng(11), source, 50, lowest, 5).tensor()
    else:
        x = torch.randint(0, 2 if source == torch.bool else 200, (50,)).to(source)
    terms = split_terms(x, f.base, f.terms)
    assert all(t.dtype == f.base and t.shape == x.shape for t in terms)
    if source.is_floating_point and BASES[source].precision > f.precision:
        return
    plain = [Fraction(v) for v in x.double().tolist()]
    assert [sum(p) for p in zip(*map(fractions, terms), strict=True)] == plain


@every_format
def test_special_values_have_zero_tails(f):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=torch.float64)
    if f.base != torch.float64:
        x = torch.cat([x, torch.tensor([1e300, -1e300], dtype=torch.float64)])
    leading, *tails = split_terms(x, f.base, f.terms)
    assert leading[:2].tolist() == [torch.inf, -torch.inf]
    assert leading[2].isnan()
    assert torch.signbit(leading[3:5]).tolist() == [False, True]
    assert leading[5:].tolist() == [torch.inf, -torch.inf][: len(x) - 5]
    assert all(bits_equal(t, torch.zeros_like(t)) for t in tails)


@pytest.mark.thinned(of=2)
@every_format
def test_splits_at_the_edges_of_the_range(f):
    base = BASES[f.base]
    if f.base == torch.float64:
        pytest.skip("nothing wider to split")
    rng = np.random.default_rng(12)
    for low, high in ((base.quantum - 2, base.emin + base.precision), (base.emax - 1, base.emax)):
        x = numbers(rng, torch.float64, 10_000, low, high).tensor()
        terms = split_terms(x, f.base, f.terms)
        finite = torch.stack(terms).isfinite().all(0)
        # Only what rounds to more than the largest number of the base is infinite.
        assert bits_equal(terms[0], round_to(x, f.base)) or is_normalized(
            [t[finite] for t in terms]
        )
        assert (terms[1][~finite] == 0).all()
        terms = [t[finite] for t in terms]
        assert is_normalized(terms)
        error = abs(total(terms, 1074) - integers(x[finite], 1074))
        bound = abs(integers(x[finite], 1074)) * 2 >> (f.precision + f.terms)
        assert (error <= np.maximum(bound, 1 << (1073 + base.quantum))).all()
