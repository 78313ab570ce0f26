"""Error-free transformations: exact for every bit pattern, in eager and in compiled code."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.oracle import BASES, integers, ratio, round_integers, scale_of, value
from common.strategies import (
    Floats,
    expansion_floats,
    number,
    numbers,
    pair,
    partner_floats,
    tensors,
)
from mcftensor.arithmetic import eft
from mcftensor.formats import bf16x2
from mcftensor.passes import expansion

DTYPES = list(BASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

# Exponents between which neither sums nor products, nor their errors, leave the type.
SAFE = {
    torch.bfloat16: (-55, 60),
    torch.float16: (-2, 7),
    torch.float32: (-50, 60),
    torch.float64: (-480, 500),
}
# And where only sums matter.
WHOLE = {dtype: (base.emin - base.precision + 1, base.emax - 1) for dtype, base in BASES.items()}


def hard_pairs(dtype, size=20_000, seed=0, where=SAFE):
    (x, *_), (y, *_) = pair(np.random.default_rng(seed), dtype, 2, size, *where[dtype])
    return x, y


def same(a, b):
    """Equal bit for bit, all NaNs alike."""
    pattern = BASES[a.dtype].pattern
    return bool(((a.view(pattern) == b.view(pattern)) | (a.isnan() & b.isnan())).all())


# ------------------------------------------------------------------------------------------ sums


@every_dtype
def test_two_sum_is_exact_over_the_whole_range(dtype):
    a, b = hard_pairs(dtype, where=WHOLE)
    s, e = eft.two_sum(a, b)
    exact = integers(a) + integers(b)
    assert (integers(s) == round_integers(exact, dtype)).all()
    assert (integers(s) + integers(e) == exact).all()


@every_dtype
def test_fast_two_sum_is_exact_on_ordered_operands(dtype):
    a, b = hard_pairs(dtype, where=WHOLE)
    swap = a.abs() < b.abs()
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    a = torch.cat([a, torch.zeros_like(b)])
    b = torch.cat([b, b])
    s, e = eft.fast_two_sum(a, b)
    assert (integers(s) + integers(e) == integers(a) + integers(b)).all()


@every_dtype
def test_fast_two_sum_needs_order_of_exponents_only(dtype):
    rng = np.random.default_rng(1)
    low, high = SAFE[dtype]
    first = numbers(rng, dtype, 5_000, low, high)
    second = numbers(rng, dtype, 5_000, low, high)
    a = first.tensor()
    b = Floats(dtype, second.negative, first.exponent, second.significand).tensor()
    assert (a.abs() < b.abs()).any()
    s, e = eft.fast_two_sum(a, b)
    assert (integers(s) + integers(e) == integers(a) + integers(b)).all()


@every_dtype
def test_fast_two_sum_fails_often_on_unordered_operands(dtype):
    rng = np.random.default_rng(2)
    p = BASES[dtype].precision
    low, _ = SAFE[dtype]
    a = numbers(rng, dtype, 2_000, low, low).tensor()
    b = numbers(rng, dtype, 2_000, low + p // 2, low + p // 2).tensor()
    s, e = eft.fast_two_sum(a, b)
    wrong = integers(s) + integers(e) != integers(a) + integers(b)
    assert wrong.mean() > 0.2


def bf16_grid(difference):
    """All 128 significands against all 128, of both signs, at a difference of exponents."""
    significand = torch.arange(128, 256, dtype=torch.float64)
    a = significand[:, None, None] * torch.tensor([1.0, -1.0])
    b = significand[None, :, None] * 2.0**difference
    return torch.broadcast_tensors(a.to(torch.bfloat16), b.to(torch.bfloat16))


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("difference", range(-24, 25))
def test_every_bf16_sum(difference):
    a, b = bf16_grid(difference)
    s, e = eft.two_sum(a, b)
    exact = a.double() + b.double()
    # Two significands of 8 bits, 24 places apart, fit into the 53 bits of float64.
    assert (s.double() + e.double() == exact).all()
    assert ((exact - s.double()).abs() <= (exact - torch.nextafter(s, s * 2).double()).abs()).all()
    ordered = eft.fast_two_sum(*((a, b) if difference <= 0 else (b, a)))
    assert same(ordered[0], s)
    assert same(ordered[1].abs(), e.abs())


@pytest.mark.parametrize("difference", [-40, -8, 0, 8, 40])
def test_every_bf16_product(difference):
    a, b = bf16_grid(difference)
    p, e = eft.two_prod(a, b)
    exact = a.double() * b.double()
    assert (p.double() + e.double() == exact).all()
    assert same(p, exact.float().bfloat16())  # the float32 is exact


@pytest.mark.thinned(of=2)
@given(st.data())
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_sum_of_single_numbers(dtype, data):
    low, high = SAFE[dtype]
    a, b = (data.draw(number(dtype, low, high)) for _ in range(2))
    assert value(eft.two_sum(a, b)) == value([a, b])


# -------------------------------------------------------------------------------------- products


@every_dtype
def test_two_prod_is_exact_where_its_error_does_not_underflow(dtype):
    a, b = hard_pairs(dtype)
    p, e = eft.two_prod(a, b)
    scale = scale_of(dtype)
    exact = integers(a) * integers(b)
    assert (integers(p, 2 * scale) == round_integers(exact, dtype, 2 * scale)).all()
    assert (integers(p, 2 * scale) + integers(e, 2 * scale) == exact).all()


@every_dtype
def test_two_prod_is_exact_down_to_the_stated_exponents_and_not_below(dtype):
    base = BASES[dtype]
    least = base.emin + base.precision - 1
    assert least == {8: -119, 11: -4, 24: -103, 53: -970}[base.precision]
    rng = np.random.default_rng(3)
    for total, exact_everywhere in ((least, True), (least - 2, False)):
        first = numbers(rng, dtype, 4_000, base.emin // 2, 0)
        second = numbers(rng, dtype, 4_000, 0, 0)
        a = first.tensor()
        b = Floats(dtype, second.negative, total - first.exponent, second.significand).tensor()
        p, e = eft.two_prod(a, b)
        scale = 2 * scale_of(dtype)
        good = integers(p, scale) + integers(e, scale) == integers(a) * integers(b)
        assert good.all() == exact_everywhere


def test_two_prod_of_large_float64():
    # Dekker's halves of 2^1000 and more would overflow without scaling.
    rng = np.random.default_rng(4)
    a = numbers(rng, torch.float64, 4_000, 900, 1022).tensor()
    for low, high in ((-1000, -980), (-10, 0)):
        b = numbers(rng, torch.float64, 4_000, low, high).tensor()
        p, e = eft.two_prod(a, b)
        scale = 2 * scale_of(torch.float64)
        assert (integers(p, scale) + integers(e, scale) == integers(a) * integers(b)).all()


def test_two_prod_of_which_only_the_halves_overflow():
    below = torch.tensor(2.0**512 * (1 - 2.0**-53), dtype=torch.float64)
    for a, b in ((below, below), (below * 2.0**500, below * 2.0**-500), (-below, below)):
        p, e = eft.two_prod(a, b)
        exact = Fraction(a.item()) * Fraction(b.item())
        assert Fraction(p.item()) + Fraction(e.item()) == exact


@every_dtype
def test_split_halves(dtype):
    a = torch.cat(hard_pairs(dtype, where=WHOLE))
    hi, lo = eft.split(a)
    assert (integers(hi) + integers(lo) == integers(a)).all()
    bits = {8: (4, 3), 11: (5, 5), 24: (12, 11), 53: (26, 26)}[BASES[dtype].precision]
    for half, most in zip((hi, lo), bits, strict=True):
        n = np.abs(integers(half))
        width = [int(k).bit_length() - ((k & -k).bit_length() - 1) if k else 0 for k in n]
        assert max(width) <= most


@every_dtype
def test_split_of_the_largest_numbers(dtype):
    base = BASES[dtype]
    significand = (1 << base.precision) - 1 - np.arange(100)
    shape = np.zeros(100, np.int64)
    a = Floats(dtype, shape == 0, shape + base.emax, significand).tensor()
    hi, lo = eft.split(a)
    assert (integers(hi) + integers(lo) == integers(a)).all()
    assert hi.isfinite().all()
    special = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    hi, lo = eft.split(special)
    assert same(hi, special)
    assert same(lo, torch.zeros_like(lo))


# --------------------------------------------------------------------------- fma and square root


@pytest.mark.thinned(of=2)
@every_dtype
def test_fma_is_rounded_once(dtype):
    rng = np.random.default_rng(5)
    low, high = SAFE[dtype]
    x = expansion_floats(rng, dtype, 2, 20_000, low, high)
    (a, _), (b, _) = tensors(x), tensors(partner_floats(rng, x, low, high))
    # Addends that cancel the product, sit at its ties, or have nothing to do with it.
    p, e = eft.two_prod(a, b)
    other = numbers(rng, dtype, a.numel(), low, high).tensor()
    half = (p.abs() * 2.0 ** -BASES[dtype].precision).to(dtype)
    scale = scale_of(dtype)
    for c in (-p, -e, other, half, -torch.nextafter(p, torch.zeros_like(p)), torch.zeros_like(p)):
        exact = integers(a) * integers(b) + integers(c, 2 * scale)
        result = integers(eft.fma(a, b, c), 2 * scale)
        assert (result == round_integers(exact, dtype, 2 * scale)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sqrt_of_every_16_bit_number(dtype):
    a = torch.arange(0, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    a = a[a.isfinite()]
    scale = scale_of(dtype)
    # Twice the rounded root's neighbours, midway: below and above x.
    root = eft.sqrt(a)
    below = integers(root) + integers(torch.nextafter(root, torch.zeros_like(root)))
    above = integers(root) + integers(torch.nextafter(root, torch.full_like(root, torch.inf)))
    four_x = 4 * integers(a) * (1 << scale)
    assert ((below * below <= four_x) & (four_x <= above * above)).all()


@pytest.mark.parametrize(
    ("dtype", "size", "low", "high"),
    [
        (torch.float32, 40_000, -120, 90),
        (torch.float64, 40_000, -300, 90),
        (torch.float32, 4_000, -149, -100),  # subnormals
        (torch.float64, 4_000, -1074, -950),
        (torch.float32, 4_000, 90, 127),
        (torch.float64, 4_000, 700, 1023),
    ],
)
def test_sqrt_is_rounded_to_nearest_where_torchs_is_not(dtype, size, low, high):
    a = numbers(np.random.default_rng(6), dtype, size, low, high)
    a = a.tensor().abs()
    a = a[a > 0]
    scale = scale_of(dtype)
    root = eft.sqrt(a)
    below = integers(root) + integers(torch.nextafter(root, torch.zeros_like(root)))
    above = integers(root) + integers(torch.nextafter(root, torch.full_like(root, torch.inf)))
    four_x = 4 * integers(a) * (1 << scale)
    assert ((below * below <= four_x) & (four_x <= above * above)).all()


@every_dtype
def test_sqrt_special_values(dtype):
    base = BASES[dtype]
    largest, least = torch.finfo(dtype).max, 2.0**base.quantum
    a = torch.tensor([0.0, -0.0, torch.inf, torch.nan, -1.0, largest, least], dtype=torch.float64)
    a = a.to(dtype)
    assert same(eft.sqrt(a[:5]), torch.sqrt(a[:5]))
    assert torch.allclose(eft.sqrt(a[5:]), torch.sqrt(a[5:]), rtol=2.0**-base.precision * 2, atol=0)


# ------------------------------------------------------------------ special values, shapes, errors

SPECIAL = [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan]


@every_dtype
def test_special_values(dtype):
    a, b = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=dtype)] * 2).unbind(1)
    s, e = eft.two_sum(a, b)
    assert same(s, a + b)
    assert (e.isfinite() == s.isfinite()).all()
    p, e = eft.two_prod(a, b)
    assert same(p, a * b)
    assert (e.isfinite() == p.isfinite()).all()
    a, b, c = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=dtype)] * 3).unbind(1)
    assert same(eft.fma(a, b, c), a * b + c)


@every_dtype
def test_overflow_shows(dtype):
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    for transform in (eft.two_sum, eft.two_prod, eft.fast_two_sum):
        rounded, error = transform(largest, largest)
        assert rounded == torch.inf
        assert not error.isfinite()


BINARY = [eft.two_sum, eft.fast_two_sum, eft.two_prod]


@pytest.mark.parametrize("transform", BINARY)
def test_shapes_broadcast(transform):
    a, b = torch.rand(3, 1), torch.rand(4)
    for result in transform(a, b):
        assert result.shape == (3, 4)
    whole = transform(*(t.contiguous() for t in torch.broadcast_tensors(a, b)))
    assert all(same(x, y) for x, y in zip(transform(a, b), whole, strict=True))
    for result in (*transform(torch.tensor(1.0), torch.tensor(2.0)), *eft.split(torch.tensor(1.0))):
        assert result.shape == ()
    for result in transform(torch.empty(0, 2), torch.empty(2)):
        assert result.shape == (0, 2)


def test_inputs_need_not_be_contiguous():
    a, b, c = torch.rand(3, 6, 4).unbind()
    for transform, operands in (
        (eft.two_sum, (a, b)), (eft.two_prod, (a, b)), (eft.split, (a,)), (eft.fma, (a, b, c)),
        (eft.sqrt, (a,)),
    ):  # fmt: skip
        strided = [torch.stack([x, x], -1)[..., 0].t().contiguous().t() for x in operands]
        results = (transform(*operands), transform(*strided))
        pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True)
        assert all(same(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("transform", "count"),
    [(eft.two_sum, 2), (eft.fast_two_sum, 2), (eft.two_prod, 2), (eft.split, 1), (eft.fma, 3),
     (eft.sqrt, 1)],
)  # fmt: skip
def test_dtypes_that_are_refused(transform, count):
    name = transform.__name__
    with pytest.raises(TypeError, match=rf"{name}: operands of dtypes torch.int64.*\.to\(dtype\)"):
        transform(*[torch.arange(3)] * count)
    if count > 1:
        mixed = [torch.ones(3)] * (count - 1) + [torch.ones(3, dtype=torch.bfloat16)]
        with pytest.raises(TypeError, match=rf"{name}: .*torch.float32, .*torch.bfloat16"):
            transform(*mixed)


# ---------------------------------------------------------------------------- compilers, operators


def compiled(test):
    """A test that compiles; the compiler imports parts of torch.jit, which warn."""
    test = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")(test)
    return pytest.mark.usefixtures("_fresh_compiler")(test)


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_transformations_keep_their_bits(dtype):
    a, b = hard_pairs(dtype, size=4_096)

    def transform(a, b):
        s, e = eft.two_sum(a, b)
        f, g = eft.fast_two_sum(s, e)
        p, q = eft.two_prod(a, b)
        h, k = eft.split(a)
        return s, e, f, g, p, q, h, k, eft.fma(a, b, -p), eft.sqrt(a.abs())

    results = torch.compile(transform, fullgraph=True)(a, b)
    assert all(same(x, y) for x, y in zip(results, transform(a, b), strict=True))


@compiled
def test_transformations_inlined_in_other_compiled_code_keep_their_bits():
    a, b = hard_pairs(torch.bfloat16, size=4_096)
    terms = expansion.expand(a.float() * 1.001, bf16x2)

    def step(a, b, terms):
        # What surrounds the calls is fused, in float32, by the compiler's default options.
        a = a * 2
        s, e = eft.two_sum(a, b)
        grown = expansion.grow(terms, b * 0.5)
        return s * 2, e * 2, *grown, grown[0] * 2

    results = torch.compile(step, fullgraph=True)(a, b, terms)
    assert all(same(x, y) for x, y in zip(results, step(a, b, terms), strict=True))
    assert (results[1] != 0).float().mean() > 0.1


def operator_samples():
    a, b, c = (torch.rand(3, 4).bfloat16() for _ in range(3))
    pair, wide = [a, (a * 2.0**-10).bfloat16()], torch.rand(4, dtype=torch.float64)
    ops = torch.ops.mcftensor
    yield ops.two_sum, (a, b)
    yield ops.two_sum, (a, b[0])
    yield ops.fast_two_sum, (a, b)
    yield ops.two_prod, (a, b)
    yield ops.split, (a,)
    yield ops.fma, (a, b, c)
    yield ops.fma, (a, b[0], c[0, 0])
    yield ops.sqrt, (a,)
    key = torch.tensor(7)
    yield ops.draw_key, (torch.device("cpu"),)
    bf16, double = "bfloat16", "float64"
    for format, drawn in (("bf16x3", None), ("fp64x2", None), ("bf16x2sr", key)):
        yield ops.recode, ([wide], double, format, drawn)
        yield ops.recode, (pair, "bf16x2", format, drawn)
    yield ops.collapse, (pair, "bf16x2", torch.float32)
    yield ops.collapse, (pair, "bf16x2", torch.bfloat16)
    yield ops._renormalize, ([a, b, c], 2)
    yield ops._renormalize, ([a, b], 3)
    for format in ("bf16x2", "bf16x3", "fp32x2"):
        yield ops.evaluate, ("add", format, [*pair, wide], ["bf16x2", double], [])
    yield ops.evaluate, ("add", "bf16x2sr", [*pair, wide], ["bf16x2", double], [key])
    yield ops.evaluate, ("mul", "bf16x2", [a, b], [bf16, bf16], [])
    three = ["bf16x2", "bf16x2", double]
    yield ops.evaluate, ("lerp", "fp32x2", [*pair, *pair, wide[0]], three, [])
    two_sets = [pair[0], pair[0] * 2, pair[1], pair[1] * 2, wide, wide[:1]]
    yield ops.evaluate, ("add", "bf16x3", two_sets, ["bf16x2", double], [])
    yield from step_samples(ops)


def step_samples(ops):
    def quantity(terms):
        first = torch.rand(5).bfloat16() + 1
        return [first * 2.0 ** (-9 * i) for i in range(terms)]

    def settings(**given):
        numbers = [torch.tensor(x, dtype=torch.float64) for x in given.values()]
        return [*given], numbers

    p, m, v, sums = (quantity(terms) for terms in (3, 1, 2, 2))
    g, step = torch.randn(5).bfloat16(), torch.tensor(3.0)
    scale, bad, key = torch.tensor(2.0), torch.tensor(0.0), torch.tensor(7)
    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 0.1}
    nearest = ["bfloat16", "bf16x3", "bfloat16", "bf16x2"]
    yield ops.step_, ("_fused_adam_", nearest, [*p, *m, *v], [g], [step], [], *settings(**adam))
    names, numbers = settings(**adam)
    scaled = [*names, "grad_scale", "found_inf"], [*numbers, scale, bad]
    yield ops.step_, ("_fused_adam_", nearest, [*p, *m, *v], [g], [step], [], *scaled)
    drawn = ["bfloat16", "bf16x2sr", "bfloat16", "bf16x2sr"]
    yield (
        ops.step_,
        ("_fused_adam_", drawn, [*p[:2], *m, *v], [g], [step], [key], *settings(**adam)),
    )
    several = [x.clone() * n for x in (*p[:2], *m, *v) for n in (1, 2)]
    rows = ([g, g * 2], [step, step + 1], [key, key + 1])
    yield ops.step_, ("_fused_adam_", drawn, several, *rows, *settings(**adam))
    sgd = settings(lr=1e-3, momentum=0.9, l2=0.1, nesterov=1.0)
    yield ops.step_, ("_fused_sgd_", ["bfloat16", "bf16x3", "bf16x2"], [*p, *v], [g], [], [], *sgd)
    adagrad = settings(lr=1e-3, lr_decay=0.1, l2=0.1, eps=1e-8)
    formats = ["bfloat16", "bf16x3", "bf16x2"]
    yield ops.step_, ("_fused_adagrad_", formats, [*p, *sums], [g], [step], [], *adagrad)
    yield ops.unscale_, ([g, g * 2], "bfloat16", scale)
    yield ops.unscale_, ([*v], "bf16x2", scale)


@pytest.mark.thinned(of=12)
@pytest.mark.unwatched("opcheck's own modes do not work under the mode that watches")
@pytest.mark.parametrize(("operator", "arguments"), [*operator_samples()])
def test_operators_keep_pytorchs_rules(operator, arguments):
    torch.library.opcheck(operator.default, arguments)


def test_errors_of_two_sums_are_as_large_as_they_can_be():
    # Guards the generator: without hard cases the tests above would show little.
    a, b = hard_pairs(torch.bfloat16)
    s, e = eft.two_sum(a, b)
    share = ratio(integers(e), integers(s))[(integers(s) != 0)] * 2.0**8
    assert share.max() > 0.99
    assert (integers(e) == 0).mean() > 0.1
    assert [k for k, _ in itertools.groupby(sorted((a == -b).tolist()))] == [False, True]
