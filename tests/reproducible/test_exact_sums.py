"""Sums without order: the exact result, rounded once, whatever the order, threads or blocks."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import mcftensor as mcf
from common.oracle import BASES, round_fraction
from mcftensor.kernels import cpu, digit_sums
from mcftensor.sums.accumulators import accumulate_all
from mcftensor.sums.correct_rounding import (
    norm_as_float,
    rounded_norm,
    rounded_sum,
    sum_as_float,
)

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}

few = settings(max_examples=25)
over_floats = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d)[6:])


@pytest.fixture(autouse=True, scope="module", params=["compiled", "eager"])
def way(request):
    """Sums by compiled code, and by PyTorch's operators."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "eager":
            patch.setattr(digit_sums.COMPILED, "get", lambda _: None)
        elif cpu.find() is None:
            pytest.skip("needs a C++ compiler")
        else:
            assert digit_sums.COMPILED.get(cpu.BUILD_AFTER) is not None
        yield request.param


# --------------------------------------------------------------------------------------- hard terms


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
    top = max(BASES[dtype].emax - 4 - math.ceil(math.log2(size)), 1)
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


# ----------------------------------------------------------------------------------- right and bare


@pytest.mark.thinned(of=4)
@over_floats
@few
@given(**cases)
def test_sums_and_means_are_rounded_once(dtype, seed, pattern, size):
    x = pattern(np.random.default_rng(seed), dtype, size)
    exact = exact_sum(x)
    assert is_nearest(mcf.exact.sum(x), exact)
    assert is_nearest(mcf.exact.mean(x), exact / len(x))
    for other in FLOATS:
        assert is_nearest(mcf.exact.sum(x, dtype=other), exact)


@pytest.mark.thinned(of=2)
@over_floats
@few
@given(seed=cases["seed"], pattern=cases["pattern"], size=st.sampled_from([1, 2, 3, 10, 100]))
def test_products_and_norms_are_rounded_once(dtype, seed, pattern, size):
    rng = np.random.default_rng(seed)
    x = pattern(rng, dtype, size)
    y = x[torch.from_numpy(rng.permutation(len(x)))]
    exact = sum((a * b for a, b in zip(fractions(x), fractions(y), strict=True)), Fraction(0))
    assert is_nearest(mcf.exact.dot(x, y), exact)
    square = sum((a * a for a in fractions(x)), Fraction(0))
    assert is_nearest(mcf.exact.norm(x), root_of(square))


@pytest.mark.thinned(of=4)
@over_floats
@few
@given(**cases)
def test_running_sums_are_rounded_once(dtype, seed, pattern, size):
    x = pattern(np.random.default_rng(seed), dtype, size)
    total = 0
    for term, result in zip(fractions(x), mcf.exact.cumsum(x, 0), strict=True):
        total += int(term * 2**1074)
        assert is_nearest(result, Fraction(total, 2**1074))


