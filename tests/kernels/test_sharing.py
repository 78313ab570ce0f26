"""What blocks of elements share, in C++ and in Triton's interpreter: the bits of eager PyTorch."""

import copy
import importlib.util
import math

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.kernels import Columns, cpu, run
from mcftensor.kernels.block_scales import block_max
from mcftensor.kernels.eager import indices
from mcftensor.kernels.execute import Kernel
from mcftensor.kernels.program import Signature, record
from mcftensor.kernels.usual_numbers import for_usual_numbers
from mcftensor.passes import optimizer_steps
from mcftensor.passes.format_conversion import decode_columns, decoding, encode_columns, encoding
from support.kernel_cases import same, way

FORMATS = [
    format.with_rounding(rounding)
    for format in (mcf.mxfp8, mcf.ue5m3, mcf.q4, mcf.ue4, mcf.e4m3i8, mcf.e4m3i16)
    for rounding in ("balanced", "nearest", "stochastic")
]

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="there is no Triton")
by_way = pytest.mark.parametrize("name", ["cpp", pytest.param("triton", marks=needs_triton)])


def hard(format, *shape):
    """Numbers of all sizes, special ones among them."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp(8 * torch.randn(shape))
    x = x.abs() if format.stem.startswith("u") else x
    x.view(-1)[::97] = 0.0
    x.view(-1)[5::331] = float("nan")
    x.view(-1)[7::521] = float("inf")
    x.view(-1)[11::613] = 1e-42
    return x


def stored(format, x, key=5):
    made = [torch.empty(y.shape(x.shape), dtype=y.dtype) for y in format.components]
    keys = [torch.tensor(key)] if format.takes_key else []
    encode_columns(format, [x], [[y] for y in made], keys)
    return made


@pytest.mark.thinned(of=20)
@by_way
@by_format
@pytest.mark.parametrize("shape", [(33, 32), (7, 160), (3, 64, 5)])
def test_encoding(name, format, shape):
    same(name, lambda: stored(format, hard(format, *shape)))


@pytest.mark.thinned(of=6)
@by_way
@by_format
@pytest.mark.parametrize("shape", [(33, 32), (7, 160)])
def test_decoding(name, format, shape):
    made = stored(format, hard(format, *shape))
    numbers = torch.empty(shape)

    def decode():
        decode_columns(format, [[y] for y in made], [numbers])
        return [numbers]

    same(name, decode)


@by_way
def test_lists(name):
    """Of tensors of many lengths, rows that are no whole blocks among them."""
    shapes = [(1, 32), (5, 96), (2, 33), (64, 64), (3, 4, 8)]

    def encode():
        xs = [hard(mcf.mxfp8, *shape) for shape in shapes]
        made = [
            [torch.empty(y.shape(x.shape), dtype=y.dtype) for x in xs] for y in mcf.mxfp8.components
        ]
        encode_columns(mcf.mxfp8, xs, made, [torch.tensor(i) for i in range(len(xs))])
        return [y for column in made for y in column]

    same_in_part = [tuple(x.shape) for x in encode()]
    assert same_in_part[: len(shapes)] == shapes
    expected = encode()
    with way(name) if name == "triton" else way("eager"):
        torch.testing.assert_close(encode(), expected, rtol=0, atol=0)


UNUSUAL = (
    *(-0.0, -1.0, 1e-42, 2.0**63, 2.0**126, 1.9 * 2.0**126, 2.0**127, 1.875 * 2.0**127),
    *(1.9 * 2.0**127, torch.finfo().max),
    *(math.inf, -math.inf, math.nan, -math.nan),
)


def with_unusual(*shape):
    """Usual numbers, but for one in each second block of 32, at changing places."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    for k, value in enumerate(UNUSUAL):
        x.view(-1)[64 * k + 5 * k % 32] = value
    x.view(-1).view(torch.int32)[64 * len(UNUSUAL)] = 0x7F800001  # a NaN with other bits
    return x


