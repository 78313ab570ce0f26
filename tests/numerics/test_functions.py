"""Elementwise functions over their whole range, against mpmath."""

import math

import pytest
import torch
from torch.nn import functional as F

import mcftensor as mcf

mp = pytest.importorskip("mpmath")
functions = pytest.importorskip("common.functions")

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2]
UNITS = 3
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
by_name = pytest.mark.parametrize("name", functions.FUNCTIONS)


@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
@by_name
def test_function(name, format):
    worst, where = functions.measure(name, format)
    assert worst <= UNITS, where


@pytest.mark.slow
@by_format
@by_name
def test_function_at_many_points(name, format):
    worst, where = functions.measure(name, format, many=True)
    assert worst <= UNITS, where


@by_format
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gradients_of_gelu(approximate, format):
    plain = functions.points(format, many=False)
    plain = plain[((plain + 0.7526).abs() > 0.02) & (plain.abs() < 1e6)]
    x = mcf.as_expansion(plain, format).requires_grad_()
    F.gelu(x, approximate=approximate).sum().backward()

    def exact(a):
        if approximate == "none":
            return functions._ndtr(a) + a * mp.npdf(a)
        s = functions._logistic(functions._by_tanh(a))
        return s + a * s * (1 - s) * mp.sqrt(8 / mp.pi) * (1 + 3 * mp.mpf("0.044715") * a * a)

    found = mcf.as_plain(x.grad, torch.float64)
    worst, where = functions.units(found, plain, exact, format)
    assert worst <= UNITS, where


@by_format
def test_out_and_in_place_are_as_exact(format):
    x = mcf.as_expansion(torch.tensor([-5.0, 1.4609375], dtype=torch.float64), format)
    out = torch.empty(2, dtype=torch.float64)
    torch.digamma(x, out=out)
    least = 2.0 ** (format.min_exponent - format.base_precision)
    for found in (out, mcf.as_plain(x.clone().digamma_(), torch.float64)):
        exact = float(mp.digamma(mcf.to_fraction(x[1]).__float__()))
        assert found[1].item() == pytest.approx(exact, rel=2 * format.u**format.terms, abs=least)
    tail = torch.special.ndtr(x)[0].item()
    assert tail == pytest.approx(math.erfc(5 / math.sqrt(2)) / 2, rel=2**-7, abs=least)