@few
@given(root=st.integers(2**53, 2**54), change=st.integers(-1, 1))
def test_norms_at_ties(root, change):
    """Squares of numbers of 54 bits, and their neighbours, as sums of squares of integers."""
    rest = root**2 - (root // 2**27 * 2**27) ** 2 + change
    squares = [root // 2**27 * 2**27]
    while rest > 0:  # greedily: a few terms
        squares.append(math.isqrt(rest))
        rest -= squares[-1] ** 2
    x = torch.tensor(squares, dtype=torch.float64)
    exact = root_of(Fraction(root**2 + change))
    assert is_nearest(mcf.exact.norm(x), exact)
    on_host = norm_as_float(row_of(x, squares=True))
    assert is_nearest(torch.tensor(on_host, dtype=torch.float64), exact)


@pytest.mark.thinned(of=2)
@over_floats
def test_small_terms_among_large_ones(dtype):
    """Their last bits are at every place below the largest."""
    precision, quantum = BASES[dtype].precision, BASES[dtype].quantum
    for exponent in range(0, max(quantum + precision, -120), -1):
        small = (1 + 2.0 ** (1 - precision)) * 2.0**exponent
        x = torch.tensor([1.0, small, -1.0], dtype=dtype)
        assert mcf.exact.sum(x).item() == small


@pytest.mark.parametrize("exponent", range(430, 600, 9))
def test_products_whose_errors_underflow(exponent):
    """A thousand of them are no longer too small for float64."""
    a, b = (1 + 2.0**-52) * 2.0**-500, (1 + 2.0**-52) * 2.0**-exponent
    c, d = -(1 + 2.0**-51) * 2.0**-500, 2.0**-exponent
    x, y = (torch.tensor(z, dtype=torch.float64).repeat(1000) for z in ([a, c], [b, d]))
    exact = 1000 * (Fraction(a) * Fraction(b) + Fraction(c) * Fraction(d))
    assert exact > 0
    assert is_nearest(mcf.exact.dot(x, y), exact)


# --------------------------------------------------------------------------------- without an order


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.thinned(of=6)
@over_floats
@pytest.mark.parametrize("pattern", [bit_patterns, normal, ill_conditioned])
def test_neither_order_nor_threads_nor_blocks_change_a_bit(dtype, pattern, threads, way):
    rng, size = np.random.default_rng(1), 200_000 if way == "compiled" else 3000
    x = pattern(rng, dtype, size)[:size]
    y = normal(rng, dtype, size)
    results = [(mcf.exact.sum(x), mcf.exact.mean(x), mcf.exact.norm(x), mcf.exact.dot(x, y))]
    assert is_nearest(results[0][0], exact_sum(x))
    for count in (1, 2, 4):
        threads(count)
        order = torch.from_numpy(rng.permutation(len(x)))
        a, b = x[order], y[order]
        results.append(
            (mcf.exact.sum(a), mcf.exact.mean(a), mcf.exact.norm(a), mcf.exact.dot(a, b))
        )
        a, b = (z.view(100, -1).t().expand(1, -1, -1) for z in (a, b))
        results.append(
            (mcf.exact.sum(a), mcf.exact.mean(a), mcf.exact.norm(a), mcf.exact.dot(a, b))
        )
    for result in results[1:]:
        assert all(map(same_bits, result, results[0]))


@pytest.mark.thinned(of=2)
@over_floats
def test_accumulators_merge(dtype):
    """However terms are divided among tensors and processes."""
    x = bit_patterns(np.random.default_rng(2), dtype, 3000)
    for squares, rounded, expected in (
        (False, rounded_sum, mcf.exact.sum(x)),
        (True, rounded_norm, mcf.exact.norm(x)),
    ):
        for sizes in ([3000], [1, 2999], [0, 700, 1300, 1000]):
            parts = [accumulate_all([part], squares=squares) for part in x.split(sizes)]
            parts.append(accumulate_all([]))
            assert same_bits(rounded(torch.stack(parts).sum(0), dtype), expected)
        assert same_bits(rounded(accumulate_all(x.split(100), squares=squares), dtype), expected)


def test_accumulators_of_several_types_merge():
    rng = np.random.default_rng(3)
    parts = [bit_patterns(rng, dtype, 200) for dtype in FLOATS]
    exact = sum(map(exact_sum, parts))
    assert is_nearest(rounded_sum(accumulate_all(parts), torch.float64), exact)


@pytest.mark.thinned(of=4)
@over_floats
def test_on_the_host(dtype):
    """Small numbers and large ones, whose squares no float32 holds, and special ones."""
    x = bit_patterns(np.random.default_rng(5), dtype, 3000)
    for part in x[x.isfinite()].split(10):
        exact = exact_sum(part)
        assert is_nearest(torch.tensor(sum_as_float(row_of(part)), dtype=torch.float64), exact)
        square = sum((a * a for a in fractions(part)), Fraction(0))
        norm = torch.tensor(norm_as_float(row_of(part, squares=True)), dtype=torch.float64)
        assert is_nearest(norm, root_of(square))
    inf, nan = math.inf, math.nan
    for special in ([inf], [-inf], [inf, -inf], [nan], [nan, inf], [-0.0]):
        part = torch.tensor([1.0, *special], dtype=dtype)
        numbers = [sum_as_float(row_of(part)), norm_as_float(row_of(part, squares=True))]
        expected = [part.double().sum().item(), part.double().norm().item()]
        assert numbers == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_on_the_host_beyond_the_largest_float():
    x = torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert (sum_as_float(row_of(x)), sum_as_float(row_of(-x))) == (math.inf, -math.inf)
    assert norm_as_float(row_of(x, squares=True)) == math.inf


def row_of(x, squares=False):
    return accumulate_all([x], squares=squares).tolist()


def test_a_million_terms_of_all_exponents():
    x = bit_patterns(np.random.default_rng(4), torch.float32, 1_000_000)
    numbers, counts = np.unique((x.double() * 2.0**149).numpy(), return_counts=True)
    exact = Fraction(sum(int(a) * int(n) for a, n in zip(numbers, counts, strict=True)), 2**149)
    assert is_nearest(mcf.exact.sum(x), exact)
    assert is_nearest(mcf.exact.sum(x, dtype=torch.float64), exact)


# ------------------------------------------------------------------------------- shapes and strides


@pytest.mark.thinned(of=8)
@over_floats
@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 2), (-1, 0), (0, 1, 2), ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_dimensions(dtype, dim, keepdim):
    """Against torch on small integers, whose sums are exact in any order."""
    x = torch.from_numpy(np.random.default_rng(5).integers(-3, 4, (2, 3, 4))).to(dtype)
    views = [
        x,
        x.transpose(0, 2).contiguous().transpose(0, 2),
        x.repeat_interleave(2, 2)[:, :, ::2],
    ]
    dims = dim if dim is None or isinstance(dim, int) else list(dim)
    expected = x.sum(dims, keepdim)
    for view in views:
        assert same_bits(mcf.exact.sum(view, dim, keepdim), expected)
        assert same_bits(mcf.exact.dot(view, torch.ones(4).to(dtype), dim, keepdim), expected)
    assert mcf.exact.mean(x, dim, keepdim).shape == expected.shape
    squares = (x * x).sum(dims, keepdim)
    root = squares.double().sqrt().to(dtype)
    assert same_bits(mcf.exact.norm(x, dim, keepdim), root)


def test_dimensions_of_running_sums():
    x = torch.from_numpy(np.random.default_rng(6).integers(-3, 4, (20, 3, 400))).float()
    for dim in (0, 1, 2, -1):
        assert same_bits(mcf.exact.cumsum(x, dim), x.cumsum(dim))
        assert same_bits(mcf.exact.cumsum(x[::2, :, ::3], dim), x[::2, :, ::3].cumsum(dim))


def test_tensors_without_elements_or_dimensions():
    nothing, one = torch.zeros(0, 3), torch.tensor(-2.0)
    for function in (mcf.exact.sum, mcf.exact.norm):
        assert same_bits(function(nothing), torch.tensor(0.0))
        assert same_bits(function(nothing, 0), torch.zeros(3))
        assert same_bits(function(nothing, 1), torch.zeros(0))
    assert mcf.exact.mean(nothing).isnan()
    assert mcf.exact.cumsum(nothing, 0).shape == (0, 3)
    assert mcf.exact.cumsum(nothing, 1).shape == (0, 3)
    for dim in (None, 0, -1, ()):
        assert same_bits(mcf.exact.sum(one, dim), one)
        assert same_bits(mcf.exact.mean(one, dim, True), one)
    assert same_bits(mcf.exact.cumsum(one, -1), one)


# ------------------------------------------------------------------------------------ special terms

_INF, _NAN = math.inf, math.nan


@pytest.mark.thinned(of=2)
@over_floats
@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([1, _INF], _INF),
        ([-_INF, 1, -_INF], -_INF),
        ([_INF, -_INF], _NAN),
        ([1, _NAN, _INF], _NAN),
        ([-0.0, -0.0], -0.0),
        ([-0.0, 0.0], 0.0),
        ([1, -1, -0.0], 0.0),
        ([-0.0], -0.0),
    ],
)
def test_special_terms(dtype, terms, expected):
    x, expected = torch.tensor(terms, dtype=dtype), torch.tensor(expected, dtype=dtype)
    many = torch.cat([x, x[-1:].expand(5000)])
    for result in (
        *(mcf.exact.sum(x), mcf.exact.mean(x), mcf.exact.dot(x, torch.ones_like(x))),
        *(mcf.exact.cumsum(x, 0)[-1], mcf.exact.sum(many), mcf.exact.sum(x.view(1, -1), 1)[0]),
    ):
        assert result.isnan() if expected.isnan() else same_bits(result, expected)
    norm = mcf.exact.norm(x)
    assert norm.isnan() if _NAN in map(abs, terms) or x.isnan().any() else norm >= 0


