"""Sums without order against exact rationals, in every order and division of their terms."""

import contextlib
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mcftensor as mcf
from mcftensor.reproducible import order_free_sums
from mcftensor.reproducible.binned_sums import DTYPES, MOST, layout_of
from support.kernel_cases import patterns, way

INTEGERS = {2: torch.int16, 4: torch.int32}
PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
LEAST = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}


def nearest(x: Fraction, dtype: torch.dtype) -> float:
    """A rational in a dtype, ties to even."""
    if x == 0:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    quantum = Fraction(2) ** max(exponent - PRECISION[dtype] + 1, LEAST[dtype])
    rounded = round(x / quantum) * quantum
    if abs(rounded) > Fraction(torch.finfo(dtype).max):
        return math.copysign(math.inf, x)
    return float(rounded)


def expected(terms: list[float], count: int, dtype: torch.dtype) -> tuple[float, bool]:
    """What a sum has to be, by the definitions of IEEE 754 and of the grid, in rationals; and
    whether it is the exact sum, rounded once."""
    if any(math.isnan(x) for x in terms) or {math.inf, -math.inf} <= set(terms):
        return math.nan, True
    for infinity in (math.inf, -math.inf):
        if infinity in terms:
            return infinity, True
    if all(x == 0 and math.copysign(1, x) < 0 for x in terms):
        return -0.0, True
    exact = [Fraction(x) for x in terms]
    largest = max(map(abs, exact))
    if largest == 0:
        return 0.0, True
    layout = layout_of(count)
    exponent = 0
    while largest >= Fraction(2) ** (exponent - 148):
        exponent += 1
    code = 1 + exponent // layout.width
    quantum = Fraction(2) ** ((code - layout.bins) * layout.width - 148)
    total = sum(round(x / quantum) * quantum for x in exact)
    return nearest(total, dtype), total == sum(exact)


def added(terms: list[torch.Tensor], count: int) -> torch.Tensor:
    """Accumulators of terms."""
    total = order_free_sums.accumulators(terms[0].numel(), terms[0].device)
    order_free_sums.add_to(total, terms, layout_of(count))
    return total


