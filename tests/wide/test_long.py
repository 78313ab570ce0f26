"""Formats beyond 48 bits: reductions, products and powers against exact rationals."""

import math
from fractions import Fraction

import mpmath
import pytest
import torch

import mcftensor as mcf
from common.oracle import value
from support.helpers import sample

LONG = [mcf.fp32x3, mcf.fp64x2]
pytestmark = pytest.mark.parametrize("format", LONG, ids=lambda f: f.name)


def rationals(x):
    return [value([t.reshape(-1)[i : i + 1] for t in x.components]) for i in range(x.numel())]


def assert_within(x, expected, scale, units):
    """Errors of at most so many u^n, relative to a scale of each element."""
    bound = Fraction(units) / 2**x.format.precision
    found = rationals(x)
    assert len(found) == len(expected)
    for a, b, s in zip(found, expected, scale, strict=True):
        assert abs(a - b) <= bound * abs(s)


def test_sums(format):
    x = sample(format, 37)
    exact = rationals(x)
    size = sum(map(abs, exact))
    assert_within(x.sum().view(1), [sum(exact)], [size], 3 * 6)
    assert_within(x.mean().view(1), [sum(exact) / 37], [size / 37], 3 * 6 + 5)
    running = [sum(exact[: i + 1]) for i in range(37)]
    assert_within(x.cumsum(0), running, [size] * 37, 3 * 6)
    assert_within(x.abs().sum().view(1), [size], [size], 3 * 6)


def test_cancellation_within_a_sum(format):
    x = sample(format, 16)
    both = torch.cat([x, -x]).flip(0)
    assert both.sum() == 0


def test_dimensions_of_reductions(format):
    x = sample(format, 3, 4, 5)
    wide = mcf.as_plain(x, torch.float64)
    for dim, keepdim in ((0, False), (1, True), ((0, 2), False), ((-1, 1), True), (None, False)):
        found = x.sum(dim, keepdim=keepdim)
        expected = wide.sum(dim, keepdim=keepdim)
        assert found.shape == expected.shape
        torch.testing.assert_close(mcf.as_plain(found, torch.float64), expected)
    for name in ("mean", "prod", "var", "std", "norm", "amax"):
        found, expected = getattr(x, name)(dim=1), getattr(wide, name)(dim=1)
        torch.testing.assert_close(mcf.as_plain(found, torch.float64), expected)
    for correction in (None, 0, 2):
        found, expected = (torch.var(y, 1, correction=correction) for y in (x, wide))
        torch.testing.assert_close(mcf.as_plain(found, torch.float64), expected)
    assert x[:, :0].sum(1).eq(0).all()
    assert x[:, :0].prod(1).eq(1).all()


def test_products(format):
    x, y = sample(format, 5, 7), sample(format, 7, 3, seed=1)
    a, b = rationals(x), rationals(y)
    terms = [[a[i * 7 + k] * b[k * 3 + j] for k in range(7)] for i in range(5) for j in range(3)]
    expected = [sum(t) for t in terms]
    size = [sum(map(abs, t)) for t in terms]
    assert_within(x @ y, expected, size, 4 + 3 * 3)
    assert_within(torch.einsum("ij,jk->ik", x, y).flatten(), expected, size, 4 + 3 * 3)
    assert_within(x @ y[:, 0], expected[::3], size[::3], 4 + 3 * 3)
    assert_within((x[0] @ y[:, 0]).view(1), expected[:1], size[:1], 4 + 3 * 3)
    batched = torch.bmm(x.expand(2, 5, 7), y.expand(2, 7, 3))
    assert_within(batched[1].flatten(), expected, size, 4 + 3 * 3)
    z = sample(format, 5, 3, seed=2)
    c = rationals(z)
    added = [2 * p + 3 * q for p, q in zip(c, expected, strict=True)]
    sizes = [2 * abs(p) + 3 * q for p, q in zip(c, size, strict=True)]
    assert_within(torch.addmm(z, x, y, beta=2, alpha=3).flatten(), added, sizes, 24)