@over_floats
def test_special_products(dtype):
    x = torch.tensor([0.0, 1.0], dtype=dtype)
    assert mcf.exact.dot(x, torch.tensor([_INF, 1.0], dtype=dtype)).isnan()
    zeros = mcf.exact.dot(torch.zeros_like(x), -torch.ones_like(x))
    assert same_bits(zeros, torch.tensor(-0.0, dtype=dtype))
    least = torch.full((2,), 2.0 ** BASES[dtype].quantum, dtype=dtype)
    most = torch.full((2,), torch.finfo(dtype).max, dtype=dtype)
    assert same_bits(mcf.exact.dot(least, -least), torch.tensor(-0.0, dtype=dtype))
    assert mcf.exact.dot(most, torch.tensor([1.0, -1.0], dtype=dtype)) == 0
    assert same_bits(mcf.exact.norm(least[:1]), least[0])
    assert mcf.exact.norm(most) == _INF
    assert same_bits(mcf.exact.norm(most[:1]), most[0])


# -------------------------------------------------------------------- gradients, compilers, batches

FUNCTIONS = {
    "sum": lambda x: mcf.exact.sum(x, 1),
    "mean": lambda x: mcf.exact.mean(x, (0, -1), True),
    "norm": lambda x: mcf.exact.norm(x, 0),
    "cumsum": lambda x: mcf.exact.cumsum(x, -1),
    "dot": lambda x: mcf.exact.dot(x, x.flip(0) + 1, 1),
    "square": lambda x: mcf.exact.dot(x, x),
}
over_functions = pytest.mark.parametrize("name", FUNCTIONS)