def rounded(accumulator: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(accumulator.shape, dtype=dtype)
    order_free_sums.round_into(out, accumulator, layout_of(count))
    return out


def summed(terms: list[torch.Tensor], count: int) -> torch.Tensor:
    out = torch.empty_like(terms[0])
    order_free_sums.sum_into(out, terms, [], layout_of(count))
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bits are equal. One NaN is as good as another: PyTorch's conversion to bfloat16
    writes 0xffff in vectors and 0x7fc0 in what is left over."""
    patterns = [torch.where(x.isnan(), -1, x.view(INTEGERS[x.dtype.itemsize])) for x in (a, b)]
    return torch.equal(*patterns)


def assert_right(terms: torch.Tensor, count: int, seed: int = 0) -> None:
    """(terms, elements): every way of adding gives the same bits, and these are right."""
    dtype, layout = terms.dtype, layout_of(count)
    columns = list(terms.unbind())
    result = rounded(added(columns, count), count, dtype)
    shuffled = random.Random(seed).sample(columns, len(columns))
    cuts = sorted(random.Random(seed + 1).randint(0, len(columns)) for _ in range(3))
    parts = [shuffled[i:j] for i, j in zip([0, *cuts], [*cuts, None], strict=True)]
    merged = order_free_sums.accumulators(terms.shape[1], terms.device)
    order_free_sums.merge_into(merged, [added(x, count) for x in parts if x], layout)
    assert torch.equal(merged, added(columns, count))
    assert same(rounded(merged, count, dtype), result)
    assert same(summed(shuffled, count), result)
    for column, got in zip(terms.double().T.tolist(), result.double().tolist(), strict=True):
        right, is_exact = expected(column, count, dtype)
        if math.isnan(right):
            assert math.isnan(got)
            continue
        assert (got, math.copysign(1, got)) == (right, math.copysign(1, right)), column
        if math.isfinite(right) and all(map(math.isfinite, column)):
            total = sum(map(Fraction, column))
            largest = max(abs(Fraction(x)) for x in column)
            bound = len(column) * largest / 2**layout.guaranteed
            assert is_exact or abs(Fraction(got) - total) <= bound + _half_ulp(got, dtype)
            least = largest * 2 / 2**layout.guaranteed
            if all(_last(Fraction(x)) >= least for x in column if x):
                assert is_exact


def _last(x: Fraction) -> Fraction:
    """The last bit of a number that is not zero."""
    return Fraction(x.numerator & -x.numerator, x.denominator)


def _half_ulp(x: float, dtype: torch.dtype) -> Fraction:
    exponent = math.frexp(x)[1] if x else -1000
    return Fraction(2) ** max(exponent - PRECISION[dtype], LEAST[dtype]) / 2


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 64])
def test_any_bits(dtype, count):
    torch.manual_seed(count)
    terms = patterns(dtype, count, 256)
    terms[:, 128:] = torch.where(torch.isfinite(terms), terms, 1.0)[:, 128:]
    terms[:, ::16] = -0.0
    assert_right(terms, count)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, mcf.without_float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_terms_about_the_smallest(dtype, mode):
    torch.manual_seed(0)
    powers = torch.linspace(-152, -90, 256).exp2().to(torch.float64)
    terms = (torch.randn(8, 256, dtype=torch.float64) * powers).to(dtype)
    with mode():
        assert_right(terms, 8)


@settings(max_examples=100)
@given(st.data())
def test_terms_that_meet(data):
    """Hypothesis draws significands and exponents that are close, and far apart."""
    dtype = data.draw(st.sampled_from(DTYPES[::2]))
    low = data.draw(st.integers(-130, 90))
    numbers = st.builds(
        math.ldexp,
        st.integers(-(2**8) + 1, 2**8 - 1),
        st.integers(low, min(low + data.draw(st.integers(0, 60)), 119)),
    )
    terms = data.draw(st.lists(numbers, min_size=1, max_size=20))
    count = data.draw(st.integers(len(terms), 3 * len(terms)))
    assert_right(torch.tensor(terms, dtype=torch.float64).to(dtype)[:, None], count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hard_cases(dtype):
    """Spans of 2^200, cancellation to zero, infinities, NaN, subnormals, -0, overflow."""
    least, most = 2.0 ** LEAST[dtype], torch.finfo(dtype).max
    inf, nan = math.inf, math.nan
    cases = [
        ([2.0**100, 2.0**-100, -(2.0**100)], 0.0),
        ([2.0**20, 2.0**-10, -(2.0**20)], 2.0**-10),
        ([1.0, -1.0], 0.0),
        ([1.5, -0.5, -1.0], 0.0),
        ([-0.0, -0.0], -0.0),
        ([-0.0, 0.0], 0.0),
        ([-0.0], -0.0),
        ([least, least, -least], least),
        ([-least], -least),
        ([least] * 3, 3 * least),
        ([most, most, -most, -most], 0.0),
        ([most, most, -most], most),
        ([most, most], inf),
        ([-most, -most, 1.0], -inf),
        ([inf, 1.0, -most], inf),
        ([-inf, most, most], -inf),
        ([inf, -inf], nan),
        ([nan, inf], nan),
        ([nan, -0.0], nan),
        ([inf, inf], inf),
        ([256.0, 1.0, 1.0], 258.0),
        ([256.0, 1.0], 256.0 if dtype == torch.bfloat16 else 257.0),  # a tie, to even
        ([256.0, 1.0, 2.0**-14], 258.0 if dtype == torch.bfloat16 else 257.0 + 2.0**-14),
    ]
    for numbers, right in cases:
        terms = torch.tensor(numbers, dtype=torch.float64).to(dtype)[:, None]
        result = rounded(added(list(terms), len(numbers)), len(numbers), dtype)
        assert_right(terms, len(numbers))
        if math.isnan(right):
            assert result.isnan()
        else:
            got = result.item()
            assert (got, math.copysign(1, got)) == (right, math.copysign(1, right)), numbers


def fill(name: str, count: int) -> torch.Tensor:
    """Patterns of the kind that ReproBLAS fills vectors with for its tests."""
    generator = torch.Generator().manual_seed(count)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    i = torch.arange(count, dtype=torch.float64)
    ones = torch.ones(count, dtype=torch.float64)
    signs = 1 - 2 * (i % 2)
    big = 2.0**100
    fills = {
        "constant": lambda: 1.25 * ones,
        "random": lambda: uniform,
        "random of both signs": lambda: 2 * uniform - 1,
        "normal": lambda: torch.randn(count, generator=generator, dtype=torch.float64),
        "sine": lambda: torch.sin(2 * math.pi * i / count),
        "mountain": lambda: torch.minimum(i, count - i),
        "small and growing": lambda: torch.exp2(i % 120 - 60),
        "small and random big": lambda: uniform * torch.exp2(60 * (uniform - 0.5)),
        "ill-conditioned": lambda: torch.cat([x := uniform[: count // 2], -x, 1e-6 * ones[:1]]),
        "big": lambda: torch.cat([big * ones[:1], uniform[1:]]),
        "big of both signs": lambda: torch.cat([big * signs[:2], uniform[2:]])[:count],
        "infinite": lambda: torch.cat([math.inf * ones[:1], uniform[1:]]),
        "infinite of both signs": lambda: torch.cat([math.inf * signs[:2], uniform[2:]])[:count],
        "NaN": lambda: torch.cat([uniform[1:], math.nan * ones[:1]]),
        "NaN and infinite": lambda: torch.cat([torch.tensor([math.nan, math.inf]), uniform])[
            :count
        ],
    }
    return fills[name]()


FILLS = [
    *("constant", "random", "random of both signs", "normal", "sine", "mountain"),
    *("small and growing", "small and random big", "ill-conditioned", "big", "big of both signs"),
    *("infinite", "infinite of both signs", "NaN", "NaN and infinite"),
]


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("count", [1, 8, 100, 1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_filled_as_reproblas_fills_vectors(name, count):
    for dtype in (torch.bfloat16, torch.float32):
        terms = fill(name, count).to(dtype)
        assert_right(terms[:, None], len(terms), seed=count)


@pytest.mark.parametrize("count", [2, 8, 64])
def test_the_bound_is_near(count):
    """Terms that are just not kept, all to one side, beside a power of two."""
    layout = layout_of(count)
    code = 1 + math.ceil(200 / layout.width)  # far from subnormals
    quantum = 2.0 ** ((code - layout.bins) * layout.width - 148)
    largest = quantum * 2.0**layout.guaranteed / 2  # the smallest of its bin
    terms = [largest, *[0.4999 * quantum] * (count - 1)]
    column = torch.tensor(terms, dtype=torch.float64).float()
    total = sum(Fraction(x) for x in column.double().tolist())
    right, is_exact = expected(column.double().tolist(), count, torch.float32)
    error = abs(Fraction(right) - total)
    bound = Fraction(count * largest) / 2**layout.guaranteed
    assert not is_exact
    assert bound / 3 < error <= bound
    assert_right(column[:, None], count)


@settings(max_examples=60)
@given(st.data())
def test_merging_has_no_order(data):
    """Associative and commutative, and what is empty changes nothing."""
    count = data.draw(st.sampled_from([3, 8, 100, 3000]))
    layout = layout_of(count)
    seeds = data.draw(st.lists(st.integers(0, 2**20), min_size=3, max_size=3))
    parts = []
    for seed in seeds:
        torch.manual_seed(seed)
        scale = torch.exp2(torch.randint(-140, 120, (64,)).double())
        terms = [
            (torch.randn(64).double() * scale).float() for _ in range(seed % (count // 3) + 1)
        ][:20]
        terms[0] = torch.where(torch.rand(64) < 0.1, patterns(torch.float32, 64), terms[0])
        parts.append(added(terms, count))

    def merged(*accumulators: torch.Tensor) -> torch.Tensor:
        total = order_free_sums.accumulators(64, torch.device("cpu"))
        for x in accumulators:
            order_free_sums.merge_into(total, [x], layout)
        return total

    a, b, c = parts
    assert torch.equal(merged(a), a)
    assert torch.equal(merged(a, b), merged(b, a))
    assert torch.equal(merged(merged(a, b), c), merged(a, merged(b, c)))
    nothing = added([torch.full((64,), -0.0)], count)
    assert torch.equal(merged(a, nothing), a)
    together = a.clone()
    order_free_sums.merge_into(together, [b, c], layout)
    assert torch.equal(together, merged(c, a, b))


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 255, 256, 511, 512, 10_000, MOST])
def test_layouts_fit(count):
    layout = layout_of(count)
    assert layout.bins * layout.field + 5 <= 64
    assert count * 2 ** (layout.width - 1) < 2 ** (layout.field - 1)
    assert 1 + 276 // layout.width + layout.bins <= 31  # the code of what is not finite drops all
    assert layout.bins * layout.width - 1 <= 51
    assert count * 2 ** (layout.bins * layout.width - 1) <= 2**53
    for exponent in range(300):
        assert (exponent * (2**22 // layout.width + 1)) >> 22 == exponent // layout.width


def test_all_terms_at_their_most():
    """Fields as full as they can be, of either sign, and bins that are dropped when they are."""
    for count in (8, 15, 255):
        layout = layout_of(count)
        top = 2.0 ** (layout.width * (60 // layout.width) * 2 - 149)
        for significand in (1 - 2.0**-24, -(1 - 2.0**-24), 0.75, -0.75):
            terms = torch.full((count, 1), significand * top, dtype=torch.float64).float()
            assert_right(terms, count)
            terms[0] *= 2.0**layout.width
            assert_right(terms, count)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [2, 8, 4000, 100_000])
def test_two_terms_of_16_bits(dtype, count):
    """One addition, or not: terms that are ties and near them, far apart, and beside powers of
    two, in steps of whatever may be dropped with so many terms."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    for large in (1.0, -1.0, 1.5, 1 + torch.finfo(dtype).eps, torch.finfo(dtype).max, 0.0):
        own = torch.full_like(every, large)
        out = torch.empty_like(own)
        order_free_sums.sum_into(out, [own, every], [], layout_of(count))
        assert same(out, rounded(added([every, own], count), count, dtype))
    assert_right(torch.stack([own, every])[:, ::50], count)


@pytest.mark.parametrize("count", [0, MOST + 1])
def test_counts_out_of_range(count):
    with pytest.raises(ValueError, match=f"1 to {MOST} terms, not {count}"):
        layout_of(count)


@pytest.mark.thinned(of=4)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("name", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [8, 512])
def test_kernels_have_the_bits_of_eager_pytorch(name, dtype, count):
    torch.manual_seed(0)
    terms = list(patterns(dtype, 3, 1000).unbind())

    def results():
        total = added(terms, count)
        order_free_sums.merge_into(total, [added(terms[:1], count)], layout_of(count))
        return [
            total,
            *(x.nan_to_num(nan=1e30) for x in (rounded(total, count, dtype), summed(terms, count))),
        ]

    with way("eager"):
        right = results()
    with way(name):
        for got, expected_ in zip(results(), right, strict=True):
            assert torch.equal(got, expected_)
