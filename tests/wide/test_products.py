"""Products of matrices by exact slices: bounds, exactly, and bits without an order."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import mcftensor as mcf
from common.oracle import is_normalized, value
from mcftensor.arithmetic.base_types import BASES
from mcftensor.wide import products
from mcftensor.wide.products import sliced_product
from mcftensor.wide.slices import LONGEST, cut, exponents, width_for
from support.helpers import assert_same_terms, sample
from support.pretended import Misplaced, pretended

LONG = (mcf.fp64x2, mcf.fp32x3)
MACHINES = [
    (mcf.fp64x2, torch.float64),
    (mcf.Format(torch.float64, 3), torch.float64),
    (mcf.fp32x3, torch.float64),
    (mcf.fp32x3, torch.float32),
    (mcf.fp32x2, torch.float64),
    (mcf.fp32x2, torch.float32),
    (mcf.bf16x3, torch.float32),
    (mcf.fp16x2, torch.float32),
]
over_machines = pytest.mark.parametrize(
    ("format", "machine"), MACHINES, ids=lambda x: x.name if hasattr(x, "name") else str(x)[6:]
)
over_long = pytest.mark.parametrize("format", LONG, ids=lambda f: f.name)


def spread(format, *shape, by, seed=0):
    """Numbers with all terms, whose exponents are spread."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-by, by + 1, shape, generator=generator)
    return sample(format, *shape, seed=seed) * torch.ldexp(torch.ones(shape), powers)


def rationals(terms):
    flat = [x.reshape(-1) for x in terms]
    return [value([x[i : i + 1] for x in flat]) for i in range(flat[0].numel())]


def exact(x, y):
    """The elements of a product, and those of the product of magnitudes."""
    rows = [rationals([t[i] for t in x]) for i in range(len(x[0]))]
    columns = [rationals([t[:, j] for t in y]) for j in range(y[0].shape[1])]
    terms = [[a * b for a, b in zip(r, c, strict=True)] for r in rows for c in columns]
    return [sum(t) for t in terms], [sum(map(abs, t)) for t in terms]


def product(x, y, terms, bits, machine):
    found = sliced_product([t[None] for t in x], [t[None] for t in y], terms, bits, machine)
    return [t[0] for t in found]


def largest_error(x, y, terms, bits, machine):
    """In units of |A||B|."""
    found = product(x, y, terms, bits, machine)
    assert is_normalized(found)
    errors = [Fraction(0)]
    for a, b, size in zip(rationals(found), *exact(x, y), strict=True):
        assert size or not a
        errors.append(abs(a - b) / size if size else Fraction(0))
    return max(errors)


@pytest.mark.thinned(of=12)
@over_machines
@pytest.mark.parametrize("by", [0, 4, 12])
def test_the_bound(format, machine, by):
    terms = 3 if machine == torch.float32 and format.precision > 48 else format.terms
    by = 0 if format == mcf.fp16x2 else by
    for inner in (1, 2, 9, 130):
        x = spread(format, 3, inner, by=by).components
        y = spread(format, inner, 4, by=by, seed=1).components
        error = largest_error(x, y, max(terms, 2), format.precision, machine)
        assert error <= Fraction(16) / 2**format.precision


@pytest.mark.parametrize("machine", LONGEST, ids=str)
def test_the_bound_is_come_near(machine):
    """Large elements of one matrix meet small ones of the other, as small as slices allow."""
    bits, worst = 20, Fraction(0)
    for gap in range(4, 24, 4):
        generator = torch.Generator().manual_seed(gap)
        x, y = torch.rand(2, 3, 3, dtype=torch.float64, generator=generator)
        x[:, 1:], y[:1] = x[:, 1:] * 2.0**-gap, y[:1] * 2.0**-gap
        x, y = ([z.to(machine)] for z in (x, y))
        for requested in range(bits, bits + 12):
            error = largest_error(x, y, 3, requested, machine)
            assert error <= Fraction(16) / 2**requested
            worst = max(worst, error / (Fraction(16) / 2**requested))
    assert worst > Fraction(1, 16)


@pytest.mark.parametrize("machine", LONGEST, ids=str)
def test_sums_of_products_of_slices_are_exact(machine):
    precision = BASES[machine].precision
    for inner in (1, 2, 3, 31, 32, 33, 512, 1000, 1024, 1025, 2**18):
        width = width_for(inner, machine)
        largest = 2 ** (2 * width.bits - 2) * inner
        assert largest * width.together <= 2**precision
        assert 2 * width.bits + 3 <= precision
        # With one bit more, sums of products would not be exact, unless slices are as wide as any.
        is_widest = width.bits == width_for(1, machine).bits
        assert is_widest or 4 * largest > 2**precision
    with pytest.raises(ValueError, match="inner length"):
        width_for(LONGEST[machine] + 1, machine)


