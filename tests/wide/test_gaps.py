"""Functions of numbers with terms that lie far apart, which float64 rounds, against mpmath."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

import mcftensor as mcf

mp = pytest.importorskip("mpmath")
functions = pytest.importorskip("common.functions")

BITS = 1200
UNITS = 3
# Sums of parts that cancel are no functions; PyTorch's zeta is only corrected beside its pole.
NAMES = [
    name
    for name in functions.FUNCTIONS
    if "bessel_k" not in name and name not in ("addcmul", "addcdiv", "lerp", "zeta(x, 1)")
]
by_format = pytest.mark.parametrize(
    "format",
    [mcf.fp32x2, mcf.bf16x3, pytest.param(mcf.bf16x2, marks=pytest.mark.slow)],
    ids=lambda f: f.name,
)
REFUSED = ("erfcx", "log_ndtr", "i0", "i1", "i0e", "i1e")  # without float64
SLOW = ("erfinv", "polygamma 2", "zeta(3, x)", "mvlgamma")


def two(exponent):
    return Fraction(2) ** exponent


SIZES = [
    two(66) + 1,  # their sines depend on the last bit
    two(100) + two(50) + 1,
    two(30) + two(-40),
    3 * two(20) + two(-60),
    *(1 + sign * two(-e) for sign in (1, -1) for e in (56, 60, 100, 133)),
    *(1 + sign * two(-60) + two(-120) for sign in (1, -1)),
    *(x + sign * two(-70) for x in (Fraction(1, 2), 2, 3, 20) for sign in (1, -1)),
    two(-60) + two(-130),
    two(-20) - two(-133),
]
NUMBERS = SIZES + [-x for x in SIZES]


def exact(x):
    """The numbers of an expansion as fractions; None where they are not finite."""
    columns = zip(*(t.double().flatten().tolist() for t in x.components), strict=True)
    return [
        sum(map(Fraction, column), Fraction(0)) if math.isfinite(column[0]) else None
        for column in columns
    ]


def entered(format, numbers=NUMBERS):
    """Those of the numbers that a format holds, as an expansion."""
    x = mcf.exact.from_exact(numbers, format)
    held = [a == b for a, b in zip(exact(x), numbers, strict=True)]
    return x[torch.tensor(held)]


def number(x):
    return mp.mpf(x.numerator) / x.denominator


def worst(found, expected, format):
    """The largest error in units of u^n, relative to the result or the smallest number of full
    precision, and its place."""
    errors = [(0.0, -1)]
    for i, (a, b) in enumerate(zip(exact(found), expected, strict=True)):
        if b is None or not abs(b) < 2.0**format.max_exponent:
            continue
        size = max(abs(b), mp.mpf(format.full_precision_min))
        error = math.inf if a is None else abs(number(a) - b) / size * mp.mpf(2) ** format.precision
        errors.append((float(error), i))
    return max(errors)


def at(function, *columns):
    """What an oracle gives in each row; None at poles."""

    def of(*row):
        try:
            return function(*map(number, row))
        except (ValueError, ZeroDivisionError):
            return None

    with mp.workprec(BITS):
        return list(map(of, *columns))


@pytest.mark.thinned(of=24)
@by_format
@pytest.mark.parametrize(
    "name",
    [
        *[x for x in NAMES if x not in (*SLOW, *REFUSED)],
        *[pytest.param(x, marks=pytest.mark.slow) for x in SLOW],
        *[pytest.param(x, marks=pytest.mark.with_float64("refused without it")) for x in REFUSED],
    ],
)
def test_functions(name, format):
    function, oracle = functions.FUNCTIONS[name]
    x = entered(format)
    error, place = worst(function(x), at(oracle, exact(x)), format)
    assert error <= UNITS, exact(x)[place]


def pairs(format):
    """All pairs of some numbers that a format holds."""
    x = entered(
        format, [two(66) + 1, 1 + two(-60), 1 - two(-60), 3 + two(-70), two(-60) + two(-130)]
    )
    places = torch.arange(len(x))
    return x[places.repeat_interleave(len(x))], x[places.repeat(len(x))]


OF_TWO = {
    "pow": (torch.pow, lambda x, y: x**y if abs(y) < 99 else None),
    "atan2": (torch.atan2, mp.atan2),
    "hypot": (torch.hypot, mp.hypot),
    "xlogy": (torch.xlogy, lambda x, y: x * mp.log(y)),
    "logaddexp": (torch.logaddexp, lambda x, y: max(x, y) + mp.log1p(mp.exp(-abs(x - y)))),
    "fmod": (torch.fmod, lambda x, y: x - y * mp.floor(x / y)),
    "remainder": (torch.remainder, lambda x, y: x - y * mp.floor(x / y)),
    "maximum": (torch.maximum, max),
    "fmin": (torch.fmin, min),
}


@pytest.mark.thinned(of=3)
@by_format
@pytest.mark.parametrize("name", OF_TWO)
def test_functions_of_two(name, format):
    function, oracle = OF_TWO[name]
    x, y = pairs(format)
    error, place = worst(function(x, y), at(oracle, exact(x), exact(y)), format)
    assert error <= UNITS, (exact(x)[place], exact(y)[place])


@by_format
def test_comparisons_and_choices_are_exact(format):
    x, y = pairs(format)
    a, b = exact(x), exact(y)
    assert (x < y).tolist() == [p < q for p, q in zip(a, b, strict=True)]
    assert (x == y).tolist() == [p == q for p, q in zip(a, b, strict=True)]
    assert exact(torch.fmax(x, y)) == list(map(max, a, b))


ROWS = [[two(66) + 1, two(66), two(66) + 3], [1 + two(-60), 1 - two(-60), Fraction(1)]]


@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16x3], ids=lambda f: f.name)
def test_functions_of_differences(format):
    """Softmax depends on differences, which float64 loses."""
    x = mcf.exact.from_exact(list(itertools.chain(*ROWS)), format).view(2, 3)
    below = [[v - max(row) for v in row] for row in ROWS]
    with mp.workprec(BITS):
        powers = [[mp.exp(number(v)) for v in row] for row in below]
        shares = [[p / sum(row) for p in row] for row in powers]
        logs = [mp.log(p) for row in shares for p in row]
        sums = [number(max(row)) + mp.log(sum(p)) for row, p in zip(ROWS, powers, strict=True)]
    assert worst(x.softmax(1), list(itertools.chain(*shares)), format)[0] <= UNITS
    assert worst(x.log_softmax(1), logs, format)[0] <= UNITS
    assert worst(x.logsumexp(1), sums, format)[0] <= UNITS
    target = torch.tensor([1, 1])
    loss = torch.nn.functional.cross_entropy(x, target, reduction="none")
    assert worst(loss, [-logs[1], -logs[4]], format)[0] <= UNITS


def same(x, y):
    return all(map(torch.equal, x.components, y.components))


def test_every_path_gives_the_same():
    x = entered(mcf.fp32x2)
    expected = torch.sin(x)
    assert worst(expected, at(mp.sin, exact(x)), mcf.fp32x2)[0] <= UNITS
    assert same(x.clone().sin_(), expected)
    assert same(torch.sin(x, out=torch.empty_like(x)), expected)
    assert same(torch._foreach_sin([x])[0], expected)
    assert same(torch.func.vmap(torch.sin)(x.view(2, -1)).view(-1), expected)
    assert same(torch.compile(torch.sin, backend="aot_eager", fullgraph=True)(x), expected)
    assert same(torch.sin(x.view(2, -1).T.contiguous().T).reshape(-1), expected)
    plain = torch.empty(len(x), dtype=torch.float64)
    with mcf.when_rounded("ignore"):
        torch.sin(x, out=plain)
    assert torch.equal(plain.float(), expected.components[0])
    grad = x.clone().requires_grad_()
    torch.sin(grad).sum().backward()
    assert worst(grad.grad, at(mp.cos, exact(x)), mcf.fp32x2)[0] <= UNITS
    large = torch.cat([x] * 2000)  # beyond the size of one pass
    assert same(torch.sin(large)[: len(x)], expected)


@pytest.mark.thinned(of=2)
@by_format
@pytest.mark.parametrize("name", ["sin", "log", "acos", "lgamma"])
def test_without_float64(name, format):
    x = entered(format)
    function, oracle = functions.FUNCTIONS[name]
    with mcf.without_float64():
        found = function(x)
    error, place = worst(found, at(oracle, exact(x)), format)
    assert error <= UNITS, exact(x)[place]


@pytest.mark.parametrize("format", [mcf.fp32x3, mcf.fp64x2], ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["log1p", "atanh"])
def test_logarithms_beside_minus_one(name, format):
    """The distance from -1 is subnormal in float32."""
    x = entered(format, [-1 + two(-e) for e in (7, 60, 126, 133, 149)])
    function, oracle = functions.FUNCTIONS[name]
    with mp.workprec(BITS):
        error, place = worst(function(x), at(oracle, exact(x)), format)
    assert error <= UNITS, exact(x)[place]
