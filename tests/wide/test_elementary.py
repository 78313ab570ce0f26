"""Elementary functions of formats beyond 48 bits, on bit patterns of all sizes, against mpmath."""

import json
import math
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

import functions
import mcftensor as mcf
from common.elementary import (
    FUNCTIONS,
    PAIRS,
    PRECISION,
    bound,
    error,
    largest_error,
    numbers,
    patterns,
    worst,
)
from mcftensor.wide.guarded import Guarded, polynomial
from support.helpers import assert_same_terms, sample
from support.releases import LDEXP

mp = pytest.importorskip("mpmath").mp  # common.elementary needs it

FORMATS = [
    mcf.fp64x2,
    mcf.fp32x3,
    pytest.param(mcf.Format(torch.float64, 3), marks=pytest.mark.slow),
    pytest.param(mcf.Format(torch.float32, 4), marks=pytest.mark.slow),
    pytest.param(mcf.Format(torch.float64, 5), marks=pytest.mark.slow),
]
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def precise():
    with mp.workprec(PRECISION):
        yield


@pytest.mark.thinned(of=24)
@by_format
@pytest.mark.parametrize("name", [*FUNCTIONS, *PAIRS])
def test_functions(name, format):
    found = largest_error(name, format)
    reached = 0.5 if len(format.components) <= 3 else 0.25  # rare numbers have more ties at once
    assert reached * bound(format) <= found <= bound(format)


@by_format
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_close_to_multiples_of_pi(name, format, request):
    if name == "tan" and format.name == "fp32x4":
        reason = "what is left of x has tails below the smallest float32"
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason))
    mp.prec = 1200
    multiples = [1, 2, 3, 355, 2**30 + 1, 3 * 2**40 + 2]
    half_pi = mp.pi / 2
    exact = [mp.floor(half_pi * k * mp.mpf(2) ** 1000) for k in multiples]
    x = mcf.exact.from_exact(list(map(_fraction, exact)), format)
    assert worst(getattr(torch, name), getattr(mp, name), format, x) <= 2


@pytest.mark.thinned(of=2)
@by_format
@pytest.mark.parametrize("name", ["asin", "acos", "acosh", "atanh", "log"])
def test_next_to_one(name, format):
    """At distances down to the smallest number, which the terms hold exactly."""
    smallest = torch.finfo(format.dtype).smallest_normal
    distances = [smallest * 2.0**k for k in (-10, -3, 0, 5, 30, 60, 90)]
    away = torch.tensor(distances, dtype=format.dtype) * (1 if name == "acosh" else -1)
    one = mcf.as_expansion(torch.ones(len(distances), dtype=format.dtype), format)
    x = one + mcf.as_expansion(away, format)
    with mp.workprec(5000):
        exact = {"acosh": lambda v: mp.log1p(v - 1 + mp.sqrt((v - 1) * (v + 1)))}
        assert worst(getattr(torch, name), exact.get(name, getattr(mp, name)), format, x) <= 2


@by_format
def test_tails_of_the_normal_distribution(format):
    """Down to the smallest numbers of the base."""
    ends = [-37.5, -30.0, -27.4] if format.dtype == torch.float64 else [-12.9, -12.4, -11.0]
    x = mcf.as_expansion(torch.tensor([*ends, -6.1, 6.1], dtype=format.dtype), format)
    smallest = torch.finfo(format.dtype).smallest_normal * torch.finfo(format.dtype).eps
    functions = {torch.special.ndtr: mp.ncdf, F.gelu: lambda v: v * mp.ncdf(v)}
    for function, exact in functions.items():
        for at, found in zip(numbers(x), numbers(function(x)), strict=True):
            slack = 2 * 2.0**-format.precision * abs(exact(at)) + smallest
            assert abs(found - exact(at)) <= slack, (function.__name__, at)