def a_batch(dtype=torch.float64):
    x = torch.from_numpy(np.random.default_rng(7).standard_normal((2, 3, 4))).to(dtype)
    return x.requires_grad_()


@pytest.mark.thinned(of=6)
@over_functions
def test_gradients(name):
    assert gradcheck(FUNCTIONS[name], (a_batch(),))
    assert gradgradcheck(FUNCTIONS[name], (a_batch(),))


@over_floats
def test_gradients_have_the_type_of_the_operand(dtype):
    x = a_batch(dtype)
    mcf.exact.sum(mcf.exact.norm(x, 1, dtype=torch.float64)).backward()
    assert x.grad.dtype == dtype
    expected = x.detach().double() / x.detach().double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(x.grad.double(), expected, rtol=2.0**-6, atol=0)


def test_the_gradient_of_a_norm_of_zero_is_zero():
    x = torch.zeros(3, requires_grad=True)
    mcf.exact.norm(x).backward()
    assert torch.equal(x.grad, torch.zeros(3))


def test_gradients_of_gradients_have_no_order():
    """That of a norm's share is a sum over all elements."""
    x = ill_conditioned(np.random.default_rng(8), torch.float32, 300).requires_grad_()
    y = x.detach().flip(0).requires_grad_()
    found = []
    for z in (x, y):
        (gradient,) = torch.autograd.grad(mcf.exact.dot(z, z) ** 2, z, create_graph=True)
        (second,) = torch.autograd.grad(mcf.exact.sum(gradient), z)
        found.append(second)
    assert same_bits(found[0], found[1].flip(0))


