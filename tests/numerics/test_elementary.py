"""Elementary functions of formats beyond 48 bits, on bit patterns of all sizes, against mpmath."""

import math
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

import mcftensor as mcf
from common.oracle import value
from mcftensor.arithmetic import networks
from support.helpers import assert_same_terms, sample

mp = pytest.importorskip("mpmath").mp

FORMATS = [
    mcf.fp64x2,
    mcf.fp32x3,
    pytest.param(mcf.Format(torch.float64, 3), marks=pytest.mark.slow),
    pytest.param(mcf.Format(torch.float32, 4), marks=pytest.mark.slow),
    pytest.param(mcf.Format(torch.float64, 5), marks=pytest.mark.slow),
]
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
COUNT = 48


@pytest.fixture(autouse=True)
def precise():
    with mp.workprec(3000):
        yield


def bound(format):
    """In u^n: the terms are rounded once, and the evaluation adds little."""
    return 2.0 ** (1 - format.terms) + 1 / 64


def patterns(format, low, high, seed=0, signs=(1, -1), count=COUNT):
    """Expansions of random bits in every term, with exponents between two numbers."""
    generator = torch.Generator().manual_seed(seed)

    def bits(bound):
        return torch.randint(0, bound, (count,), generator=generator)

    exponents = torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low
    sign = torch.tensor(signs)[bits(len(signs))]
    terms = [(torch.exp2(exponents) * sign).to(format.dtype)]
    p = format.base_precision
    for _ in range(format.terms - 1):
        tail = terms[-1].double() * (bits(2**53).double() * 2.0**-53 - 0.5) * 2.0**-p
        terms.append((tail * 2.0 ** -bits(3).double()).to(format.dtype))
    return mcf.MCFTensor.of(networks.distill(terms, format.terms), format)


def number(x):
    q = value([t.reshape(-1)[:1] for t in x])
    return mp.mpf(q.numerator) / q.denominator


def numbers(x):
    return [number([t.reshape(-1)[i : i + 1] for t in x.components]) for i in range(x.numel())]


def error(found, expected, format):
    """In u^n relative to the result; a few of the smallest subnormals count as nothing."""
    least = mp.mpf(2) ** (format.min_exponent - format.base_precision + 3)
    if expected == 0:
        return 0.0 if abs(found) <= least else math.inf
    return float(max(abs(found - expected) - least, 0) / abs(expected) * 2**format.precision)


def worst(function, exact, format, *operands):
    result = function(*operands)
    columns = zip(*map(numbers, operands), strict=True)
    found = []
    for y, row, leading in zip(numbers_or_none(result), columns, result.components[0], strict=True):
        if not math.isfinite(leading):  # beyond the largest number
            assert abs(exact(*row)) > mp.mpf(torch.finfo(format.dtype).max) * 0.99
        else:
            found.append(error(y, exact(*row), format))
    assert found
    return max(found)


def numbers_or_none(x):
    safe = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    return numbers(safe)


def _logistic(x):
    return 1 / (1 + mp.exp(-x))


TOP = "top"  # the largest exponents
ALL = [(-60, -8), (-8, 3), (3, 6)]
POSITIVE = (1,)
# name: PyTorch's, mpmath's, exponents of arguments, their signs
FUNCTIONS = {
    "exp": (torch.exp, mp.exp, [*ALL, (6, 9.4)], (1, -1)),
    "exp2": (torch.exp2, lambda x: mp.mpf(2) ** x, [*ALL, (6, 9.9)], (1, -1)),
    "expm1": (torch.expm1, mp.expm1, [*ALL, (6, 9.4)], (1, -1)),
    "log": (torch.log, mp.log, [(-0.1, 0.1), (-3, 3), (3, TOP)], POSITIVE),
    "log2": (torch.log2, lambda x: mp.log(x) / mp.log(2), [(-0.1, 0.1), (-60, 60)], POSITIVE),
    "log10": (torch.log10, mp.log10, [(-0.1, 0.1), (-60, 60)], POSITIVE),
    "log1p": (torch.log1p, mp.log1p, [(-60, -4), (-4, -0.01)], (1, -1)),
    "sinh": (torch.sinh, mp.sinh, [*ALL, (6, 9.4)], (1, -1)),
    "cosh": (torch.cosh, mp.cosh, [*ALL, (6, 9.4)], (1, -1)),
    "tanh": (torch.tanh, mp.tanh, ALL, (1, -1)),
    "asinh": (torch.asinh, mp.asinh, [(-60, -4), (-4, 4), (4, TOP)], (1, -1)),
    "acosh": (torch.acosh, mp.acosh, [(1e-6, 1), (1, 10), (10, TOP)], POSITIVE),
    "atanh": (torch.atanh, mp.atanh, [(-60, -4), (-4, -1e-6)], (1, -1)),
    "sin": (torch.sin, mp.sin, [(-60, -3), (-3, 3), (3, 60), (60, TOP)], (1, -1)),
    "cos": (torch.cos, mp.cos, [(-60, -3), (-3, 3), (3, 60), (60, TOP)], (1, -1)),
    "tan": (torch.tan, mp.tan, [(-60, -3), (-3, 3), (3, 60), (60, TOP)], (1, -1)),
    "asin": (torch.asin, mp.asin, [(-60, -4), (-4, -1e-6)], (1, -1)),
    "acos": (torch.acos, mp.acos, [(-60, -4), (-4, -1e-6)], (1, -1)),
    "atan": (torch.atan, mp.atan, [(-60, -4), (-4, 4), (4, 60)], (1, -1)),
    "sigmoid": (torch.sigmoid, _logistic, [*ALL, (6, 9)], (1, -1)),
    "silu": (F.silu, lambda x: x * _logistic(x), [*ALL, (6, 9)], (1, -1)),
    "erf": (torch.erf, mp.erf, [(-60, -3), (-3, 1), (1, 2)], (1, -1)),
    "erfc": (torch.erfc, mp.erfc, [(-60, -3), (-3, 1), (1, 3.2)], (1, -1)),
    "gelu": (F.gelu, lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2, [(-60, -3), (-3, 3.2)], (1, -1)),
    "gelu by tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * _logistic(mp.sqrt(8 / mp.pi) * (x + mp.mpf(44715) / 10**6 * x**3)),
        [(-60, -3), (-3, 2)],
        (1, -1),
    ),
    "softplus": (F.softplus, lambda x: mp.log1p(mp.exp(x)), [(-60, -3), (-3, 4)], (1, -1)),
}


