"""Infinities, NaN and zeros in binary functions: the results of PyTorch, with their signs."""

import itertools
import math

import pytest
import torch

import mcftensor as mcf

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.fp32x3, mcf.fp64x2, mcf.bf16i16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, math.inf, -math.inf, math.nan]
FUNCTIONS = {
    **{
        name: getattr(torch, name)
        for name in (
            *("add", "sub", "mul", "div", "fmod", "remainder", "pow", "floor_divide", "atan2"),
            *("hypot", "copysign", "maximum", "minimum", "fmax", "fmin", "logaddexp", "xlogy"),
            *("heaviside", "true_divide"),
        )
    },
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
EITHER_ZERO = ("maximum", "minimum", "fmax", "fmin")
"""Of zeros of both signs PyTorch returns one or the other: it depends on vectors and dtypes."""

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def assert_special(found, expected, *, signs=True):
    found = mcf.as_plain(found, torch.float64)
    torch.testing.assert_close(found, expected, rtol=2.0**-14, atol=0, equal_nan=True)
    has_sign = ~torch.isnan(expected) & (signs | (expected != 0))
    assert torch.equal(torch.signbit(found)[has_sign], torch.signbit(expected)[has_sign])


@by_format
@pytest.mark.parametrize("name", FUNCTIONS)
def test_binary_functions(name, format):
    function = FUNCTIONS[name]
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64)
    a, b = pairs.unbind(1)
    x, y = (mcf.as_expansion(z, format) for z in (a, b))
    assert_special(function(x, y), function(a, b), signs=name not in EITHER_ZERO)
    for number in SPECIAL if name in ("div", "floor_divide", "fmod", "remainder") else ():
        assert_special(function(x, number), function(a, number))


@by_format
def test_an_infinite_divisor_leaves_the_floor_below_zero(format):
    one = mcf.as_expansion(torch.tensor([1.0]), format)
    assert (1 // (one * -math.inf)).tolist() == [-1]
    assert (-1 // (one * math.inf)).tolist() == [-1]


@by_format
def test_powers_of_two_keep_the_sign_of_zero(format):
    x = mcf.as_expansion(torch.tensor([0.0, -0.0, 3.0]), format)
    expected = torch.tensor([0.0, -0.0, 0.75], dtype=torch.float64)
    assert_special(torch.frexp(x).mantissa, expected)
    if format.precision <= 53:
        assert_special(torch.ldexp(x, torch.tensor([3, -3, -2])), expected)
