"""Sums without order: the exact result, rounded once, whatever the order, threads or blocks."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcftensor as mcf
from common.oracle import BASES, round_fraction

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}

over_floats = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d)[6:])


# ------------------------------------------------------------------------------------- hard terms


def bit_patterns(rng, dtype, size):
    """Finite numbers of all exponents, subnormals and zeros of both signs among them."""
    integer = _INTEGERS[dtype.itemsize]
    limits = np.iinfo(integer)
    x = torch.from_numpy(rng.integers(limits.min, limits.max, size, integer, True)).view(dtype)
    return torch.where(torch.isfinite(x), x, 0)


def normal(rng, dtype, size):
    return torch.from_numpy(rng.standard_normal(size)).to(dtype)


def cancelling(rng, dtype, size):
    """Every term and its negative, and a few more."""
    x = bit_patterns(rng, dtype, size // 2)
    rest = bit_patterns(rng, dtype, size - 2 * len(x)) if size % 2 else x[:0]
    x = torch.cat([x, -x, rest])
    return x[torch.from_numpy(rng.permutation(len(x)))]


def zero(rng, dtype, size):
    return cancelling(rng, dtype, size + size % 2)


def ill_conditioned(rng, dtype, size):
    """Large terms that cancel but for the last bits of small ones."""
    x = normal(rng, torch.float64, size)
    top = BASES[dtype].emax - 4 - math.ceil(math.log2(size))
    large = torch.ldexp(x, torch.from_numpy(rng.integers(0, top, size))).to(dtype)
    small = normal(rng, dtype, size) * 2.0 ** (BASES[dtype].emin + 4)
    return torch.cat([large, small.to(dtype), -large])


def ties(rng, dtype, size):
    """A number, half of its last unit, and the least number, its negative or nothing."""
    x = normal(rng, dtype, 1).double().abs()
    half = torch.nextafter(x.to(dtype), torch.tensor(torch.inf, dtype=dtype)).double() - x
    least = BASES[dtype].quantum
    last = float(rng.integers(-1, 2)) * 2.0**least
    return torch.cat([x, half / 2, torch.tensor([last])]).to(dtype)


def tiny(rng, dtype, size):
    """Subnormal numbers and their neighbours."""
    return normal(rng, dtype, size) * torch.finfo(dtype).tiny


def growing(rng, dtype, size):
    """A pattern of ReproBLAS: 1 beside numbers that are too small for it, one by one."""
    x = torch.full((size,), 2.0 ** -(BASES[dtype].precision + 1), dtype=dtype)
    x[rng.integers(size)] = 1.0
    return x


def sine(rng, dtype, size):
    """A pattern of ReproBLAS: a whole period of the sine, whose sum is only its roundings."""
    return torch.from_numpy(np.sin(2 * np.pi * np.arange(size) / size)).to(dtype)


def largest(rng, dtype, size):
    """Terms whose sums overflow on the way."""
    x = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    return torch.cat([x, -x, normal(rng, dtype, 1)])


PATTERNS = (
    *(bit_patterns, normal, cancelling, zero, ill_conditioned, ties, tiny, growing, sine),
    largest,
)
cases = {
    "seed": st.integers(0, 2**32),
    "pattern": st.sampled_from(PATTERNS),
    "size": st.sampled_from([1, 2, 3, 10, 100, 700]),
}


def fractions(x):
    return [Fraction(a) for a in x.double().flatten().tolist()]


def exact_sum(x):
    """The sum of finite floats: of integers, which is faster than of fractions."""
    return Fraction(sum(int(a * 2**1074) for a in fractions(x)), 2**1074)


def is_nearest(result, exact):
    """Whether a result is a number rounded to its type."""
    nearest = round_fraction(exact, result.dtype)
    if abs(nearest) >= Fraction(2) ** (BASES[result.dtype].emax + 1):
        return result.item() == (math.inf if nearest > 0 else -math.inf)
    return Fraction(result.item()) == nearest


def root_of(square):
    """The square root, or where it is irrational a number that rounds as it does."""
    scale = 4**1200
    root = math.isqrt(square.numerator * scale // square.denominator)
    if Fraction(root**2, scale) == square:
        return Fraction(root, 2**1200)
    return Fraction(2 * root + 1, 2**1201)


def same_bits(x, y):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.dtype == y.dtype and torch.equal(x.view(integer), y.view(integer))


# --------------------------------------------------------------------------------- right and bare


@over_floats
@given(**cases)
def test_sums_and_means_are_rounded_once(dtype, seed, pattern, size):
    x = pattern(np.random.default_rng(seed), dtype, size)
    exact = exact_sum(x)
    assert is_nearest(mcf.exact.sum(x), exact)
    assert is_nearest(mcf.exact.mean(x), exact / len(x))
    for other in FLOATS:
        assert is_nearest(mcf.exact.sum(x, dtype=other), exact)


@over_floats
@given(seed=cases["seed"], pattern=cases["pattern"], size=st.sampled_from([1, 2, 3, 10, 100]))
def test_products_and_norms_are_rounded_once(dtype, seed, pattern, size):
    rng = np.random.default_rng(seed)
    x = pattern(rng, dtype, size)
    y = x[torch.from_numpy(rng.permutation(len(x)))]
    exact = sum((a * b for a, b in zip(fractions(x), fractions(y), strict=True)), Fraction(0))
    assert is_nearest(mcf.exact.dot(x, y), exact)
    square = sum((a * a for a in fractions(x)), Fraction(0))
    assert is_nearest(mcf.exact.norm(x), root_of(square))


@over_floats
@given(**cases)
def test_running_sums_are_rounded_once(dtype, seed, pattern, size):
    x = pattern(np.random.default_rng(seed), dtype, size)
    total = 0
    for term, result in zip(fractions(x), mcf.exact.cumsum(x, 0), strict=True):
        total += int(term * 2**1074)
        assert is_nearest(result, Fraction(total, 2**1074))


@given(root=st.integers(2**53, 2**54), change=st.integers(-1, 1))
def test_norms_at_ties(root, change):
    """Squares of numbers of 54 bits, and their neighbours, as sums of squares of integers."""
    rest = root**2 - (root // 2**27 * 2**27) ** 2 + change
    squares = [root // 2**27 * 2**27]
    while rest > 0:  # greedily: a few terms
        squares.append(math.isqrt(rest))
        rest -= squares[-1] ** 2
    x = torch.tensor(squares, dtype=torch.float64)
    assert is_nearest(mcf.exact.norm(x), root_of(Fraction(root**2 + change)))