@pytest.mark.thinned(of=2)
@over_machines
def test_slices_are_short_and_add_up(format, machine):
    x = [
        t.to(machine) for t in spread(format, 4, 50, by=0 if format == mcf.fp16x2 else 5).components
    ]
    width = width_for(50, machine)
    exponent = exponents(x[0])
    slices = cut(x, exponent, width, 40)
    integers = slices.double() * 2.0 ** (width.bits - 1)
    if machine == torch.float32:  # PyTorch may multiply them as TF32 or bfloat16 numbers
        assert torch.equal(slices.bfloat16().float(), slices)
    assert torch.equal(integers, integers.round())
    assert slices.abs().max() <= 1
    wide = slices.double()
    for i, j in itertools.product(range(4), range(50)):
        whole = sum(Fraction(s[i, j].item()) / 2 ** (width.bits * n) for n, s in enumerate(wide))
        assert whole * Fraction(2) ** exponent[i].item() == value([t[i, j : j + 1] for t in x])


def test_ties_and_largest_tails_leave_slices_short():
    """Remainders at the end of the range of a slice, and tails that push them beyond."""
    for machine in LONGEST:
        width, u = width_for(4, machine), 2.0 ** -BASES[machine].precision
        leading = torch.tensor([1.0, 1 - 2.0**-width.bits, 1 - 2 * u, 0.75], dtype=machine)
        for sign in (1, -1):
            x = [leading[None], (sign * leading * u / 2)[None]]
            slices = cut(x, torch.zeros(1, 1, dtype=torch.int32), width, 6)
            assert slices.abs().max() <= 1


@pytest.mark.thinned(of=2)
@over_machines
def test_bits_have_no_order(format, machine, monkeypatch):
    x = spread(format, 7, 40, by=0 if format == mcf.fp16x2 else 3).components
    y = spread(format, 40, 9, by=0, seed=1).components
    expected = product(x, y, 2, format.precision, machine)

    def same(found):
        return all(map(torch.equal, found, expected))

    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert same(
        product([t[:, order] for t in x], [t[order] for t in y], 2, format.precision, machine)
    )
    with monkeypatch.context() as patch:
        patch.setattr(products, "_BLOCK", 80)
        patch.setattr(products, "_AT_ONCE", 5)
        assert same(product(x, y, 2, format.precision, machine))
    transposed = product([t.T for t in y], [t.T for t in x], 2, format.precision, machine)
    if machine == torch.float64:  # enough slices for both, whichever is A
        assert same([t.T for t in transposed])
    some = product([t[2:3] for t in x], [t[:, 4:] for t in y], 2, format.precision, machine)
    assert all(torch.equal(a, b[2:3, 4:]) for a, b in zip(some, expected, strict=True))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert same(product(x, y, 2, format.precision, machine))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_of_slices_are_exact_in_shorter_types(precision):
    x, y = (sample(mcf.fp32x2, 64, 64, seed=i).components for i in range(2))
    expected = product(x, y, 2, 48, torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert all(map(torch.equal, product(x, y, 2, 48, torch.float32), expected))
    finally:
        torch.set_float32_matmul_precision(before)


@over_long
def test_large_elements_that_meet_small_ones(format):
    graded = torch.ldexp(torch.ones(12), torch.arange(12) * 5 - 30)
    x, y = sample(format, 12, 12) * graded, sample(format, 12, 12, seed=1) / graded[:, None]
    apart = torch.tensor([[1.0, 2.0**-30], [2.0**-40, 2.0**-20]])
    for a, b in ((x, y), (apart * x[:2, :2], apart.flip(1) * y[:2, :2])):
        found = a @ b
        for got, expected, size in zip(
            rationals(found.components), *exact(a.components, b.components), strict=True
        ):
            assert abs(got - expected) <= size * 16 / 2**format.precision


@pytest.mark.with_float64("the format is fp64x2")
def test_zeros_of_triangles_are_no_exact_sums(monkeypatch):
    monkeypatch.setattr(products, "exact_dots", None)
    x, y = (sample(mcf.fp64x2, 20, 20, seed=i).tril() for i in range(2))
    found = x @ y
    assert found.triu(1).eq(0).all()
    assert not found.components[0].signbit()[found.components[0] == 0].any()


@over_long
def test_special_values(format):
    numbers = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.5, -2.0]
    x = torch.tensor(list(itertools.product(numbers, repeat=2)), dtype=torch.float64)
    made = mcf.as_expansion(x, format) @ mcf.as_expansion(x.T, format)
    expected = x @ x.T
    torch.testing.assert_close(
        mcf.as_plain(made, torch.float64), expected, rtol=0, atol=0, equal_nan=True
    )
    for tail in made.components[1:]:
        assert tail.eq(0).all()


