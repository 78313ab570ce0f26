"""The public arithmetic on expansions: bounds in every format, special values, shapes, operands."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mcftensor as mcf
from common.bounds import (
    BOUNDS,
    LONGER,
    MIDDLE,
    SIZE,
    magnitude,
    replace_zeros,
)
from common.oracle import (
    BASES,
    add_error,
    div_error,
    fma_error,
    integers,
    is_normalized,
    mul_error,
    scale_of,
    sqrt_error,
    total,
    units,
)
from common.strategies import expansion, expansions, numbers, pair, values
from mcftensor.formats import (
    FORMATS,
    Format,
    bf16x2,
    bf16x3,
    fp16x2,
    fp32x2,
    fp32x3,
    fp64x2,
)
from mcftensor.passes.expansion import (
    add,
    apply,
    collapse,
    div,
    expand,
    fma,
    grow,
    mul,
    renormalize,
    sqrt,
)

every_format = pytest.mark.parametrize("f", [*FORMATS, *LONGER], ids=lambda f: f.name)


# Beside larger operands that cancel, tails below 2^-48 of them are lost without float64.
of_sums = pytest.mark.parametrize(
    "f",
    [
        pytest.param(f, marks=pytest.mark.with_float64("tails of operands that cancel"))
        if f.wide == torch.float64
        else f
        for f in [*FORMATS, *LONGER]
    ],
    ids=lambda f: f.name,
)


def size_for(f):
    return SIZE[f.base] if f in FORMATS else SIZE[f.base] // 4


def operands(f, seed, size=None):
    rng = np.random.default_rng(seed)
    size = size or size_for(f)
    x, y = pair(rng, f.base, f.terms, size, *MIDDLE[f.base])
    return x, y, expansion(rng, f.base, f.terms, size, *MIDDLE[f.base])


def same(a, b):
    """Equal terms, bit for bit, all NaNs alike."""
    pattern = BASES[a[0].dtype].pattern
    return len(a) == len(b) and all(
        x.shape == y.shape
        and bool(((x.view(pattern) == y.view(pattern)) | (x.isnan() & y.isnan())).all())
        for x, y in zip(a, b, strict=True)
    )


def within(name, f, errors):
    bound, reached = BOUNDS[name][f]
    return reached <= errors.max() <= bound


# -------------------------------------------------------------------------------------- bounds


@pytest.mark.thinned(of=2)
@of_sums
def test_add(f):
    x, y, _ = operands(f, 0)
    result = add(x, y)
    assert is_normalized(result)
    assert within("add", f, add_error(result, x, y))


def test_sums_without_float64_lose_what_lies_far_below_the_operands():
    x, y, _ = operands(bf16x3, 0)
    with mcf.without_float64():
        result = add(x, y)
    exact = total(x) + total(y)
    allowed = 0.251 * 2.0**-24 * np.abs(exact).astype(float)
    allowed += 2.0**-48 * (np.abs(total(x)) + np.abs(total(y))).astype(float)
    lost = np.abs(total(result) - exact).astype(float)
    assert (lost <= allowed).all()
    assert (lost > 0.251 * 2.0**-24 * np.abs(exact).astype(float)).any()


@pytest.mark.thinned(of=2)
@of_sums
def test_grow_with_numbers_of_any_size(f):
    rng = np.random.default_rng(1)
    low, high = MIDDLE[f.base]
    x = expansion(rng, f.base, f.terms, size_for(f), low, high)
    p = BASES[f.base].precision
    a = numbers(rng, f.base, size_for(f), max(low - 2 * p, BASES[f.base].quantum), high).tensor()
    a = torch.where(torch.rand(a.shape) < 0.2, -x[0], a)
    result = grow(x, a)
    assert is_normalized(result)
    assert add_error(result, x, (a,)).max() <= BOUNDS["add"][f][0]


@pytest.mark.thinned(of=4)
@every_format
def test_mul(f):
    x, y, _ = operands(f, 2)
    result = mul(x, y)
    assert is_normalized(result)
    assert within("mul", f, mul_error(result, x, y))


@pytest.mark.thinned(of=4)
@every_format
def test_div(f):
    x, y, _ = operands(f, 3)
    y = replace_zeros(y)
    if f == fp16x2:
        # A quotient below 1/4 has a tail among the subnormals.
        x = tuple(t * 2.0**6 for t in x)
    result = div(x, y)
    assert is_normalized(result)
    assert within("div", f, div_error(result, x, y))


@pytest.mark.thinned(of=4)
@every_format
def test_sqrt(f):
    x = magnitude(operands(f, 4)[0])
    result = sqrt(x)
    assert is_normalized(result)
    assert within("sqrt", f, sqrt_error(result, x))


@pytest.mark.thinned(of=4)
@every_format
def test_fma(f):
    x, y, z = operands(f, 5)
    minus = tuple(-t for t in mul(x, y))
    z = tuple(torch.cat([t, m]) for t, m in zip(z, minus, strict=True))
    x, y = (tuple(torch.cat([t, t]) for t in v) for v in (x, y))
    result = fma(x, y, z)
    assert is_normalized(result)
    absolute, relative = fma_error(result, x, y, z)
    assert within("fma", f, relative)
    assert absolute.max() <= (2 if f.terms == 2 else 1)  # |result| <= |x y| + |z|
    # And under cancellation, where |result| is nothing: u² or u³/2 of |x y| + |z|.
    half = len(absolute) // 2
    assert absolute[half:].max() <= 2.0 ** -(f.terms - 2)


@pytest.mark.thinned(of=5)  # the tests of each operation above have the same bounds
@settings(max_examples=15)
@given(data=st.data())
@every_format
def test_single_cases(f, data):
    low, high = MIDDLE[f.base]
    drawn = (data.draw(expansions(f.base, f.terms, low, high)) for _ in range(3))
    x, y, z = (tuple(t.reshape(1) for t in v) for v in drawn)
    assert add_error(add(x, y), x, y).max() <= BOUNDS["add"][f][0]
    assert mul_error(mul(x, y), x, y).max() <= BOUNDS["mul"][f][0]
    absolute, relative = fma_error(fma(x, y, z), x, y, z)
    assert absolute.max() <= 2 / 2 ** max(f.terms - 2, 0)
    assert relative.size == 0 or relative.max() <= BOUNDS["fma"][f][0]
    minus = tuple(-t for t in x)
    assert same(add(x, minus), tuple(torch.zeros_like(t) for t in x))
    if f.base != torch.float16:  # whose quotients and roots have subnormal tails here
        divisor = replace_zeros(y)
        assert div_error(div(x, divisor), x, divisor).max() <= BOUNDS["div"][f][0]
        root = sqrt(magnitude(x))
        assert sqrt_error(root, magnitude(x)).max() <= BOUNDS["sqrt"][f][0]
        for name in ("addcmul", "addcdiv"):
            result = composite(name, f, x, y, divisor, z)
            assert is_normalized(result)
            assert composite_error(name, result, x, y, divisor, z) <= composite_bound(name, f)
    for result in (add(x, y), mul(x, y), fma(x, y, z)):
        assert is_normalized(result)


@pytest.mark.thinned(of=2)
@every_format
def test_addition_and_multiplication_by_one_and_zero_change_nothing(f):
    x, _, _ = operands(f, 6, size=4_000)
    one, zero = torch.ones((), dtype=f.base), torch.zeros((), dtype=f.base)
    for result in (add(x, (zero,)), mul(x, (one,)), div(x, (one,)), fma(x, (one,), (zero,))):
        exact = total(x)
        error = units(total(result) - exact, exact, x)
        # Tails further away than a wide register reaches are lost.
        assert error.max() <= (0.02 if f.base == torch.bfloat16 else 0.3 if f.wide else 0)


@every_format
def test_addition_commutes_bit_for_bit(f):
    x, y, _ = operands(f, 7, size=4_000)
    assert same(add(x, y), add(y, x))


def composite_bound(name, f):
    """Of the error relative to the sizes of the two parts that are added, in units of u^n."""
    if f.wide == torch.float32:
        return 0.55 if f == bf16x2 else 1.5
    if f.terms == 2:
        return {"addcmul": 4.5, "addcdiv": 7.5, "lerp": 3.5}[name]
    quotient = BOUNDS["div"][f][0] if name == "addcdiv" else 0
    return quotient + {"addcmul": 2, "addcdiv": 2, "lerp": 3}[name] / 2 ** (f.terms - 1)


def rationals(x):
    scale = scale_of(x[0].dtype)
    return np.array([Fraction(int(n), 1 << scale) for n in total(x).ravel()], object)


def composite_error(name, result, x, a, b, value):
    """The error of an operation of four operands, relative to the sizes of what it adds."""
    R, X, A, B, V = (rationals(v) for v in (result, x, a, b, value))
    added, size = {
        "addcmul": lambda: (V * A * B, abs(X) + abs(V * A * B)),
        "addcdiv": lambda: (V * A / B, abs(X) + abs(V * A / B)),
        "lerp": lambda: (V * (A - X), abs(X) + abs(A)),
    }[name]()
    error = [abs(e) / s if s else Fraction(0) for e, s in zip(R - X - added, size, strict=True)]
    return float(max(error)) * 2.0 ** (BASES[x[0].dtype].precision * len(result))


def composite(name, f, x, a, b, value):
    return apply(name, x, a, b, value) if name != "lerp" else apply(name, x, a, value)


@pytest.mark.thinned(of=6)
@every_format
@pytest.mark.parametrize("name", ["addcmul", "addcdiv", "lerp"])
def test_composite_operations(f, name):
    rng = np.random.default_rng(8)
    low, high = (2, 4) if f.base == torch.float16 else (-3, 3)
    x, a, b = (expansion(rng, f.base, f.terms, 1_500, low, high) for _ in range(3))
    # Weights from 0 to 1; in float16 from 1/2 on, where their tails have all bits.
    value = expand(torch.rand(1_500, dtype=torch.float64) / 2 + 0.5 * (f == fp16x2), f)
    b = replace_zeros(b)
    result = composite(name, f, x, a, b, value)
    assert is_normalized(result)
    bound = composite_bound(name, f)
    assert 0.1 * bound <= composite_error(name, result, x, a, b, value) <= bound


def test_lerp_ends_where_it_should():
    x, y, _ = operands(bf16x2, 9, size=1_000)
    for weight, end in ((0.0, x), (1.0, y)):
        result = apply("lerp", x, y, (torch.tensor(weight, dtype=torch.float64),), format=bf16x2)
        exact = total(end)
        assert units(total(result) - exact, exact, result).max() <= 0.52


# ------------------------------------------------------------------------------- renormalization


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_renormalize(dtype, terms):
    bound = 1 / 2 ** (terms - 1)
    worst = 0.0
    for count in (4, 5, 6):
        given = values(np.random.default_rng(count), dtype, count, 10_000)
        if terms > 3:  # more bits than those hold
            given += tuple(x * 2.0 ** (-3 * BASES[dtype].precision) for x in given[::-1])
        result = renormalize(given, terms)
        assert is_normalized(result)
        exact = total(given)
        error = units(total(result) - exact, exact, result)
        assert error.max() <= bound * (1 + 2.0 ** -BASES[dtype].precision)
        worst = max(worst, error.max())
        # Once more changes nothing.
        assert same(renormalize(result, terms), result)
    assert worst >= 0.8 * bound


def test_renormalize_keeps_as_many_terms_as_there_are_and_six_at_most():
    given = values(np.random.default_rng(11), torch.float32, 8, 10)
    assert [len(renormalize(given[:k])) for k in (2, 3, 6, 7, 8)] == [2, 3, 6, 6, 6]
    assert (total(renormalize(given[:2])) == total(given[:2])).all()
    assert (total(renormalize(given[:3])) == total(given[:3])).all()


def test_renormalize_special_values():
    for case in ([torch.inf, 1.0], [1.0, -torch.inf], [torch.nan, 1.0], [torch.inf, -torch.inf]):
        leading, tail = renormalize([torch.tensor(v) for v in case])
        assert same((leading,), (torch.tensor(sum(case)),))
        assert tail == 0
    for case, negative in (([-0.0, -0.0], True), ([0.0, -0.0], False), ([1.0, -1.0], False)):
        leading, tail = renormalize([torch.tensor(v) for v in case])
        assert leading == tail == 0
        assert torch.signbit(leading) == negative


def test_renormalize_refuses():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="renormalize: 1 values into 1 terms; give two values"):
        renormalize([x])
    with pytest.raises(ValueError, match=r"renormalize: 2 values into 7 terms.* 2 to 6 terms"):
        renormalize([x, x], 7)
    with pytest.raises(TypeError, match=r"renormalize: .*torch.float32, torch.bfloat16"):
        renormalize([x, x.bfloat16()])


# -------------------------------------------------------------------------------- special values

SPECIAL = [0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan]


def with_zero_tails(leading, f):
    return (leading, *[torch.zeros_like(leading)] * (f.terms - 1))


@every_format
def test_special_values_are_those_of_the_base(f):
    x, y = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=f.base)] * 2).unbind(1)
    a, b = with_zero_tails(x, f), with_zero_tails(y, f)
    for function, plain in ((add, x + y), (mul, x * y)):
        assert same(function(a, b), with_zero_tails(plain, f))
    for result, plain in ((div(a, b), x / y), (sqrt(a), torch.sqrt(x))):
        unlike = ~plain.isfinite() | (plain == 0)
        assert same([t[unlike] for t in result], with_zero_tails(plain[unlike], f))
    x, y, z = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=f.base)] * 3).unbind(1)
    result = fma(*(with_zero_tails(t, f) for t in (x, y, z)))
    assert same(result, with_zero_tails(x * y + z, f))


@pytest.mark.thinned(of=6)
@every_format
def test_infinities_meet_expansions(f):
    x = expand(torch.tensor([1.1, -1.1, 3.3]), f)
    for special in (torch.inf, -torch.inf, torch.nan):
        plain = torch.full((3,), special, dtype=f.base)
        y = with_zero_tails(plain, f)
        lead = x[0]
        for result, expected in (
            (add(x, y), lead + plain),
            (mul(x, y), lead * plain),
            (mul(y, x), lead * plain),
            (div(x, y), lead / plain),
            (div(y, x), plain / lead),
            (fma(x, x, y), lead * lead + plain),
            (fma(x, y, x), lead * plain + lead),
            (grow(x, plain), lead + plain),
        ):
            assert same(result, with_zero_tails(expected, f))


@every_format
def test_negative_numbers_have_no_square_root(f):
    leading, *tails = sqrt(expand(torch.tensor([-1.1, -3.3]), f))
    assert leading.isnan().all()
    assert all((t == 0).all() for t in tails)


@pytest.mark.thinned(of=2)
@every_format
def test_overflow_leaves_zero_tails(f):
    largest = torch.tensor([1.0, -1.0], dtype=f.base) * torch.finfo(f.base).max
    x = with_zero_tails(largest, f)
    plain = largest * 2
    for result in (add(x, x), mul(x, with_zero_tails(largest.abs(), f)), grow(x, largest)):
        assert same(result, with_zero_tails(plain, f))
    least = torch.full_like(largest, torch.finfo(f.base).tiny)
    assert same(div(x, with_zero_tails(least, f)), with_zero_tails(plain, f))
    zero = torch.zeros_like(largest)
    assert same(div(x, with_zero_tails(zero, f)), with_zero_tails(plain, f))


@every_format
def test_cancellation_gives_plus_zero(f):
    x, _, _ = operands(f, 12, size=4_000)
    minus = tuple(-t for t in x)
    zero = tuple(torch.zeros_like(t) for t in x)
    assert same(add(x, minus), zero)
    assert same(add(minus, x), zero)
    one = with_zero_tails(torch.ones_like(x[0]), f)
    if f.wide is None:  # a wide register rounds x first
        assert same(fma(x, one, minus), zero)


@pytest.mark.thinned(of=2)
@every_format
def test_signed_zeros(f):
    minus = with_zero_tails(torch.tensor([-0.0], dtype=f.base), f)
    plus = with_zero_tails(torch.tensor([0.0], dtype=f.base), f)
    x = expand(torch.tensor([2.2]), f)
    y = tuple(-t for t in x)
    assert same(add(minus, minus), minus)
    assert same(add(minus, plus), plus)
    assert same(mul(minus, x), minus)
    assert same(mul(plus, y), minus)
    assert same(mul(minus, y), plus)
    assert same(div(minus, x), minus)
    assert same(sqrt(minus), minus)
    assert same(grow(minus, torch.tensor([-0.0], dtype=f.base)), minus)
    assert same(fma(minus, x, minus), minus)


@pytest.mark.parametrize("f", [bf16x2, bf16x3, fp16x2], ids=str)
def test_underflow_costs_no_more_than_the_least_subnormal(f):
    rng = np.random.default_rng(13)
    base = BASES[f.base]
    low, high = base.quantum, base.emin + 6
    x, y = pair(rng, f.base, f.terms, 10_000, low, high)
    result = add(x, y)
    assert is_normalized(result)
    # Sums of multiples of the least subnormal: what fits is exact, the rest within the bound.
    assert add_error(result, x, y).max() <= BOUNDS["add"][f][0]
    one = expansion(rng, f.base, f.terms, 10_000, -2, 0)
    result = mul(x, one)
    scale = -2 * base.quantum
    exact = total(x) * total(one)
    error = abs(total(result, scale) - exact)
    assert is_normalized(result)
    assert (error <= np.maximum(abs(exact) >> (f.precision - 1), 1 << (scale // 2))).all()


# ------------------------------------------------------------------ shapes, layouts, other operands


def everything(f, x, y, z):
    yield add(x, y)
    yield mul(x, y)
    yield div(x, y)
    yield fma(x, y, z)
    yield fma(z, x, y)
    yield sqrt(magnitude(x))
    yield grow(x, y[0])
    yield renormalize([*x, *y], f.terms)
    yield apply("addcmul", x, y, z, y)
    yield apply("addcdiv", x, y, y, z)
    yield apply("lerp", x, y, z)


SHAPES = [
    ((3, 1), (1, 4), (4,)),
    ((), (2, 3), ()),
    ((5,), (), (1,)),
    ((), (), ()),
    ((0, 3), (3,), ()),
    ((2, 1, 3), (4, 1), (2, 1, 1)),
]


@pytest.mark.thinned(of=18)
@every_format
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcasting(f, shapes):
    torch.manual_seed(0)
    x, y, z = (expand(torch.rand(s, dtype=torch.float64) + 0.5, f) for s in shapes)
    spread = [torch.broadcast_tensors(*terms) for terms in zip(x, y, z, strict=True)]
    wide = [tuple(t.contiguous() for t in v) for v in zip(*spread, strict=True)]
    shape = torch.broadcast_shapes(*shapes)
    for result, expected in zip(everything(f, x, y, z), everything(f, *wide), strict=True):
        assert same([t.expand(shape) for t in result], expected)
        assert len({t.data_ptr() for t in result}) == f.terms or result[0].numel() == 0
    for result, s in ((add(x, y), shapes[:2]), (sqrt(x), shapes[:1]), (grow(x, y[0]), shapes[:2])):
        assert {t.shape for t in result} == {torch.broadcast_shapes(*s)}


@pytest.mark.thinned(of=6)
@every_format
def test_terms_need_not_be_contiguous(f):
    torch.manual_seed(1)
    x, y, z = (expand(torch.rand(6, 4, dtype=torch.float64) + 0.5, f) for _ in range(3))
    strided = [
        tuple(torch.stack([t, t * 0], -1)[..., 0] for t in x),
        tuple(t.t().contiguous().t() for t in y),
        tuple(t.flip(0).flip(0) for t in z),
    ]
    assert not strided[0][0].is_contiguous()
    assert not strided[1][0].is_contiguous()
    for result, expected in zip(everything(f, *strided), everything(f, x, y, z), strict=True):
        assert same(result, expected)


@pytest.mark.parametrize("f", [bf16x2, fp32x2], ids=str)
def test_large_tensors_compute_as_small_ones_do(f):
    torch.manual_seed(2)
    x, y = (expand(torch.rand(700, 701, dtype=torch.float64) + 0.5, f) for _ in range(2))
    z = expand(torch.rand(701, dtype=torch.float64), f)
    for operation, operands in (("add", (x, y)), ("mul", (x, z)), ("fma", (x, y, z))):
        whole = apply(operation, *operands)
        rows = [
            apply(operation, *(tuple(t[i] if t.dim() > 1 else t for t in v) for v in operands))
            for i in range(0, 700, 100)
        ]
        for i, row in enumerate(rows):
            assert same(tuple(t[100 * i] for t in whole), row)


@pytest.mark.thinned(of=3)
@every_format
def test_inputs_stay_as_they_are_and_results_are_new(f):
    x, y, z = operands(f, 14, size=50)
    y = replace_zeros(y)
    before = [tuple(t.clone() for t in v) for v in (x, y, z)]
    inputs = {t.data_ptr() for v in (x, y, z) for t in v}
    for result in everything(f, x, y, z):
        assert not inputs & {t.data_ptr() for t in result}
    assert all(same(v, w) for v, w in zip((x, y, z), before, strict=True))


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize("plain", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@every_format
def test_plain_operands(f, plain):
    rng = np.random.default_rng(15)
    x = magnitude(expansion(rng, f.base, f.terms, 4_000, *MIDDLE[f.base]))
    y = numbers(rng, plain, 4_000, *MIDDLE[f.base]).tensor().abs()
    bound = 1 / 2 ** (f.terms - 1)  # of splitting an operand of more bits
    for name, result, error in (
        ("add", add(x, (y,)), add_error),
        ("add", add((y,), x, format=f), add_error),
        ("mul", mul(x, (y,)), mul_error),
        ("mul", mul((y,), x, format=f), mul_error),
    ):
        assert all(t.dtype == f.base for t in result)
        assert is_normalized(result)
        assert error(result, x, (y,)).max() <= BOUNDS[name][f][0] + bound
    if f.base != torch.float16:
        assert div_error(div(x, (y,)), x, (y,)).max() <= BOUNDS["div"][f][0] + bound
    # Under cancellation the error of entering is that of y.
    minus = add((y,), tuple(-t for t in x), format=f)
    scale = max(-BASES[plain].quantum, -BASES[f.base].quantum)
    exact = integers(y, scale) - total(x, scale)
    error = units(total(minus, scale) - exact, abs(integers(y, scale)) + abs(exact), x)
    assert error.max() <= BOUNDS["add"][f][0] + bound


@every_format
def test_whole_numbers_enter_with_all_their_bits(f):
    x = expand(torch.tensor([1.0, 2.0, 3.0]), f)
    numbers = torch.tensor([3, -5, 7])
    assert collapse(mul(x, (numbers,)), torch.float64).tolist() == [3.0, -10.0, 21.0]
    if f.precision >= 24:
        large = torch.tensor([2**30 + 1] * 3)
        result = add((large,), tuple(-t for t in expand(large.double() - 5, f)), format=f)
        assert collapse(result, torch.float64).tolist() == [5.0] * 3
    if f == bf16x2:
        # More bits than a float32 register has.
        large = torch.tensor([2**25 + 1] * 3)
        result = add((large,), expand(torch.full((3,), -(2.0**25)), f), format=f)
        assert collapse(result, torch.float64).tolist() == [1.0] * 3


def test_a_float64_number_enters_with_more_bits_than_a_term_has():
    x = expand(torch.ones(3), bf16x2)
    decay = torch.tensor(0.999, dtype=torch.float64)
    result = collapse(mul(x, (decay,)), torch.float64)
    assert (result - 0.999).abs().max() < 0.999 * 2.0**-16
    assert collapse(mul(x, (decay.bfloat16(),)), torch.float64).tolist() == [1.0] * 3


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    ("source", "f"),
    [(fp32x2, fp64x2), (fp32x3, fp64x2), (fp32x3, fp32x2), (bf16x3, bf16x2), (bf16x2, fp32x2),
     (bf16x3, fp32x3), (fp64x2, fp32x3), (fp64x2, fp32x2), (fp32x2, bf16x3), (fp64x2, bf16x2),
     (bf16x2, bf16x3), (fp32x2, fp32x3)],
    ids=str,
)  # fmt: skip
def test_expansions_of_other_formats_enter_with_all_their_terms(source, f):
    rng = np.random.default_rng(16)
    x = magnitude(expansion(rng, source.base, source.terms, 2_000, -3, 3))
    y = magnitude(expansion(rng, f.base, f.terms, 2_000, -3, 3))
    for result in (add(x, y, format=f), add(y, x, format=f)):
        assert is_normalized(result)
        assert add_error(result, x, y).max() <= BOUNDS["add"][f][0] + 1 / 2 ** (f.terms - 1)
    special = [torch.tensor([v, 1.0], dtype=source.base) for v in (torch.inf, 0.0, 0.0)]
    y = tuple(t[:2] for t in y)
    leading, *tails = add(special[: source.terms], y, format=f)
    assert leading[0] == torch.inf
    assert all(t[0] == 0 for t in tails)


@pytest.mark.parametrize("name", ["bf16x3", "fp16x3", "fp64x3"])
def test_formats_without_a_name_compute_too(name):
    f = Format.from_name(name)
    x, y = (expand(torch.tensor([v], dtype=torch.float64), f) for v in (300.0, 7.0))
    for result in (add(x, y), mul(x, y), div(x, y), sqrt(x), fma(x, y, x)):
        assert len(result) == 3
        assert is_normalized(result)
    assert collapse(add(x, y), torch.float64) == 307.0
    if name != "fp16x3":  # whose third terms are subnormal
        assert div_error(div(x, y), x, y).max() <= 0.251
        assert sqrt_error(sqrt(x), x).max() <= 0.251


@every_format
def test_expand_and_collapse_return_what_they_were_given(f):
    rng = np.random.default_rng(17)
    x = numbers(rng, f.base, 2_000, *MIDDLE[f.base]).tensor()
    terms = expand(x, f)
    assert same(terms, with_zero_tails(x, f))
    assert terms[0].data_ptr() != x.data_ptr()
    assert same((collapse(terms, f.base),), (x,))


# --------------------------------------------------------------------------------------- errors


def test_errors_name_the_operation_and_the_repair():
    x = expand(torch.ones(3), bf16x2)
    plain = torch.ones(3)
    with pytest.raises(TypeError, match=r"add: operands are sequences of tensors.*\(x,\)"):
        add(plain, x)
    with pytest.raises(ValueError, match=r"mul: the first operand .*say the format .* format="):
        mul((plain,), x)
    with pytest.raises(
        ValueError, match=r"div: the first operand has terms \(torch.float32, torch"
    ):
        div((plain, plain.bfloat16()), x)
    with pytest.raises(TypeError, match=r"expand: 'bf16x9' is not a format"):
        expand(plain, "bf16x9")


def test_samples_hold_what_they_promise():
    # Guards the generators: all kinds of hard cases occur.
    for f in FORMATS:
        x, y, _ = operands(f, 18, size=4_000)
        assert is_normalized(x)
        assert is_normalized(y)
        exact = total(x) + total(y)
        size = abs(total(x))
        assert ((exact == 0) & (size != 0)).any()
        assert ((exact != 0) & (abs(exact) << (f.base_precision) < size)).any()
        assert (x[-1] == 0).any()
        assert len({e for e, _ in itertools.groupby(sorted((x[0] < 0).tolist()))}) == 2
