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
refused = pytest.mark.with_float64("refused without it")
REFUSED = (
    *("erfcx", "log_ndtr", "i0", "i1", "i0e", "i1e", "zeta(3, x)", "zeta(x, 1)", "zeta"),
    *("gammainc", "gammaincc", "float_power"),
    *(x for x in functions.FUNCTIONS if "bessel_k" in x),
)


def _marked(names):
    return [pytest.param(x, marks=refused) if x in REFUSED else x for x in names]


by_name = pytest.mark.parametrize("name", _marked(functions.FUNCTIONS))


@pytest.mark.thinned(of=24)
@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
@pytest.mark.parametrize("name", _marked(x for x in functions.FUNCTIONS if "bessel_k" not in x))
def test_function(name, format):
    worst, where = functions.measure(name, format)
    assert worst <= UNITS, where


@pytest.mark.slow
@by_format
@by_name
def test_function_at_many_points(name, format):
    worst, where = functions.measure(name, format, many=True)
    assert worst <= UNITS, where


by_name_of_two = pytest.mark.parametrize("name", _marked(functions.OF_TWO))


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
@by_name_of_two
def test_function_of_two(name, format):
    worst, where = functions.measure_of_two(name, format)
    assert worst <= UNITS, where


@pytest.mark.slow
@by_format
@by_name_of_two
def test_function_of_two_at_many_points(name, format):
    worst, where = functions.measure_of_two(name, format, many=True)
    assert worst <= UNITS, where


@by_format
def test_the_largest_of_all_costs_no_digits(format):
    """Of log_softmax, and so of a loss that is nearly 0; of logsumexp where that is nearly 0."""
    gaps = torch.tensor([4.0, 8.0, 16.0, 30.0, 60.0], dtype=torch.float64)
    least = format.full_precision_min
    plain = torch.stack([torch.zeros_like(gaps), -gaps], -1)
    x = mcf.as_expansion(plain, format)
    exact = [float(mp.log1p(mp.exp(-g))) for g in gaps.tolist()]
    expected = torch.tensor(exact, dtype=torch.float64)
    bound = {"rtol": UNITS * format.u**format.terms, "atol": least * format.u**format.terms}
    target = torch.zeros(len(gaps), dtype=torch.long)
    for found in (
        -x.log_softmax(-1)[:, 0],
        x.logsumexp(-1),
        x.T.logsumexp((0,), keepdim=True)[0],
        F.cross_entropy(x, target, reduction="none"),
    ):
        torch.testing.assert_close(mcf.as_plain(found, torch.float64), expected, **bound)


@by_format
def test_sums_of_exponentials_of_special_values_are_those_of_torch(format):
    inf, nan = math.inf, math.nan
    rows = [[0.0, 0.0], [inf, 1.0], [inf, inf], [-inf, -inf], [-inf, 2.0], [nan, 1.0], [inf, -inf]]
    plain = torch.tensor(rows, dtype=torch.float64)
    x = mcf.as_expansion(plain, format)
    for function in (
        lambda x: x.log_softmax(1),
        lambda x: x.logsumexp(1),
        lambda x: x.logsumexp((0, 1)),
        lambda x: torch.logaddexp2(x[:, 0], x[:, 1]),
        lambda x: x[:0].log_softmax(0),
        lambda x: x[:0].logsumexp(1),
        lambda x: x[0, 0].log_softmax(0),
        lambda x: x[0, 0].logsumexp(0),
    ):
        torch.testing.assert_close(
            mcf.as_plain(function(x), torch.float64),
            mcf.as_plain(mcf.as_expansion(function(plain), format), torch.float64),
            rtol=UNITS * format.u**format.terms,
            atol=0,
            equal_nan=True,
        )


@refused
@by_format
def test_special_values_of_the_incomplete_gamma_and_zeta_functions(format):
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, inf, inf, -inf, -inf, nan, inf], dtype=torch.float64)
    y = torch.tensor([0.0, 1.0, inf, -inf, 2.0, 1.0, -inf], dtype=torch.float64)
    for function in (torch.special.gammaincc, torch.special.zeta):
        found = function(*(mcf.as_expansion(z, format) for z in (x, y)))
        expected = mcf.as_plain(mcf.as_expansion(function(x, y), format), torch.float64)
        assert torch.equal(mcf.as_plain(found, torch.float64).nan_to_num(7), expected.nan_to_num(7))