def test_small_arguments_of_atanh_in_four_terms_of_float32():
    """Their guards end below the range of float32."""
    format = mcf.Format(torch.float32, 4)
    x = mcf.exact.from_exact(["4.27e-18", "-5.005e-13", "3.1e-4", "0.4", "0.9999999"], format)
    assert worst(torch.atanh, mp.atanh, format, x) <= 1


def test_a_series_that_diverges_is_named():
    x = Guarded([torch.ones(1)], 3)
    with pytest.raises(ValueError, match="does not get below"):
        polynomial(x, lambda k, base, terms: [Fraction(2) ** k], 0.0)


def test_powers_of_numbers_next_to_one():
    """Their logarithm loses bits below the smallest number."""
    for distance in (-2.847e-40, 1e-38, 3e-31, -1e-26, 1e-22, -1e-15, 1e-9):
        x = 1 + mcf.as_expansion(torch.tensor([distance]), mcf.fp32x3)
        y = mcf.as_expansion(torch.tensor([min(1.7 / abs(distance), 3e38)]), mcf.fp32x3)
        with mp.workprec(2000):
            (base,), (exponent,), (found,) = map(numbers, (x, y, x**y))
            assert error(found, mp.power(base, exponent), mcf.fp32x3) <= 2


def _fraction(scaled):
    return Fraction(int(scaled), 2**1000)


@pytest.mark.thinned(of=2)
@by_format
@pytest.mark.parametrize("name", ["lgamma", "digamma"])
def test_gamma_below_zero(name, format):
    """Where parts cancel, relative to them."""
    x = -patterns(format, -6, 4, signs=(1,), count=24)
    exact = numbers(x)
    if name == "lgamma":
        expected = [mp.log(abs(mp.gamma(v))) for v in exact]
    else:
        expected = list(map(mp.digamma, exact))
    found = numbers(getattr(torch, name)(x))
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= bound(format) * 2.0**-format.precision * max(abs(b), 2.0**-6)


def test_zeros_of_lgamma_are_exact():
    x = mcf.exact.from_exact([1, 2, 1 + Fraction(1, 2**200), 2 - Fraction(1, 2**200)], mcf.fp64x2)
    found = numbers(x.lgamma())
    assert found[:2] == [0, 0]
    for at, near in zip(numbers(x)[2:], found[2:], strict=True):
        assert error(near, mp.loggamma(at), mcf.fp64x2) <= bound(mcf.fp64x2)


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


@pytest.mark.thinned(of=2)
@by_format
def test_special_values(format):
    plain = torch.tensor(SPECIAL, dtype=torch.float64).to(format.dtype)
    x, wide = mcf.as_expansion(plain, format), plain.double()
    for name, (function, *_) in FUNCTIONS.items():
        expected = function(wide)
        if name in ("silu", "mish") or "gelu" in name:  # PyTorch's are NaN at -infinity
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


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize(
    "format",
    [mcf.fp64x2, pytest.param(mcf.fp32x3, marks=pytest.mark.slow)],
    ids=lambda f: f.name,
)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name, format):
    function, exact = DIFFERENTIATED[name]
    x = (sample(format, 6).abs() / 8 + 0.1).detach().requires_grad_()
    function(x).sum().backward()
    for at, slope in zip(numbers(x.detach()), numbers(x.grad), strict=True):
        expected = mp.diff(exact, at, h=mp.mpf(2) ** -300)
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


def test_the_published_errors_and_times_are_within_bounds():
    published = json.loads((functions.ROOT / "benchmarks/results/functions.json").read_text())
    assert published["functions"].keys() == {*FUNCTIONS, *PAIRS}
    for format in functions.FORMATS:
        assert published["bounds"][format.name] == bound(format)
        for entry in published["functions"].values():
            assert entry["worst"][format.name] <= bound(format)
            assert entry["time"]["ratio"] <= 60


# ------------------------------------------------------------------- functions that PyTorch lacks

LACKING = {
    "sinpi": (mcf.functional.sinpi, mp.sinpi),
    "cospi": (mcf.functional.cospi, mp.cospi),
    "cbrt": (mcf.functional.cbrt, lambda x: mp.sign(x) * mp.cbrt(abs(x))),
    "gamma": (mcf.functional.gamma, mp.gamma),
}
lacking = pytest.mark.parametrize(("function", "exact"), LACKING.values(), ids=LACKING)


