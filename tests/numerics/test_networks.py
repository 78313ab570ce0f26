"""The networks in every base, against exact integers: bounds, normalization, special values.

Bounds are in units of u^n. A bound comes with how near to it some case must get, so that it says
something. Bases of 16 bits take no networks in the library; here they stand for the others, since
their cases can be searched more densely.
"""

import numpy as np
import pytest
import torch

from common.oracle import (
    BASES,
    add_error,
    div_error,
    fma_error,
    integers,
    is_normalized,
    mul_error,
    sqrt_error,
    total,
    units,
)
from common.strategies import expansion, pair, values
from mcftensor.arithmetic import networks

# Exponents of operands: no intermediate result leaves the normal numbers by much.
MIDDLE = {
    torch.bfloat16: (-20, 20),
    torch.float16: (1, 4),
    torch.float32: (-8, 8),
    torch.float64: (-8, 8),
}
SIZE = {torch.bfloat16: 40_000, torch.float16: 40_000, torch.float32: 30_000, torch.float64: 8_000}


def size(dtype, terms):
    return SIZE[dtype] if terms < 4 else SIZE[dtype] // 4


# float16 has no range for three terms; six are as many as a format may have.
BASES_OF = {
    2: list(BASES),
    3: [torch.bfloat16, torch.float32],
    4: [torch.bfloat16, torch.float32, torch.float64],
    6: [torch.bfloat16],
}
EVERY = [
    pytest.param(dtype, terms, id=f"{str(dtype).removeprefix('torch.')}x{terms}")
    for terms in BASES_OF
    for dtype in BASES_OF[terms]
]
every = pytest.mark.parametrize(("dtype", "terms"), EVERY)


def u(dtype):
    return 2.0 ** -BASES[dtype].precision


def operands(dtype, terms, seed):
    rng = np.random.default_rng(seed)
    x, y = pair(rng, dtype, terms, size(dtype, terms), *MIDDLE[dtype])
    return x, y, expansion(rng, dtype, terms, size(dtype, terms), *MIDDLE[dtype])


def dropped(terms):
    """The error of the last term, in units of u^n."""
    return 1 / 2 ** (terms - 1)


def products_error(dtype, terms):
    """The error of `networks.products`, in units of u^n."""
    return 2 * terms * (terms + 1) * u(dtype)


def replace_zeros(x):
    """Divisors: one in the place of zeros."""
    zero = x[0] == 0
    return (torch.where(zero, 1, x[0]), *(torch.where(zero, 0, t) for t in x[1:]))


def magnitude(x):
    return tuple(torch.where(x[0] < 0, -t, t) for t in x)


@pytest.mark.thinned(of=4)
@every
def test_add(dtype, terms):
    x, y, _ = operands(dtype, terms, 0)
    result = (networks.add2 if terms == 2 else networks.add)(x, y)
    bound = 3 / (1 - 4 * u(dtype)) if terms == 2 else (1 + u(dtype)) * dropped(terms)
    assert is_normalized(result)
    worst = add_error(result, x, y).max()
    assert worst <= bound
    assert terms == 2 or worst >= 0.9 * bound


@pytest.mark.parametrize("dtype", BASES_OF[2])
def test_the_bound_of_add2_is_reached(dtype):
    # The worst case of J.-M. Muller and L. Rideau, ACM TOMS 48(1), 2022; scaled, for float16.
    unit, scale = u(dtype), 2.0**12
    numbers = [1, unit - unit**2, -1 / 2 + unit / 2, -(unit**2) / 2 + unit**3 / 2]
    xh, xl, yh, yl = (torch.tensor([scale * v], dtype=torch.float64).to(dtype) for v in numbers)
    assert is_normalized((xh, xl))
    assert is_normalized((yh, yl))
    error = add_error(networks.add2((xh, xl), (yh, yl)), (xh, xl), (yh, yl))
    assert 2.9 < error[0] <= 3 / (1 - 4 * unit)