@over_functions
def test_batches(name):
    x, function = a_batch(), FUNCTIONS[name]
    for dim in (0, 1, 2):
        members = [function(y.unsqueeze(0)) for y in x.unbind(dim)]
        batch = torch.vmap(lambda y: function(y.unsqueeze(0)), in_dims=dim)(x)
        assert same_bits(batch.detach(), torch.stack(members).detach())
    y = torch.func.vmap(torch.func.grad(lambda y: function(y.unsqueeze(0)).sum()))(x)
    assert y.shape == x.shape


def test_batches_of_one_factor():
    x, y = a_batch().detach(), a_batch().detach()[0]
    one = torch.vmap(lambda a: mcf.exact.dot(a, y, 0))(x)
    assert same_bits(one, torch.stack([mcf.exact.dot(a, y, 0) for a in x]))


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function:DeprecationWarning")  # torch's
def test_compiled_programs():
    def program(x):
        return torch.stack([mcf.exact.sum(FUNCTIONS[name](x * 2)) for name in FUNCTIONS])

    x, y = a_batch(torch.float32), a_batch(torch.float32)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    a, b = program(x), compiled(y)
    assert same_bits(a.detach(), b.detach())
    a.sum().backward()
    b.sum().backward()
    assert same_bits(x.grad, y.grad)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (TypeError, lambda x: mcf.exact.sum(x.long()), "exact.sum: got torch.int64; give a plain"),
        (TypeError, lambda x: mcf.exact.norm([1.0]), "exact.norm: got list; give"),
        (TypeError, lambda x: mcf.exact.dot(x, 2.0), "exact.dot: got float; give"),
        (TypeError, lambda x: mcf.exact.dot(x, x.double()), "float32 and torch.float64; convert"),
        (TypeError, lambda x: mcf.exact.mean(x, dtype=torch.int32), "a result of torch.int32"),
        (ValueError, lambda x: mcf.exact.dot(x, x[0, :2]), r"shapes \(2, 3\) and \(2,\)"),
        (ValueError, lambda x: mcf.exact.sum(x, (0, -2)), "names a dimension twice"),
        (IndexError, lambda x: mcf.exact.cumsum(x, 2), r"cumsum: dimension 2 .*-2 to 1"),
        (ValueError, lambda x: mcf.exact.mean(x[0, 0].expand(2**31)), "at most 2147483647"),
        (TypeError, lambda x: mcf.exact.sum(mcf.as_expansion(x, mcf.bf16x2)), "expansion"),
    ],
)
def test_errors(error, call, message):
    with pytest.raises(error, match=message):
        call(torch.ones(2, 3))


def test_many_accumulators_can_be_added():
    """Digits have little above their 31 bits, also where terms are added one by one."""
    terms = torch.full((1 << 16,), float(2**31 - 1), dtype=torch.float64)
    terms[::4096] = torch.inf  # chunks with these
    accumulator = accumulate_all([terms])
    assert accumulator[:-6].abs().max() < 2**33


def test_results_can_be_changed_in_place():
    x = torch.randn(3, 1, requires_grad=True)
    for result in (mcf.exact.sum(x), mcf.exact.norm(x, 1), mcf.exact.cumsum(x, 0)):
        result += 1
    total = mcf.exact.sum(x)
    total *= 2
    total.backward()
    assert torch.equal(x.grad, torch.full((3, 1), 2.0))


def test_gradients_of_tiny_norms():
    x = torch.tensor([[3e-40, 4e-40], [0.0, 0.0], [3e30, -4e30]], requires_grad=True)
    mcf.exact.norm(x, 1).sum().backward()
    right = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.6, -0.8]])
    torch.testing.assert_close(x.grad, right, rtol=1e-5, atol=0)
    half = torch.tensor([6e-8], dtype=torch.float16, requires_grad=True)
    mcf.exact.norm(half, dtype=torch.float32).backward()
    assert half.grad.item() == 1.0


@pytest.mark.parametrize("dim", [None, (0, 1)])
def test_a_dimension_is_an_integer(dim):
    with pytest.raises(TypeError, match=r"exact.cumsum: dim=.*; give integers"):
        mcf.exact.cumsum(torch.ones(2, 2), dim)
    with pytest.raises(TypeError, match=r"exact.sum: dim=0.5; give integers"):
        mcf.exact.sum(torch.ones(2, 2), 0.5)