@refused
@by_format
def test_gammaincc_of_a_small_number(format):
    """On both sides of 1.1, where PyTorch changes its method."""
    a = torch.tensor([2.0**-12, 2.0**-3, 0.4375], dtype=torch.float64)
    a = torch.cat([torch.tensor([max(format.full_precision_min, 2.0**-60)]).to(a), a])
    x = torch.tensor([2.0**-9, 0.5, 1.0, 1.001953125, 1.09375, 1.125, 3.0], dtype=torch.float64)
    first, second = (t.flatten() for t in torch.meshgrid(a, x, indexing="ij"))
    result = torch.special.gammaincc(*(mcf.as_expansion(t, format) for t in (first, second)))
    found = mcf.as_plain(result, torch.float64)
    least = format.full_precision_min
    with mp.workprec(functions.BITS):
        for p, q, b in zip(first.tolist(), second.tolist(), found.tolist(), strict=True):
            exact = mp.gammainc(p, q, mp.inf, regularized=True)
            assert abs(b - exact) <= UNITS * format.u**format.terms * max(exact, least), (p, q)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_polygamma_below_zero(n):
    """Within moments: PyTorch adds up a term for each unit that x lies below 0."""
    x = torch.tensor([-0.3125, -2.5625, -30.25, -99.75, -(2.0**40) - 0.25], dtype=torch.float64)
    found = mcf.as_plain(torch.polygamma(n, mcf.as_expansion(x, mcf.fp32x2)), torch.float64)
    with mp.workprec(functions.BITS):
        for a, b in zip(x.tolist(), found.tolist(), strict=True):
            if a > -100:
                assert abs(b - mp.psi(n, a)) <= UNITS * 2.0**-48 * abs(mp.psi(n, a)), a
            assert math.isfinite(b)


@pytest.mark.thinned(of=2)
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


def _gate(x):
    """tanh(softplus(x)), and its derivative."""
    u = (1 + mp.exp(x)) ** 2
    return (u - 1) / (u + 1), 4 * u / (u + 1) ** 2 / (1 + mp.exp(-x))


GRADIENTS = {
    "silu": (F.silu, lambda a: functions._logistic(a) * (1 + a * functions._logistic(-a)), -1.2785),
    "mish": (F.mish, lambda a: _gate(a)[0] + a * _gate(a)[1], -1.1924),
    "tanhshrink": (F.tanhshrink, lambda a: mp.tanh(a) ** 2, 0.0),
    "ndtr": (torch.special.ndtr, mp.npdf, 0.0),
}


@pytest.mark.thinned(of=2)
@by_format
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_underflow_or_cancel(name, format):
    """But beside their own zeros."""
    function, exact, zero = GRADIENTS[name]
    plain = functions.points(format, many=False)
    plain = plain[((plain - zero).abs() > 0.02 * abs(zero)) & (plain.abs() < 1e6)]
    x = mcf.as_expansion(plain, format).requires_grad_()
    function(x).sum().backward()
    worst, where = functions.units(mcf.as_plain(x.grad, torch.float64), plain, exact, format)
    assert worst <= 4, where


@by_format
def test_out_and_in_place_are_as_exact(format):
    x = mcf.as_expansion(torch.tensor([-5.0, 1.4609375], dtype=torch.float64), format)
    out = torch.empty(2, dtype=torch.float64)
    torch.digamma(x, out=out)
    least = 2.0 ** (format.min_exponent - format.base_precision)
    for found in (out, mcf.as_plain(x.clone().digamma_(), torch.float64)):
        exact = float(mp.digamma(mcf.exact.to_fraction(x[1]).__float__()))
        assert found[1].item() == pytest.approx(exact, rel=2 * format.u**format.terms, abs=least)
    tail = torch.special.ndtr(x)[0].item()
    assert tail == pytest.approx(math.erfc(5 / math.sqrt(2)) / 2, rel=2**-7, abs=least)