@by_format
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, format):
    function, exact, ranges, signs = FUNCTIONS[name]
    found = []
    for seed, (low, high) in enumerate(ranges):
        high = format.max_exponent if high == TOP else high
        x = patterns(format, low, high, seed, signs)
        found.append(worst(function, exact, format, x))
    assert max(found) <= bound(format)
    assert max(found) >= 0.5 * bound(format)


PAIRS = {
    "pow": (torch.pow, mp.power, [(-0.1, 0.1, 0, 6), (-3, 3, -3, 4), (-20, 20, -6, 1)], POSITIVE),
    "atan2": (torch.atan2, mp.atan2, [(-1, 1, -1, 1), (-30, 30, -30, 30)], (1, -1)),
    "hypot": (torch.hypot, mp.hypot, [(-1, 1, -1, 1), (-30, 30, -30, 30)], (1, -1)),
}


@by_format
@pytest.mark.parametrize("name", PAIRS)
def test_functions_of_two(name, format):
    function, exact, ranges, signs = PAIRS[name]
    found = []
    for seed, (low, high, low_y, high_y) in enumerate(ranges):
        x = patterns(format, low, high, seed, signs)
        y = patterns(format, low_y, high_y, seed + 9)
        found.append(worst(function, exact, format, x, y))
    assert max(found) <= bound(format)
    assert max(found) >= 0.5 * bound(format)


@by_format
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_close_to_multiples_of_pi(name, format):
    multiples = [1, 2, 3, 355, 2**30 + 1, 3 * 2**40 + 2]
    half_pi = mp.pi / 2
    exact = [mp.floor(half_pi * k * mp.mpf(2) ** 1000) for k in multiples]
    x = mcf.exact.from_exact(list(map(_fraction, exact)), format)
    assert worst(getattr(torch, name), getattr(mp, name), format, x) <= 2


def _fraction(scaled):
    return Fraction(int(scaled), 2**1000)


SPECIAL = [0.0, 0.5, 1.0, 2.0, 3.0, 800.0, math.inf, 1e-310, 1.7976931348623157e308]
SPECIAL = [*SPECIAL, *(-x for x in SPECIAL), math.nan]


def assert_like_float64(found, expected, name):
    leading = found.components[0].double()
    expected = expected.to(found.dtype).double()
    assert torch.equal(leading.isnan(), expected.isnan()), name
    ends = (leading == 0) | ~leading.isfinite() | (expected == 0) | ~expected.isfinite()
    both = torch.where(ends & ~leading.isnan(), leading, 1.0)
    other = torch.where(ends & ~leading.isnan(), expected, 1.0)
    assert torch.equal(both, other), name
    assert torch.equal(both.signbit(), other.signbit()), name
    torch.testing.assert_close(leading, expected, rtol=1e-5, atol=1e-44, equal_nan=True)
    for tail in found.components[1:]:
        assert (tail[~leading.isfinite()] == 0).all(), name


@by_format
def test_special_values(format):
    plain = torch.tensor(SPECIAL, dtype=torch.float64).to(format.dtype)
    x, wide = mcf.as_expansion(plain, format), plain.double()
    for name, (function, *_) in FUNCTIONS.items():
        expected = function(wide)
        if name == "silu" or "gelu" in name:  # PyTorch's are NaN at -infinity
            expected = torch.where(wide == -math.inf, -0.0, expected)
        assert_like_float64(function(x), expected, name)
    for name, (function, *_) in PAIRS.items():
        a, b = wide.repeat_interleave(len(wide)), wide.repeat(len(wide))
        found = function(*(mcf.as_expansion(z.to(format.dtype), format) for z in (a, b)))
        assert_like_float64(found, function(a, b), name)