@pytest.mark.thinned(of=8)
@lacking
@pytest.mark.parametrize(
    "kind",
    [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2, mcf.bf16i16, torch.bfloat16, torch.float32],
    ids=str,
)
def test_functions_that_torch_lacks(function, exact, kind):
    x = torch.cat([torch.arange(-8.7, 9, 0.25), torch.tensor([2.0**-9, 300.5, 1e4])])
    x = (x[:-2] if exact is mp.gamma else x).to(kind)
    found = function(x)
    if kind is mcf.bf16i16:  # its numbers are float32
        kind = torch.float32
        assert found.dtype == kind
    else:
        assert getattr(found, "format", found.dtype) == kind
    u = Fraction(2) ** -(kind.precision if isinstance(kind, mcf.Format) else digits(kind))
    for at, y in zip(mcf.exact.to_fraction(x), mcf.exact.to_fraction(found), strict=True):
        expected = exact(mp.mpf(at.numerator) / at.denominator)
        distance = abs(mp.mpf(y.numerator) / y.denominator - expected)
        # A tail of fp16x2 has no bits below 2^-24.
        assert distance <= 1.01 * mp.mpf(u.numerator) / u.denominator * abs(expected) + least(kind)


def digits(dtype):
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def least(kind):
    return 2.0**-25 if kind is mcf.fp16x2 else 0


@by_format
def test_special_values_that_torch_lacks(format):
    inf, nan = math.inf, math.nan
    x = [0.0, -0.0, 1.0, -1.0, 2.5, -0.5, 2.0**60, -(2.0**60), inf, -inf, nan, 8.0, -27.0]
    expected = {
        "sinpi": [0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 0.0, -0.0, nan, nan, nan, 0.0, -0.0],
        "cospi": [1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 1.0, 1.0, nan, nan, nan, 1.0, -1.0],
        "cbrt": [0.0, -0.0, 1.0, -1.0, None, None, 2.0**20, -(2.0**20), inf, -inf, nan, 2.0, -3.0],
        "gamma": [inf, -inf, 1.0, nan, None, None, inf, nan, inf, nan, nan, 5040.0, nan],
    }
    for name, (function, _) in LACKING.items():
        found = function(mcf.as_expansion(torch.tensor(x, dtype=format.dtype), format))
        assert (found.components[1][~found.isfinite()] == 0).all()
        for y, tail, z in zip(
            *(t.tolist() for t in found.components[:2]), expected[name], strict=True
        ):
            if z is not None:
                assert repr(y) == repr(z)
                assert tail == 0
    tiny = torch.finfo(format.dtype).smallest_normal / 2.0 ** (format.base_precision - 1)
    (root,) = numbers(
        mcf.functional.cbrt(mcf.as_expansion(torch.tensor([tiny], dtype=format.dtype), format))
    )
    assert error(root, mp.cbrt(mp.mpf(tiny)), format) <= bound(format)


def test_what_torch_lacks_of_parameters_and_others():
    p = torch.nn.Parameter(mcf.as_expansion(torch.tensor([0.3, 5.0]), mcf.bf16x2))
    found = mcf.functional.sinpi(p)
    assert type(found) is torch.Tensor
    assert torch.equal(found, mcf.functional.sinpi(p.components[0]))
    found.sum().backward()
    expected = math.pi * torch.cos(math.pi * p.components[0].float())
    torch.testing.assert_close(p.grad.float(), expected, rtol=2**-7, atol=0)
    x = torch.tensor([0.25, 8.0], requires_grad=True)
    mcf.functional.cbrt(x).sum().backward()
    torch.testing.assert_close(x.grad, (x.detach() ** (-2 / 3)) / 3)
    assert torch.autograd.gradcheck(
        mcf.functional.sinpi, torch.tensor([0.3, 5.0], dtype=torch.float64, requires_grad=True)
    )
    y = sample(mcf.fp64x2, 6).view(2, 3)
    assert_same_terms(torch.func.vmap(mcf.functional.cospi)(y), mcf.functional.cospi(y))
    for wrong in (torch.tensor([1]), torch.tensor([1j]), 1.0):
        with pytest.raises(TypeError, match=r"cbrt: got .*; give an expansion or a real floating"):
            mcf.functional.cbrt(wrong)


