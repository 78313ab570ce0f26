"""Types that are other in memory than what one computes with: every kernel gives eager bits."""

import importlib.util
import itertools

import pytest
import torch

from mcftensor.kernels import cpu
from mcftensor.kernels.program import Signature, record
from support.kernel_cases import guarded, needs_mprotect, patterns, run_one, way

INTEGERS = [torch.int8, torch.int16, torch.uint8, torch.int32, torch.int64]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
EVERY = [*INTEGERS, *FLOATS, torch.bool]
# Below, at and above the lanes of C++ and the blocks of Triton.
LENGTHS = [1, 7, 15, 16, 17, 33, 127, 128, 131, 1027]

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero):RuntimeWarning"
)


@pytest.fixture(params=["cpp", "triton"])
def kernels(request):
    """The name of a language whose programs can run here."""
    if request.param == "cpp" and cpu.find() is None:
        pytest.skip("no C++ compiler")
    if request.param == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    return request.param


def of_all_bits(dtype, length):
    """Numbers of random bits."""
    if dtype == torch.bool:
        return torch.rand(length) < 0.5
    if dtype.is_floating_point:
        return patterns(dtype, length)
    return torch.randint(0, 256, (length * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def bits(x):
    return x.view(torch.uint8)


def same_bits(kernels, body, vectors, outputs):
    """Assert that a kernel writes what eager PyTorch writes, between canaries, and return it."""
    got, whole = [], []
    for dtype in outputs:
        length = vectors[0].numel()
        buffer = torch.randint(0, 2, (length + 64,)).to(dtype)
        whole.append((buffer, buffer.clone()))
        got.append(buffer[32 : 32 + length])
    expected = [torch.empty_like(x) for x in got]
    with way("eager"):
        run_one(body, vectors, [], expected)
    with way(kernels):
        run_one(body, vectors, [], got)
    for x, y, (buffer, before) in zip(got, expected, whole, strict=True):
        if x.is_floating_point():  # one NaN that was computed is as good as another
            nan = x.isnan() & y.isnan()
            assert (nan | (bits(x) == bits(y)).view(len(x), -1).all(1)).all()
        else:
            assert torch.equal(x, y)
        for part in (slice(32), slice(-32, None)):
            assert torch.equal(bits(buffer[part]), bits(before[part]))
    return got


# -------------------------------------------------------------------------------------- operations


def arithmetic(vectors, scalars, index):
    x, y = vectors
    return [x + y, x - y, x * y, -x, x + 100, 100 - x, x * 3, x.abs(), torch.maximum(x, y)]


def on_bits(vectors, scalars, index):
    x, y = vectors
    return [x & y, x | y, x ^ y, ~x, x & 15, x << 3, x >> 3, x << 7, x >> 7, (x + y) >> 1, x.sign()]


def shifted_logically(vectors, scalars, index):
    """And what is nearly a shift that brings in zeros."""
    x, y = vectors
    half = 4 * x.dtype.itemsize
    ones = 2**half - 1
    return [
        (x >> half) & ones,
        (x >> half) & (ones >> 1),
        (x >> half - 1) & ones,
        (x >> (y & 7)) & 1,
    ]


def chosen(vectors, scalars, index):
    x, y = vectors
    return [torch.where(x < y, x, y), torch.where((x == y) | (x >= 100), y + 1, x), (x > 3) * y]


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("body", [arithmetic, on_bits, shifted_logically, chosen])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_around_at_their_own_width(kernels, dtype, body):
    for length in (7, 1027):
        vectors = [of_all_bits(dtype, length) for _ in range(2)]
        count = len(body(vectors, [], None))
        same_bits(kernels, body, vectors, [dtype] * count)


def truths(vectors, scalars, index):
    x, y = vectors  # of 32 bits and of 64
    return [x < 0, y < 0, (x < 0) & (y < 0), (y < 0) | (x < 0), (x < 0) ^ (y < 0), ~(x < 0)]


def of_truths(vectors, scalars, index):
    x, y = vectors
    z = torch.where(x, y, ~y)
    return [x & y, x | y, x * y, x + y, x != y, x == y, z, torch.where(x, True, y), x & True]


@pytest.mark.with_float64("its bits of 64 are those of float64")
def test_truth_values(kernels):
    for length in (7, 1027):
        vectors = [of_all_bits(dtype, length) for dtype in (torch.float32, torch.float64)]
        results = same_bits(kernels, truths, vectors, [torch.bool] * 6)
        same_bits(kernels, of_truths, results[:2], [torch.bool] * 9)


@pytest.mark.with_float64("float64 is among the types")
@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("source", [*EVERY, torch.uint16], ids=str)
def test_conversions(kernels, source):
    """Of numbers that all types have, and of integers to those that are shorter."""
    targets = [x for x in EVERY if x != source]
    vectors = [torch.randint(0, 100, (1027,)).to(source)]
    same_bits(kernels, lambda xs, *_: [xs[0].to(x) for x in targets], vectors, targets)
    if not source.is_floating_point:
        targets = [x for x in targets if not x.is_floating_point]
        vectors = [of_all_bits(source, 1027)]
        same_bits(kernels, lambda xs, *_: [xs[0].to(x) for x in targets], vectors, targets)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "size",
    [1, 2, 4, pytest.param(8, marks=pytest.mark.with_float64("float64 is among the types"))],
)
def test_patterns_in_another_type(kernels, size):
    """Those of NaNs too, which stay as they are."""
    dtypes = [x for x in (*EVERY, torch.uint16) if x.itemsize == size and x != torch.bool]
    for source, target in itertools.product(dtypes, dtypes):
        if source != target:
            x = of_all_bits(source, 1027)
            (y,) = same_bits(kernels, lambda xs, *_, to=target: [xs[0].view(to)], [x], [target])
            assert torch.equal(bits(x), bits(y))


@needs_mprotect
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.bool], ids=str)
def test_memory_beyond_the_ends_is_not_touched(dtype, at_end):
    """The process is ended where it is."""
    if cpu.find() is None:
        pytest.skip("no C++ compiler")

    def body(vectors, scalars, index):
        return [vectors[0] ^ vectors[1], vectors[1].to(torch.int32)]

    for length in LENGTHS:
        vectors = [guarded(of_all_bits(dtype, length), at_end) for _ in range(2)]
        outputs = [guarded(vectors[0].to(x), at_end) for x in (dtype, torch.int32)]
        expected = body(vectors, [], None)
        with way("cpp"):
            run_one(body, vectors, [], outputs)
        for got, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.with_float64("an operand is of it")
