"""The facts of formats against what the formats do."""

from fractions import Fraction

import pytest
import torch

import mcftensor as mcf

MADE = [mcf.Format(torch.bfloat16, 4), mcf.Format(torch.float32, 4), mcf.Format(torch.float16, 3)]
every_format = pytest.mark.parametrize("f", [*mcf.formats.FORMATS, *MADE], ids=lambda f: f.name)


@every_format
def test_eps_is_the_largest_error_of_a_rounding_and_reached(f):
    half = Fraction(mcf.finfo(f).eps) / 2
    size = max(1, Fraction(f.full_precision_min) * 2 ** (f.terms - 1))
    u = Fraction(1, 2**f.base_precision)
    # Halfway between two numbers, behind tails as large as they can be.
    tails = sum((1 - u) * (u / 2) ** i * 2 for i in range(1, f.terms))
    numbers = (size * (1 + tails), size * (1 + tails + (u / 2) ** f.terms * 2), size * (1 + half))
    errors = [abs(mcf.exact.to_fraction(mcf.exact.from_exact(x, f)) - x) / x for x in numbers]
    assert 0.9 * half <= max(errors) <= half


@every_format
def test_max_is_the_largest_number(f):
    info = mcf.finfo(f)
    largest = [torch.finfo(f.base).max]
    for _ in range(f.terms - 1):
        largest.append(largest[-1] * f.u / 2)
    exact = sum(map(Fraction, largest))
    x = mcf.exact.from_exact(exact, f)
    assert mcf.exact.to_fraction(x) == exact
    assert float(exact) == info.max == -info.min
    assert mcf.exact.from_exact(exact * (1 + Fraction(f.u) ** 2), f).components[0].isinf()


@every_format
def test_smallest_numbers(f):
    info = mcf.finfo(f)
    assert info.smallest_normal == info.tiny == torch.finfo(f.base).tiny
    zero, one = (mcf.exact.from_exact(n, f) for n in (0, 1))
    assert mcf.exact.to_fraction(torch.nextafter(zero, one)) == Fraction(info.smallest_subnormal)


@every_format
def test_names_and_sizes(f):
    info = mcf.finfo(f)
    assert info.dtype == f.name
    assert info.bits == 8 * sum(t.element_size() for t in mcf.exact.from_exact(1, f).components)
    assert info.full_precision_min == f.full_precision_min
    assert 1 <= info.resolution / info.eps < 10 or info.resolution == 1e-4


def test_the_names_are_those_of_torch():
    info = mcf.finfo(mcf.fp32x2)
    for name in ("bits", "eps", "max", "min", "tiny", "smallest_normal", "resolution", "dtype"):
        assert type(getattr(info, name)) is type(getattr(torch.finfo(torch.float32), name))
    with pytest.raises(TypeError, match=r"finfo: torch.float32 is a plain dtype"):
        mcf.finfo(torch.float32)