@over_long
def test_large_numbers_beside_infinite_ones(format):
    """A row of finite numbers, whose sum is infinite and whose product is not."""
    largest = torch.finfo(format.dtype).max
    x = torch.tensor([[largest, largest], [math.inf, 1.0]], dtype=format.dtype)
    y = torch.full((2, 1), 2.0**-20, dtype=format.dtype)
    found = mcf.as_expansion(x, format) @ mcf.as_expansion(y, format)
    assert mcf.as_plain(found).tolist() == [[largest * 2.0**-19], [math.inf]]


@over_long
def test_ends_of_the_range(format):
    largest = torch.finfo(format.dtype).max
    x = mcf.as_expansion(
        torch.tensor([[largest, -largest / 2], [1.0, 1.0]], dtype=format.dtype), format
    )
    y = mcf.as_expansion(torch.tensor([[2.0, 1.0], [2.0, 1.0]], dtype=format.dtype), format)
    found = x @ y
    assert mcf.as_plain(found).tolist() == [[largest, largest / 2], [4.0, 2.0]]
    assert mcf.as_plain(x @ x.T)[0, 0] == math.inf
    tiny = torch.finfo(format.dtype).smallest_normal
    small = mcf.as_expansion(torch.tensor([[tiny, tiny / 4]], dtype=format.dtype), format)
    scaled = small @ mcf.as_expansion(torch.tensor([[1.0], [-4.0]], dtype=format.dtype), format)
    assert scaled.eq(0).all()
    assert (small @ small.T).eq(0).all()
    inverse = mcf.as_expansion(torch.tensor([[0.5], [1.0]], dtype=format.dtype) / tiny, format)
    assert (small / 4 @ inverse).eq(0.1875).all()


@over_long
def test_shapes(format):
    x, y = sample(format, 5, 7), sample(format, 7, 3, seed=1)
    assert (x[:, :0] @ y[:0]).eq(0).all()
    assert (x[:0] @ y).shape == (0, 3)
    assert (x @ y[:, :0]).shape == (5, 0)
    expected = x @ y
    assert_same_terms(x @ y[:, 0], expected[:, 0].contiguous())
    assert_same_terms(x[0] @ y[:, 0], expected[0, 0].clone())
    assert_same_terms(x[0] @ y, expected[0].clone())
    assert_same_terms(torch.matmul(x.expand(2, 4, 5, 7), y)[1, 3], expected)
    assert_same_terms(torch.einsum("ij,jk->ki", x, y), expected.T.contiguous())
    assert_same_terms(F.linear(x, y.T), expected)
    assert_same_terms(torch.tensordot(x, y, 1), expected)
    assert_same_terms(torch.inner(x, y.T), expected)
    assert_same_terms(torch.compile(torch.matmul, backend="aot_eager")(x, y), expected)
    assert_same_terms(torch.vmap(torch.mv, (None, 1), 1)(x, y), expected)


@over_long
def test_gradients(format):
    x, y = sample(format, 5, 7).requires_grad_(), sample(format, 7, 3, seed=1).requires_grad_()
    g = sample(format, 5, 3, seed=2)
    (x @ y).backward(g)
    assert_same_terms(x.grad, g @ y.detach().T)
    assert_same_terms(y.grad, x.detach().T @ g)


def test_on_a_device_without_float64():
    expected = sample(mcf.fp32x3, 6, 9) @ sample(mcf.fp32x3, 9, 4, seed=1)
    with pretended("mps", has_float64=False):
        x, y = (sample(mcf.fp32x3, *s, seed=i) for i, s in enumerate([(6, 9), (9, 4)]))
        x, y = ([t.to("mps")[None] for t in z.components] for z in (x, y))
        found = sliced_product(x, y, 3, 72, torch.float32)
        with pytest.raises(Misplaced):
            sliced_product(x, y, 2, 72, torch.float64)
        found = [t.cpu()[0] for t in found]
    for a, b in zip(rationals(found), rationals(expected.components), strict=True):
        assert abs(a - b) <= Fraction(64) / 2**72