@pytest.mark.parametrize("kind", [mcf.fp64x2, mcf.bf16x2], ids=str)
def test_what_torch_lacks_compiled(kind):
    def function(x):
        return mcf.functional.sinpi(x) * mcf.functional.cbrt(x)

    x = torch.linspace(-3, 3, 7, dtype=torch.float64).to(kind)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_terms(compiled(x), function(x))


# ------------------------------------------------------------------- functions composed of others

COMPOSED = {
    "erfinv": (torch.erfinv, mp.erfinv, -8, -0.01),
    "logit": (torch.logit, lambda x: mp.log(x) - mp.log1p(-x), -8, -0.01),
    "sinc": (torch.sinc, lambda x: mp.sin(mp.pi * x) / (mp.pi * x), -8, 6),
    "entr": (torch.special.entr, lambda x: -x * mp.log(x), -8, 8),
    "hardswish": (F.hardswish, lambda x: x * min(x + 3, 6) / 6, -8, 4),
    "spherical_bessel_j0": (torch.special.spherical_bessel_j0, lambda x: mp.sin(x) / x, -8, 6),
    "xlogy": (lambda x: torch.xlogy(3, x), lambda x: 3 * mp.log(x), -8, 8),
    "xlog1py": (lambda x: torch.special.xlog1py(x, x), lambda x: x * mp.log1p(x), -8, 8),
}


@pytest.mark.thinned(of=4)
@by_format
@pytest.mark.parametrize("name", COMPOSED)
def test_composed_functions(name, format):
    function, exact, low, high = COMPOSED[name]
    x = patterns(format, low, high, signs=(1,), count=12)
    if name in ("erfinv", "logit"):  # down to where float64 has 1
        near = mcf.exact.from_exact(
            [1 - Fraction(1, 2**60), Fraction(1, 2) + Fraction(1, 2**60)], format
        )
        x = torch.cat([x, near])
    assert worst(function, exact, format, x) <= bound(format)


def slope_of_product(f, slope):
    """The derivative of x f(x)."""
    return lambda x: f(x) + x * slope(x)


def logistic(x):
    return 1 / (1 + mp.exp(-x))


ACTIVATIONS = {
    "silu": slope_of_product(logistic, lambda x: logistic(x) * logistic(-x)),
    "mish": slope_of_product(
        lambda x: mp.tanh(mp.log1p(mp.exp(x))),
        lambda x: logistic(x) / mp.cosh(mp.log1p(mp.exp(x))) ** 2,
    ),
    "gelu": slope_of_product(mp.ncdf, mp.npdf),
}


@by_format
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations(name, format):
    """Also beyond 20, from where on PyTorch decomposes softplus into x."""

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(getattr(F, name)(x).sum(), x)[0]

    ends = [-9.0, 9.0] if name == "gelu" else [-15.0, -10.0, 20.5, 30.0, 45.0]
    x = sample(format, 12) + 0.25
    x = torch.cat([x, mcf.as_expansion(torch.tensor(ends), format) + x[: len(ends)]])
    assert worst(slope, ACTIVATIONS[name], format, x) <= bound(format)


def test_gradients_of_elu_by_its_result():
    """alpha scale e^x is the result plus alpha scale below 0."""
    y = mcf.as_expansion(torch.tensor([-0.5, -0.25, 3.0], dtype=torch.float64), mcf.fp64x2)
    found = torch.ops.aten.elu_backward(torch.ones_like(y), 0.5, 2.0, 1.0, True, y)
    assert mcf.exact.to_fraction(found) == [Fraction(1, 2), Fraction(3, 4), 2]