@by_format
def test_one_unusual_number_in_a_block(format):
    x = with_unusual(16, 64)
    same("cpp", lambda: stored(format, x))


@pytest.mark.parametrize("mode", ["compact", "compact4"])
@pytest.mark.parametrize("format", [mcf.bf16i8, mcf.bf16x2], ids=lambda f: f.name)
def test_steps_with_one_unusual_number_in_a_block(format, mode):
    weights = mcf.as_expansion(with_unusual(16, 64).view(-1).roll(32).view(16, 64), format)
    same("cpp", step_of, weights, mode, with_unusual(16, 64))


def test_usual_blocks_have_a_program_of_their_own():
    body = encoding(mcf.mxfp8.nearest, torch.float32)
    signature = Signature((torch.float32,), (torch.int64,), (torch.uint8,) * 2, frozenset([2]))
    program = record(body, signature)
    fast, usual = for_usual_numbers(program)
    assert len(fast.instructions) < len(program.instructions)
    assert [*usual.maxima.values()] == [0x7E7FFFFF]  # below 2^126


@pytest.mark.parametrize(("format", "largest"), [(mcf.mxfp8, 254), (mcf.ue5m3, 253)])
def test_usual_programs_do_not_ask_for_scales_of_nans_and_infinities(format, largest):
    """Their codes tell before, and so do the maxima of blocks whose scales are written."""
    signature = Signature((torch.uint8,) * 2, (), (torch.float32,), frozenset([1]))
    read, usual = for_usual_numbers(record(decoding(format, torch.float32), signature))
    assert {read.instructions[i].name: x for i, x in usual.maxima.items()} == {"shared": largest}
    signature = Signature((torch.float32,), (), (torch.uint8,) * 2, frozenset([2]))
    written, _ = for_usual_numbers(record(encoding(format.nearest, torch.float32), signature))
    for program in (read, written):
        names = [x.name for i, x in enumerate(program.instructions) if program.per_block[i]]
        assert not {"eq", "ge", "gt", "lt", "where"}.intersection(names)
        assert not program.branches()


BYTES = [x for x in FORMATS if {y.dtype for y in x.components} == {torch.uint8} and not x.packed]


@pytest.mark.parametrize("format", BYTES, ids=lambda f: f.name)
def test_each_code_beside_each_scale(format):
    """A usual block has another one beside it."""
    codes = torch.arange(256).repeat(256).to(torch.uint8).view(256, 256)
    scales = torch.arange(256).repeat_interleave(8).to(torch.uint8).view(256, 8)
    for order in (torch.arange(256), torch.arange(256).view(2, 128).T.reshape(-1)):
        numbers = torch.empty(256, 256)

        def decode(order=order, numbers=numbers):
            decode_columns(format, [[codes], [scales[order].contiguous()]], [numbers])
            return [numbers]

        same("cpp", decode)


def test_values_of_a_code_of_half_a_byte_are_a_table():
    body = decoding(mcf.q4.nearest, torch.float32)
    signature = Signature(
        (torch.uint8, torch.int16), (), (torch.float32,), frozenset([1]), packed=frozenset([0])
    )
    (table,) = [x for x in record(body, signature).instructions if x.name == "table"]
    numbers = [c * (c + 1) / 56 for c in range(8)]
    assert table.operands[2:10] == pytest.approx(numbers, rel=2**-23)
    assert math.isnan(table.operands[10])
    assert table.operands[11:] == tuple(-x for x in table.operands[3:10])