@pytest.mark.thinned(of=4)
@every
def test_mul(dtype, terms):
    x, y, _ = operands(dtype, terms, 1)
    result = (networks.mul2 if terms == 2 else networks.mul)(x, y)
    bound = 4 if terms == 2 else dropped(terms) + products_error(dtype, terms)
    assert is_normalized(result)
    worst = mul_error(result, x, y).max()
    assert worst <= bound
    assert worst >= (0.7 * bound if terms == 2 else 0.9 * dropped(terms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_of_mul2_is_nearly_reached(dtype):
    # Products of two terms fit into float64 well enough to find the worst of many cases.
    rng = np.random.default_rng(2)
    x, y = pair(rng, dtype, 2, 1_000_000, *MIDDLE[dtype])
    result = networks.mul2(x, y)
    (x0, x1), (y0, y1), (r0, r1) = ([t.double() for t in v] for v in (x, y, result))
    error = ((x0 * y0 - r0) + (x0 * y1 - r1) + x1 * y0 + x1 * y1) / (x0 * y0)
    worst = error.abs().nan_to_num(0).topk(200).indices
    x, y, result = (tuple(t[worst] for t in v) for v in (x, y, result))
    assert 0.8 * 4 <= mul_error(result, x, y).max() <= 4


@pytest.mark.thinned(of=4)
@every
def test_fma(dtype, terms):
    x, y, z = operands(dtype, terms, 3)
    # Addends that cancel the product, to the last term or nearly, and such that do not.
    minus = networks.neg((networks.mul2 if terms == 2 else networks.mul)(x, y))
    z = tuple(torch.cat([t, m]) for t, m in zip(z, minus, strict=True))
    x, y = (tuple(torch.cat([t, t]) for t in v) for v in (x, y))
    result = (networks.fma2 if terms == 2 else networks.fma)(x, y, z)
    assert is_normalized(result)
    half = dropped(terms)
    rest = 40 * u(dtype) if terms == 2 else products_error(dtype, terms)
    absolute, relative = fma_error(result, x, y, z)
    assert absolute.max() <= half + rest
    assert 0.9 * half <= relative.max() <= half + rest
    # What cancels leaves an error of the next order only.
    scale = -2 * BASES[dtype].quantum
    product, addend = total(x) * total(y), total(z, scale)
    exact = product + addend
    cancelled = abs(exact) * 256 < abs(product)
    assert cancelled.mean() > 0.2
    error = (total(result, scale) - exact)[cancelled]
    slack = units(error, product[cancelled], result)
    underflow = 0.1 if dtype == torch.float16 else 0
    assert slack.max() <= half / 256 + 2 * rest + underflow


@pytest.mark.thinned(of=4)
@every
def test_div(dtype, terms):
    x, y, _ = operands(dtype, terms, 4)
    y = replace_zeros(y)
    if dtype == torch.float16:
        # A quotient below 1/4 has a tail among the subnormals.
        x = tuple(t * 2.0**6 for t in x)
    result = networks.div(x, y)
    assert is_normalized(result)
    half, rest = dropped(terms), 10 * 3**terms * u(dtype)
    if dtype == torch.float16:
        rest += 0.02  # of remainders, which are subnormal
    assert 0.9 * half <= div_error(result, x, y).max() <= half + rest


@pytest.mark.thinned(of=4)
@every
def test_sqrt(dtype, terms):
    x, _, _ = operands(dtype, terms, 5)
    x = magnitude(x)
    result = (networks.sqrt2 if terms == 2 else networks.sqrt)(x)
    assert is_normalized(result)
    worst = sqrt_error(result, x).max()
    bound = 25 / 8 if terms == 2 else dropped(terms) + 4**terms * u(dtype)
    assert worst <= bound
    assert worst >= (0.8 * bound if terms == 2 else 0.9 * dropped(terms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sqrt_by_digits_serves_two_terms_too(dtype):
    x = magnitude(operands(dtype, 2, 6)[0])
    result = networks.sqrt(x)
    assert is_normalized(result)
    assert 0.45 <= sqrt_error(result, x).max() <= 1 / 2 + 16 * u(dtype)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("count", [2, 3, 4, 6, 10, 13])
@pytest.mark.parametrize("terms", [2, 3, 4, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_distill_takes_any_values(dtype, terms, count):
    given = values(np.random.default_rng(count), dtype, count, 4_000)
    result = networks.distill(given, terms)
    assert is_normalized(result)
    exact = total(given)
    error = units(total(result) - exact, exact, result)
    assert error.max() <= (1 + u(dtype)) * dropped(terms)
    if count <= terms:
        assert (total(result) == exact).all()


@pytest.mark.parametrize("count", [3, 4, 6])
def test_distill_in_float16_loses_nothing_but_the_last_bits(count):
    # All values are multiples of the least subnormal, and so is what is lost.
    given = values(np.random.default_rng(count), torch.float16, count, 4_000)
    result = networks.distill(given, 2)
    finite = torch.stack(result).isfinite().all(0)
    result, given = (tuple(t[finite] for t in v) for v in (result, given))
    assert finite.float().mean() > 0.5
    assert is_normalized(result)
    exact = total(given)
    assert units(total(result) - exact, exact, result).max() <= (1 + u(torch.float16)) / 2


@pytest.mark.parametrize("terms", [2, 3, 4])
def test_distill_resolves_ties(terms):
    # Half an ulp, and a hair that shows only in the third value: up, down, and none.
    unit = u(torch.float32)
    for hair in (unit**3, -(unit**3), 0.0):
        for sign in (1.0, -1.0):
            for odd in (0.0, 2 * unit):
                given = [torch.tensor([sign * v]) for v in (1 + odd, unit, unit**2 * 0.7, hair)]
                result = networks.distill(given, terms)
                assert is_normalized(result)
                exact = total(given)
                assert units(total(result) - exact, exact, result)[0] <= dropped(terms)


def test_distill_closes_the_gap_that_a_resolved_tie_leaves():
    # The first tie is resolved upwards, its rest fits into one term, and the next tie moves up.
    given = ["1.44p-2", "1p-10", "1p-18", "-1p-27", "-1.74p-36", "1p-44", "1.06p-55"]
    given = [torch.tensor([float.fromhex(x)], dtype=torch.bfloat16) for x in given]
    for terms in (4, 5, 6):
        result = networks.distill(given, terms)
        assert is_normalized(result)
        exact = total(given)
        assert units(total(result) - exact, exact, result)[0] <= dropped(terms)


@pytest.mark.thinned(of=2)
@every
def test_scale_and_neg_are_exact(dtype, terms):
    x, y, _ = operands(dtype, terms, 7)
    scale = -2 * BASES[dtype].quantum
    error = abs(total(networks.scale(x, y[0]), scale) - total(x) * integers(y[0]))
    # What is smaller than the least subnormal, 2^-scale/2, is lost.
    assert (error < terms << (scale // 2)).all()
    assert (error == 0).mean() > (0.05 if dtype == torch.float16 else 0.8)
    assert (total(networks.neg(x)) == -total(x)).all()


@every
def test_replace_nonfinite(dtype, terms):
    plain = torch.tensor([torch.inf, torch.nan, 1.0, -0.0, 0.0], dtype=dtype)
    leading = torch.tensor([torch.nan, torch.nan, torch.inf, 0.0, 0.0], dtype=dtype)
    tails = [torch.tensor([torch.nan, 1.0, 1.0, 0.0, 0.0], dtype=dtype)] * (terms - 1)
    result = networks.replace_nonfinite((leading, *tails), plain)
    pattern = BASES[dtype].pattern
    expected = (plain, *[torch.zeros_like(plain)] * (terms - 1))
    for term, like in zip(result, expected, strict=True):
        assert term.isnan().tolist() == like.isnan().tolist()
        known = ~like.isnan()
        assert (term[known].view(pattern) == like[known].view(pattern)).all()
