"""torch.func over values: forward, reverse and second derivatives against exact ones."""

from fractions import Fraction

import pytest
import torch
from torch.func import hessian, jacfwd, jacrev, jvp, linearize, vjp

import mcftensor as mcf

FORMATS = [mcf.bf16x3, mcf.fp32x2, mcf.fp64x2]
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
NUMBERS = [Fraction(1, 3), Fraction(-7, 5)]

# A function, and its first and second derivative.
CASES = {
    "cube": (lambda x: x * x * x, lambda x: 3 * x * x, lambda x: 6 * x),
    "quotient": (
        lambda x: x / (1 + x * x),
        lambda x: (1 - x * x) / (1 + x * x) ** 2,
        lambda x: 2 * x * (x * x - 3) / (1 + x * x) ** 3,
    ),
    "reciprocal": (lambda x: 1 / x, lambda x: -1 / x**2, lambda x: 2 / x**3),
}
by_case = pytest.mark.parametrize("case", CASES)


def assert_close(found, expected, format):
    assert found.format is format
    found = found.reshape(-1)
    for a, b in zip(mcf.exact.to_fraction(found), expected, strict=True):
        assert abs(a - b) <= Fraction(64) / 2**format.precision * max(abs(b), Fraction(1, 100))


def diagonal(numbers):
    return [numbers[0], 0, 0, numbers[1]]


@pytest.mark.thinned(of=4)
@by_format
@by_case
def test_derivatives(case, format):
    f, first, second = CASES[case]
    x = mcf.exact.from_exact(NUMBERS, format)
    v = mcf.exact.from_exact([1, Fraction(1, 7)], format)
    numbers, tangents = mcf.exact.to_fraction(x), mcf.exact.to_fraction(v)
    value, tangent = jvp(f, (x,), (v,))
    assert_close(value, list(map(f, numbers)), format)
    forward = [first(a) * b for a, b in zip(numbers, tangents, strict=True)]
    assert_close(tangent, forward, format)
    slopes = diagonal(list(map(first, numbers)))
    assert_close(jacfwd(f)(x), slopes, format)
    assert_close(jacrev(f)(x), slopes, format)
    assert_close(hessian(lambda y: f(y).sum())(x), diagonal(list(map(second, numbers))), format)

    def gradient(y):
        return vjp(f, y)[1](torch.ones_like(y))[0]

    curved = [second(a) * b for a, b in zip(numbers, tangents, strict=True)]
    assert_close(jvp(gradient, (x,), (v,))[1], curved, format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
def test_tensors_become_expansions_within_a_transform(format, dtype):
    x = torch.tensor([0.5, -1.25], dtype=dtype)

    def square(y):
        z = mcf.as_expansion(y, format)
        return z * z

    assert torch.equal(jacrev(square)(x), torch.diag(2 * x))
    value, tangent = jvp(square, (x,), (x,))
    assert_close(tangent, [2 * Fraction(a) ** 2 for a in x.tolist()], format)
    assert_close(value, [Fraction(a) ** 2 for a in x.tolist()], format)
    assert torch.equal(jacrev(lambda y: y.to(format).to(dtype))(x), torch.eye(2, dtype=dtype))


@by_format
def test_tangents_that_are_laid_out_otherwise(format):
    x = mcf.exact.from_exact([NUMBERS, NUMBERS], format)
    tangents = [Fraction(1, 7), Fraction(3, 5)]
    for base, tangent in (
        (x, mcf.exact.from_exact(tangents, format).expand(2, 2)),
        (x, mcf.exact.from_exact([[y, y] for y in tangents], format).t()),
        (x.t().contiguous().t(), mcf.exact.from_exact([tangents] * 2, format)),
    ):
        _, found = jvp(lambda y: y * y, (base,), (tangent,))
        expected = [2 * a * b for a, b in zip(NUMBERS * 2, tangents * 2, strict=True)]
        assert_close(found, expected, format)

    def f(y):
        return (y / (1 + y * y)).sum() + y @ y

    x = x[0]
    second = [2 + CASES["quotient"][2](a) for a in mcf.exact.to_fraction(x)]
    assert_close(jacfwd(jacfwd(f))(x), diagonal(second), format)


@by_format
def test_linearize_is_refused(format):
    x = mcf.exact.from_exact(NUMBERS, format)
    with pytest.raises(NotImplementedError, match=r"tangents for constants; torch\.func\.jvp"):
        linearize(lambda y: y * y, x)