def test_products_in_parts(format, monkeypatch):
    x, y = sample(format, 4, 9), sample(format, 9, 2)
    whole = x @ y
    monkeypatch.setattr("mcftensor.wide.products._BLOCK", 16)
    assert (x @ y).equal(whole)
    assert (x[:, :0] @ y[:0]).eq(0).all()


def test_accumulation(format):
    x, y = sample(format, 4, 3), sample(format, 5, 3, seed=1)
    rows = torch.tensor([0, 2, 2, 1, 2])
    a, b = rationals(x), rationals(y)
    expected, size = list(a), [abs(q) for q in a]
    for i, row in enumerate(rows.tolist()):
        for j in range(3):
            expected[3 * row + j] += b[3 * i + j]
            size[3 * row + j] += abs(b[3 * i + j])
    for found in (
        x.index_put((rows,), y, accumulate=True),
        x.index_add(0, rows, y),
        x.scatter_add(0, rows[:, None].expand(5, 3), y),
    ):
        assert_within(found.flatten(), expected, size, 9)
    assert x.clone().index_add_(0, rows, y, alpha=0).eq(x).all()


def test_powers(format):
    x = sample(format, 8).abs()
    exact = rationals(x)
    for power in (2, 3, 7, -1, -2):
        expected = [q**power for q in exact]
        assert_within(x.pow(power), expected, expected, 4 * (abs(power) + 2))
    root = rationals(x.sqrt())
    assert_within(x.pow(1.5), [q * r for q, r in zip(exact, root, strict=True)], exact, 20)
    inverse = [1 / r for r in root]
    assert_within(x.rsqrt(), inverse, inverse, 12)
    assert x.pow(0).eq(1).all()


def test_signs(format):
    x = sample(format, 8)
    assert rationals(x.sign()) == [Fraction((q > 0) - (q < 0)) for q in rationals(x)]
    y = x.flip(0)
    signs = [math.copysign(1, q) for q in rationals(y)]
    expected = [abs(q) * Fraction(s) for q, s in zip(rationals(x), signs, strict=True)]
    assert rationals(torch.copysign(x, y)) == expected


def test_in_place_and_out(format):
    x = sample(format, 6)
    y = x.clone()
    assert y.sign_() is y
    assert y.eq(x.sign()).all()
    out = torch.empty_like(x)
    assert torch.cumsum(x, 0, out=out) is out
    assert out.eq(x.cumsum(0)).all()
    assert x.sum(dtype=torch.float32).dtype == torch.float32


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("n", [2, 5])
def test_polygamma_of_any_order(format, n):
    x = mcf.as_expansion(torch.tensor([1.0, 5.0, 37.0, -1.4, 300.0]), format) / 3
    with mpmath.workprec(400):
        for y, a in zip(rationals(x.polygamma(n)), rationals(x), strict=True):
            a = mpmath.mpf(a.numerator) / a.denominator
            # mpmath's zeta takes positive arguments: 30 terms are added to its sum.
            total = mpmath.fsum((a + k) ** -(n + 1) for k in range(30)) + mpmath.zeta(n + 1, a + 30)
            exact = (-1) ** (n + 1) * mpmath.factorial(n) * total
            error = abs(mpmath.mpf(y.numerator) / y.denominator / exact - 1)
            assert error < 2 * format.u**format.terms


def test_what_has_no_algorithm_says_so(format):
    x = sample(format, 3)
    for call in (
        x.i0,
        x.i0_,
        lambda: torch.special.i1(x),
        lambda: torch.special.bessel_j0(x),
    ):
        with pytest.raises(NotImplementedError):
            call()


@pytest.mark.parametrize("number", [1.0, math.inf, -math.inf, math.nan])
def test_infinities_are_close_to_themselves_alone(format, number):
    x, y = (torch.tensor([z], dtype=torch.float64) for z in (number, math.inf))
    for compare in (torch.allclose, torch.isclose):
        found = compare(mcf.as_expansion(x, format), mcf.as_expansion(y, format))
        assert bool(found) == bool(compare(x, y))