@by_format
def test_exact_results_are_exact(format):
    def of(*values):
        return mcf.as_expansion(torch.tensor(values, dtype=torch.float64), format)

    for found, expected in (
        (of(3.0, 7.0).pow(5), of(243.0, 16807.0)),
        (of(3.0, -7.0).pow(of(3.0, 3.0)), of(27.0, -343.0)),
        (of(16.0, 6.25).pow(1.5), of(64.0, 15.625)),
        (of(8.0, 2.0**-30).log2(), of(3.0, -30.0)),
        (of(1000.0, 1e20).log10(), of(3.0, 20.0)),
        (of(10.0, -3.0).exp2(), of(1024.0, 0.125)),
        (torch.hypot(of(3.0, 5.0), of(4.0, 12.0)), of(5.0, 13.0)),
        (of(0.0, -0.0).exp(), of(1.0, 1.0)),
        (of(1.0, 1.0).acosh(), of(0.0, 0.0)),
    ):
        assert_same_terms(found, expected)


# ---------------------------------------------------------------------------- sums and gradients


@by_format
def test_sums_of_exponentials(format):
    x = patterns(format, -3, 4, count=12)
    exact = [mp.exp(v) for v in numbers(x)]
    total = sum(exact)
    for found, expected in (
        (x.softmax(0), [e / total for e in exact]),
        (x.log_softmax(0), [mp.log(e / total) for e in exact]),
        (x.logsumexp(0).view(1), [mp.log(total)]),
        (
            torch.logaddexp(x, x.flip(0)),
            [mp.log(a + b) for a, b in zip(exact, exact[::-1], strict=True)],
        ),
    ):
        errors = [error(a, b, format) for a, b in zip(numbers(found), expected, strict=True)]
        assert max(errors) <= bound(format)
    assert x.view(3, 4).logsumexp((0, 1), keepdim=True).shape == (1, 1)
    assert x.view(3, 4).logsumexp(0).shape == (4,)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_sums_of_infinities(name):
    inf, nan = math.inf, math.nan
    rows = [[1.0, inf, 2.0], [-inf] * 3, [nan, 1.0, 2.0], [-inf, 0.0, 1.0], [1e9, 0.0, -1e9]]
    x = torch.tensor(rows, dtype=torch.float64)
    found = getattr(mcf.as_expansion(x, mcf.fp64x2), name)(1)
    expected = getattr(x, name)(1)
    torch.testing.assert_close(mcf.as_plain(found, torch.float64), expected, equal_nan=True)


DIFFERENTIATED = {
    **{name: (f, exact) for name, (f, exact, *_) in FUNCTIONS.items() if name != "acosh"},
    "power": (lambda x: x**0.3, lambda x: x ** mp.mpf(0.3)),
    "base": (lambda x: 3**x, lambda x: 3**x),
    "logsigmoid": (F.logsigmoid, lambda x: -mp.log1p(mp.exp(-x))),
    "softplus of beta": (lambda x: F.softplus(x, 3), lambda x: mp.log1p(mp.exp(3 * x)) / 3),
}


@by_format
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name, format):
    function, exact = DIFFERENTIATED[name]
    x = (sample(format, 6).abs() / 8 + 0.1).detach().requires_grad_()
    function(x).sum().backward()
    for at, slope in zip(numbers(x.detach()), numbers(x.grad), strict=True):
        expected = mp.diff(exact, at, h=mp.mpf(2) ** -900)
        assert error(slope, expected, format) <= 12


def test_gradients_of_softmax():
    x = sample(mcf.fp64x2, 5).requires_grad_()
    seed = sample(mcf.fp64x2, 5, seed=1)
    x.softmax(0).backward(seed)
    exact = [mp.exp(v) for v in numbers(x.detach())]
    total = sum(exact)
    y, g = [e / total for e in exact], numbers(seed)
    inner = sum(a * b for a, b in zip(y, g, strict=True))
    for slope, a, b in zip(numbers(x.grad), y, g, strict=True):
        assert abs(slope - a * (b - inner)) <= 8 * 2.0**-106 * (abs(a * b) + abs(a * inner))


@pytest.mark.parametrize("format", [mcf.fp64x2, mcf.fp32x3], ids=lambda f: f.name)
def test_compiled_gives_the_same_bits(format):
    def function(x):
        return F.log_softmax(torch.sin(x) + torch.exp2(x) ** 0.7, 0)

    x = sample(format, 7)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_terms(compiled(x), function(x))


def test_in_place_and_out():
    x = sample(mcf.fp64x2, 5)
    y = x.clone()
    assert y.exp_() is y
    assert_same_terms(y, x.exp())
    out = torch.empty_like(x)
    assert torch.sin(x, out=out) is out
    assert_same_terms(out, x.sin())
    plain = torch.empty(5, dtype=torch.float64)
    with mcf.when_rounded("ignore"):
        torch.sin(x, out=plain)
    assert torch.equal(plain, mcf.as_plain(x.sin(), torch.float64))
    assert_same_terms(torch._foreach_exp([x])[0], x.exp())
