"""The facts about formats."""

import pickle

import pytest
import torch

import mcftensor as mcf
from mcftensor.formats import (
    FORMATS,
    Format,
    bf16x2,
    bf16x3,
    default_format,
    require_format,
)

# name: base, terms, precision, bytes, smallest and largest exponent, full precision from 2^e on
TABLE = {
    "bf16x2": (torch.bfloat16, 2, 16, 4, -126, 127, -118),
    "bf16x3": (torch.bfloat16, 3, 24, 6, -126, 127, -110),
    "fp16x2": (torch.float16, 2, 22, 4, -14, 15, -3),
    "fp32x2": (torch.float32, 2, 48, 8, -126, 127, -102),
    "fp32x3": (torch.float32, 3, 72, 12, -126, 127, -78),
    "fp64x2": (torch.float64, 2, 106, 16, -1022, 1023, -969),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name):
    base, terms, precision, size, low, high, full = TABLE[name]
    f = getattr(mcf, name)
    assert (f.name, f.base, f.terms, f.precision, f.bytes) == (name, base, terms, precision, size)
    assert f.u == torch.finfo(base).eps / 2 == 2.0**-f.base_precision
    assert f.precision == f.base_precision * f.terms
    assert (f.min_exponent, f.max_exponent) == (low, high)
    assert 2.0**f.min_exponent == torch.finfo(base).tiny
    # The largest number is one ulp below 2^(max_exponent + 1).
    assert torch.finfo(base).max / 2.0**high == 2 - 2 * f.u
    assert f.full_precision_min == 2.0**full


def test_every_named_format_is_listed():
    assert [f.name for f in FORMATS] == list(TABLE)


def test_equality_names_and_pickles():
    for f in FORMATS:
        assert Format(f.base, f.terms) == f == Format.from_name(f.name) == getattr(mcf, f.name)
        assert pickle.loads(pickle.dumps(f)) == f
        assert hash(Format(f.base, f.terms)) == hash(f)
        assert repr(f) == f"mcf.{f.name}"
    assert len(set(FORMATS)) == len(FORMATS)
    assert Format(torch.float64, 3) not in FORMATS
    assert Format.from_name("fp64x3") == Format(torch.float64, 3)


def test_formats_do_not_change():
    with pytest.raises(AttributeError, match="terms"):
        bf16x2.terms = 3
    with pytest.raises(AttributeError, match="terms"):
        del bf16x2.terms


@pytest.mark.parametrize("base", [torch.int32, torch.float8_e4m3fn, torch.complex64, "bfloat16"])
def test_bases_that_are_refused(base):
    with pytest.raises(TypeError, match=r"Format: base .* use torch.bfloat16, float16"):
        Format(base, 2)


@pytest.mark.parametrize(
    ("base", "terms", "rounding", "most"),
    [
        (torch.float32, 0, "nearest", 6),
        (torch.float32, 1, "nearest", 6),
        (torch.bfloat16, 7, "nearest", 6),
        (torch.bfloat16, 2.0, "nearest", 6),
        (torch.float16, 4, "nearest", 3),
        (torch.float64, 6, "stochastic", 5),
    ],
)
def test_numbers_of_terms_that_are_refused(base, terms, rounding, most):
    with pytest.raises(ValueError, match=rf"Format: {terms} terms given; .* have 2 to {most}"):
        Format(base, terms, rounding)


def test_roundings_that_are_refused():
    with pytest.raises(ValueError, match=r"rounding 'up' given; it is 'nearest', 'stochastic' or"):
        Format(torch.float32, 2, "up")


def test_formats_that_users_make():
    long = Format(torch.bfloat16, 4)
    assert (long.name, long.precision, long.bytes) == ("bf16x4", 32, 8)
    assert eval(repr(long), {"mcf": mcf, "torch": torch}) == long
    drifting = Format(torch.bfloat16, 2, rounding="stochastic")
    assert drifting != bf16x2
    assert drifting.nearest is not drifting
    assert drifting.nearest == bf16x2 == bf16x2.nearest
    assert Format.from_name("bf16x2sr") == drifting
    assert eval(repr(drifting), {"mcf": mcf, "torch": torch}) == drifting
    assert pickle.loads(pickle.dumps(drifting)) == drifting


@pytest.mark.parametrize("name", ["bf16", "fp8x2", "bf16x", "x2", "bf16x2 ", "BF16x2"])
def test_names_that_are_refused(name):
    with pytest.raises(ValueError, match="is not the name of a format; names look like 'bf16x2'"):
        Format.from_name(name)


def test_from_name_refuses_numbers_of_terms_like_the_constructor():
    with pytest.raises(ValueError, match="7 terms given"):
        Format(torch.bfloat16, 7)
    with pytest.raises(ValueError, match=r"'bf16x7' is not .* 2 to 6 terms"):
        Format.from_name("bf16x7")


@pytest.mark.parametrize(
    ("shape", "format"),
    [((), bf16x3), ((5,), bf16x3), ((1, 5, 1), bf16x3), ((5, 2), bf16x2), ((0,), bf16x3)],
)
def test_default_format(shape, format):
    assert default_format(torch.Size(shape)) == format


def test_require_format():
    assert require_format(bf16x2, "somewhere") is bf16x2
    with pytest.raises(TypeError, match=r"somewhere: 'bf16x9' is not a format; give one of mcf.bf"):
        require_format("bf16x9", "somewhere")
    assert require_format("bf16x2", "somewhere") is bf16x2
