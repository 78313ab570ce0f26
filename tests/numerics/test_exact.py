"""Exact numbers into expansions and out of them."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcftensor as mcf
from common.oracle import is_normalized, round_fraction, value
from support.helpers import sample

numbers = st.fractions(min_value=-100, max_value=100).filter(lambda q: not 0 < abs(q) < 1e-4)


@given(q=numbers, name=st.sampled_from([f.name for f in mcf.formats.FORMATS]))
def test_rounded_once(q, name):
    format = mcf.Format.from_name(name)
    x = mcf.exact.from_exact([q], format)
    assert is_normalized(x.components)
    error = abs(value(x.components) - q)
    # Half an ulp of the last term, or of the smallest number of the base.
    tiny = Fraction(2) ** (format.min_exponent - format.base_precision)
    assert error <= max(abs(q) * Fraction(1, 2**format.precision), tiny)
    assert Fraction(x.components[0].item()) == round_fraction(q, format.base)


@given(q=numbers)
def test_the_way_back_is_exact(q):
    x = mcf.exact.from_exact(q, mcf.fp64x2)
    again = mcf.exact.from_exact(mcf.exact.to_fraction(x), mcf.fp64x2)
    assert mcf.exact.to_fraction(again) == mcf.exact.to_fraction(x)


def test_round_trip(format):
    x = sample(format, 3, 2)
    fractions = mcf.exact.to_fraction(x)
    assert fractions[1][0] == value([t[1:2, 0] for t in x.components])
    assert mcf.exact.from_exact(fractions, format).eq(x).all()


def test_kinds_of_numbers():
    tenth = mcf.exact.from_exact(Fraction(1, 10), mcf.fp32x3)
    for same in ("0.1", "1/10", Decimal("0.1"), "1e-1"):
        assert mcf.exact.from_exact(same, mcf.fp32x3).eq(tenth).all()
    assert not mcf.exact.from_exact(0.1, mcf.fp32x3).eq(tenth).all()  # that float is another number
    assert mcf.exact.to_fraction(mcf.exact.from_exact(2**70 + 1, mcf.fp64x2)) == 2**70 + 1


def test_shapes():
    x = mcf.exact.from_exact([["0.1", 1], [Fraction(1, 3), Decimal(2)]], mcf.bf16x2)
    assert x.shape == (2, 2)
    assert mcf.exact.from_exact([], mcf.bf16x3).shape == (0,)
    assert mcf.exact.from_exact("0.5", mcf.bf16x2).shape == ()


def test_formats_that_are_no_expansions():
    for format in (mcf.mxfp8, mcf.bf16i16):
        with pytest.raises(TypeError, match=r"from_exact: .* does not consist of terms"):
            mcf.exact.from_exact(["0.1"], format)


def test_special_values(format):
    x = mcf.exact.from_exact(["inf", float("-inf"), Decimal("nan"), -0.0, "1e5000"], format)
    leading = x.components[0]
    assert leading[0] == math.inf
    assert leading[1] == -math.inf
    assert leading[2].isnan()
    assert torch.signbit(leading[3])
    assert leading[4] == math.inf
    for tail in x.components[1:]:
        assert (tail == 0).all()
    with pytest.raises(ValueError, match="infinities or NaN"):
        mcf.exact.to_fraction(x)


def test_exponents_beyond_all_floats_take_no_time(format):
    far = "9" * 19
    numbers = ["1e99999", "-1e9999999", f"1e{far}", "1e-99999", f"-1e-{far}", Decimal("-0e99999")]
    leading, *tails = mcf.exact.from_exact(numbers, format).components
    assert leading.tolist() == [math.inf, -math.inf, math.inf, 0, 0, 0]
    assert torch.signbit(leading).tolist() == [False, True, False, False, True, True]
    assert not any(tail.any() for tail in tails)


def test_the_largest_numbers_and_beyond(format):
    limit = Fraction(2) ** (format.max_exponent + 1)
    largest = limit - limit / 2**format.base_precision
    x = mcf.exact.from_exact([largest, -largest, limit, -limit], format)
    assert x.components[0].tolist() == [float(largest), -float(largest), math.inf, -math.inf]
    assert all((tail == 0).all() for tail in x.components[1:])


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ("zero point one", ValueError, "is no number"),
        ([1, [2, 3]], ValueError, "different lengths"),
        (True, TypeError, "True is no number"),
        (1j, TypeError, "is no number"),
        (None, TypeError, "is no number"),
    ],
)
def test_mistakes(values, error, message):
    with pytest.raises(error, match=message):
        mcf.exact.from_exact(values, mcf.bf16x2)
    with pytest.raises(TypeError, match="not a format"):
        mcf.exact.from_exact(values, "bf16")


def test_integers_have_no_fractions():
    with pytest.raises(TypeError, match="int64"):
        mcf.exact.to_fraction(torch.tensor(1))


@pytest.mark.parametrize("zero", ["-0.0", "-0", -0.0, np.float32(-0.0), Decimal("-0.0")], ids=repr)
def test_zeros_have_their_signs(zero, format):
    leading = mcf.exact.from_exact(zero, format).components[0]
    assert leading == 0
    assert leading.signbit()


@pytest.mark.parametrize("number", ["-1e-400", Fraction(-1, 10**400), Decimal("-1e-400")], ids=repr)
def test_what_is_too_small_for_a_float_is_no_zero(number):
    assert mcf.exact._special(number) is None


@pytest.mark.parametrize("place", [0, -1])
def test_inconsistent_terms_are_counted_in_every_part(place):
    """Long tensors are normalized part by part; the other part is consistent."""
    terms = [torch.ones(2**16 + 8).bfloat16(), torch.zeros(2**16 + 8).bfloat16()]
    terms[1][place] = 0.5
    found, misfits = mcf.bf16x2.normalized(terms)
    assert misfits == 1
    assert found[0][place] == 1.5
    assert not found[1].any()