ROWS = [(33, 31), (7, 161), (5, 1), (64, 3, 3, 3), (600, 1000)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.thinned(of=6)
@by_format
def test_rows_that_end_in_a_part_of_a_block(format, shape, kernels_used):
    """Numbers beyond a row's end have no part in the scale of its last block."""
    if format.packed:  # two of a row in a byte
        shape = (shape[0], shape[1] + 3 * (shape[1] % 2), *shape[2:])
    x = hard(format, *shape)
    same("cpp", lambda: stored(format, x))
    made = stored(format, x)
    numbers = torch.empty(shape)

    def decode():
        decode_columns(format, [[y] for y in made], [numbers])
        return [numbers]

    same("cpp", decode)
    assert kernels_used


def added(vectors, scalars, index):
    y = vectors[0] + vectors[1]
    return [y, block_max(y.abs().view(torch.int32))]


def test_rows_beside_a_vector_that_broadcasts(kernels_used):
    x, one = torch.rand(600, 1000), torch.rand(1000)

    def run_added():
        outputs = [torch.empty(600, 1000), torch.empty(600, 32, dtype=torch.int32)]
        run(added, Columns([[x], [one]], [], [[y] for y in outputs], (), frozenset([3])))
        return outputs

    same("cpp", run_added)
    assert torch.equal(run_added()[0], x + one)
    assert not kernels_used


@pytest.fixture
def kernels_used(monkeypatch):
    """Calls by compiled code, of rows that are no whole blocks."""
    run_rows, calls = Kernel.run_rows, []

    def counted(*args):
        done = run_rows(*args)
        calls.extend([1] * done)
        return done

    monkeypatch.setattr(Kernel, "run_rows", counted)
    return calls


def step_of(weights, mode="compact", gradients=None):
    p = nn.Parameter(copy.deepcopy(weights))
    optimizer = mcf.collage(torch.optim.AdamW([p], lr=1e-3, amsgrad=True, fused=True), mode)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        drawn = torch.randn(p.shape, generator=generator)
        p.grad = (drawn if gradients is None else gradients).to(p.dtype)
        optimizer.step()
    states = optimizer.state[p]
    has_halves = mode == "compact4" and p.shape[1] % 2 == 0
    assert states["max_exp_avg_sq"].format is (mcf.ue4 if has_halves else mcf.ue5m3).nearest
    return [p.detach(), *[x for x in states.values() if x.dim()]]


@pytest.mark.thinned(of=3)
@by_way
@pytest.mark.parametrize(
    "format",
    [mcf.bf16i8, mcf.bf16i16, mcf.bf16x2, mcf.e4m3i8, mcf.e4m3i16],
    ids=lambda f: f.name,
)
@pytest.mark.parametrize("shape", [(9, 64), (9, 40), (5, 7)], ids=str)
@pytest.mark.parametrize("mode", ["compact", "compact4"])
def test_fused_steps(name, mode, format, shape):
    torch.manual_seed(1)
    weights = mcf.as_expansion(torch.randn(shape), format)
    same(name, step_of, weights, mode)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("format", [mcf.bf16i8, mcf.bf16x2], ids=lambda f: f.name)
def test_vectors_of_any_width(format, width, monkeypatch):
    """Of fewer lanes more make a block."""
    monkeypatch.setattr(cpu, "vector_bytes", lambda: width)
    torch.manual_seed(1)
    for mode in ("compact", "compact4"):
        same("cpp", step_of, mcf.as_expansion(torch.randn(9, 64), format), mode)


@pytest.mark.slow
def test_a_long_program_has_whole_blocks_too():
    """Of float64 lanes, of which four make a block."""
    torch.manual_seed(1)
    weights = mcf.as_expansion(torch.randn(9, 64, dtype=torch.float64), mcf.fp32x2)
    same("cpp", step_of, weights)


def test_rounding_goes_by_places_in_the_whole():
    """A large tensor is taken part by part."""
    x = torch.rand(1 << 12, 256)
    noise = mcf.mxfp8
    expected = noise.encode(Sum([x]), None)
    got = stored(mcf.mxfp8.nearest, x)
    assert all(map(torch.equal, got, expected))
    y = mcf.as_expansion(x, mcf.mxfp8)
    whole = mcf.as_expansion(x, mcf.mxfp8)
    y.add_(0)
    whole.copy_(mcf.as_plain(whole) + 0)
    assert all(map(torch.equal, y.components, whole.components))
    assert indices(x)[-1, -1] == x.numel() - 1
    assert optimizer_steps.numbers_for([mcf.mxfp8]).dtype == torch.float32