def test_results_are_stored_in_the_types_of_outputs(kernels):
    x, y = torch.randn(1027), torch.randn(1027, dtype=torch.float64)
    same_bits(kernels, lambda xs, *_: [xs[0] + xs[1]] * 2, [x, y], [torch.bfloat16, torch.float16])


def test_a_result_may_take_the_place_of_an_operand(kernels):
    """All is read before anything is written, also what is stored as it was read."""
    x, y = torch.randn(1027), torch.randn(1027)
    before = x.clone(), y.clone()
    with way(kernels):
        run_one(lambda xs, *_: [xs[1], xs[0]], [x, y], [], [x, y])
    assert torch.equal(x, before[1])
    assert torch.equal(y, before[0])


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.view(torch.int16),  # of another size
        lambda x: x.to(torch.int32) << 32,
        lambda x: x.to(torch.int8) >> 8,
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: (x > 0) > (x < 1),
    ],
)
def test_what_programs_do_not_have(body):
    signature = Signature((torch.float32,), (), (torch.float32,))
    with pytest.raises(NotImplementedError, match="programs have no"):
        record(lambda xs, *_: [body(xs[0])], signature)


# ------------------------------------------------------------------------------------------ codecs


def encode16(vectors, scalars, index):
    """A float32 number as a bfloat16 one and a remainder of 16 bits."""
    pattern = vectors[0].view(torch.int32)
    high = (pattern + 0x8000) >> 16
    low = pattern - (high << 16)
    return [high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)]


def decode16(vectors, scalars, index):
    high, low = vectors
    pattern = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return [pattern.view(torch.float32)]


def encode8(vectors, scalars, index):
    """A float32 number, rounded to 16 bits, as a bfloat16 one and a remainder of 8 bits."""
    pattern = vectors[0].view(torch.int32)
    pattern = (pattern + 0x7F + ((pattern >> 8) & 1)) & ~0xFF
    high = (pattern + 0x8000) >> 16
    low = (pattern - (high << 16)) >> 8
    return [high.to(torch.int16).view(torch.bfloat16), low.to(torch.int8)]


def decode8(vectors, scalars, index):
    high, low = vectors
    pattern = (high.view(torch.int16).to(torch.int32) << 16) + (low.to(torch.int32) << 8)
    return [pattern.view(torch.float32)]


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("encode", "decode", "tail"),
    [(encode16, decode16, torch.int16), (encode8, decode8, torch.int8)],
    ids=["int16", "int8"],
)
def test_floats_with_integer_tails(kernels, encode, decode, tail, length):
    """All patterns, those of NaNs too, as long as nothing is computed with the numbers."""
    x = of_all_bits(torch.float32, length)
    high, low = same_bits(kernels, encode, [x], [torch.bfloat16, tail])
    with way("eager"):
        expected = torch.empty_like(high)
        run_one(encode, [x], [], [expected, torch.empty_like(low)])
    assert torch.equal(bits(high), bits(expected))
    (back,) = same_bits(kernels, decode, [high, low], [torch.float32])
    pattern = x.view(torch.int32)
    if tail == torch.int8:
        pattern = (pattern + 0x7F + ((pattern >> 8) & 1)) & ~0xFF
    assert torch.equal(back.view(torch.int32), pattern)


def step(vectors, scalars, index):
    """Decoded, computed with, and encoded, all NaNs alike."""
    (x,) = decode16(vectors[:2], scalars, index)
    x = x - vectors[2].to(torch.float32) * 0.01
    return encode16([torch.where(x.isnan(), torch.nan, x)], scalars, index)


def test_a_step_with_integer_tails(kernels):
    x = torch.randn(1027)
    x[:3] = torch.tensor([torch.inf, torch.nan, 0.0])
    x[3:6] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    vectors = [*encode16([x], [], None), torch.randn(1027).bfloat16()]
    same_bits(kernels, step, vectors, [torch.bfloat16, torch.int16])


def test_patterns_of_any_nan_round_to_one(kernels):
    """All of float32's, and those of which the last bits are known to be zero."""
    x = torch.tensor(
        [0x7F800001, 0x7F8FFFFF, 0x7FFF8000, 0x7FFFFFFF, 0x7FBFFFFF], dtype=torch.int32
    )
    x = torch.cat([x, x | -(1 << 31)])

    def rounded(vectors, scalars, index):
        (y,) = vectors
        return [z.view(torch.float32).to(torch.bfloat16) for z in (y, y << 16, (y >> 16) << 16)]

    found = [torch.empty(len(x), dtype=torch.bfloat16) for _ in range(3)]
    with way(kernels):
        run_one(rounded, [x], [], found)
    assert found[0].isnan().all()
    assert found[2].isnan().equal((x >> 16 << 16).view(torch.float32).isnan())
    assert found[1].isnan().equal((x << 16).view(torch.float32).isnan())