@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.fp64x2], ids=str)
@pytest.mark.parametrize("eps", [0.2, 0.5, 0.6])
def test_logit_of_what_is_clamped_is_that_of_torch(format, eps):
    """Above 1/2 the lower bound is the larger one, and comes first."""
    x = torch.tensor([0.1, 0.3, 0.45, 0.55, 0.7, 0.9, torch.nan], dtype=torch.float64)
    found = mcf.as_plain(torch.logit(mcf.as_expansion(x, format), eps), torch.float64)
    torch.testing.assert_close(found, torch.logit(x, eps), rtol=1e-3, atol=1e-3, equal_nan=True)


@by_format
def test_ends_of_composed_functions(format):
    x = mcf.as_expansion(torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, math.nan, -math.inf]), format)
    plain = mcf.as_plain(x, torch.float64)
    for function in (torch.erfinv, torch.logit, torch.special.entr):
        found = mcf.as_plain(function(x), torch.float64)
        torch.testing.assert_close(found, function(plain), equal_nan=True)
    y = x.flip(0)
    found = mcf.as_plain(torch.xlogy(x, y), torch.float64)
    torch.testing.assert_close(found, torch.xlogy(plain, plain.flip(0)), equal_nan=True)


@pytest.mark.parametrize(
    "format", [mcf.fp64x2, mcf.fp32x3, mcf.fp32x2, mcf.bf16x3], ids=lambda f: f.name
)
@LDEXP
def test_powers_of_two_are_exact(format):
    x = torch.cat(
        [sample(format, 20), mcf.exact.from_exact([1 - Fraction(1, 2**60), 4, 0], format)]
    )
    mantissa, exponent = torch.frexp(x)
    for a, m, e in zip(numbers(x), numbers(mantissa), exponent.tolist(), strict=True):
        assert m * mp.mpf(2) ** e == a
        assert 0.5 <= abs(m) < 1 or a == 0
    assert_same_terms(torch.ldexp(mantissa, exponent), x)
    assert_same_terms(mantissa.clone().ldexp_(exponent), x)
    ends = mcf.as_expansion(torch.tensor([1.5, 1.5, math.inf, math.nan]), format)
    found = torch.ldexp(ends, torch.tensor([5000, -5000, -1, 1])).components[0].tolist()
    assert found[:3] == [math.inf, 0.0, math.inf]
    assert math.isnan(found[3])


def test_gradients_of_sinc_next_to_zero():
    """Below 2^-16 they are a series."""
    x = mcf.exact.from_exact(
        [Fraction(s, 3 * 2**e) for e in (15, 16, 20) for s in (-1, 1)], "fp64x2"
    )
    x.requires_grad_()
    (found,) = torch.autograd.grad(torch.sinc(x).sum(), x)
    for a, b in zip(numbers(found), numbers(x.detach()), strict=True):
        with mp.workprec(400):  # the difference cancels
            expected = (mp.cos(mp.pi * b) - mp.sin(mp.pi * b) / (mp.pi * b)) / b
        assert abs(a - expected) <= abs(expected) * mp.mpf(2) ** -96


@by_format
def test_expm1_where_it_becomes_minus_one(format):
    """Around log(u^n), to where e^x is a small part of the last bit."""
    bits = format.base_precision * format.terms
    exponents = [Fraction(2 * bits + i, 2) for i in range(-4, 60, 3)]
    x = mcf.exact.from_exact([-e * Fraction(math.log(2)) for e in exponents], format)
    assert worst(torch.expm1, mp.expm1, format, x) <= bound(format)


@by_format
def test_angles_between_entries_of_the_table(format):
    """Midway between multiples of 1 / 16, where the series is longest."""
    x = mcf.exact.from_exact(
        [Fraction(2 * i + 1, 32) + Fraction(1, 999) for i in (0, 1, 7)], format
    )
    assert worst(torch.atan, mp.atan, format, x) <= bound(format)
