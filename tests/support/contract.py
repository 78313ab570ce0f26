"""What `tests/formats` states of every format: the formats, the exceptions, samples and oracles.

The oracles share no code with the library. They read components by the definition of each format,
and compute with fractions or float64.
"""

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

import mcftensor as mcf
from mcftensor.formats import (
    ExpansionFormat,
    PlainFormat,
    ScaledTailFormat,
    TailFormat,
    compute_view,
)
from mcftensor.formats.format import _REGISTRY
from support import scales, toys

STOCHASTIC = mcf.scaling.scaled(torch.float16, rounding="stochastic")
SCALED = [*scales.FORMATS, STOCHASTIC]
_OTHERS = (PlainFormat, mcf.scaling.ScaledFormat)
REGISTERED = [f for f in _REGISTRY.values() if not isinstance(f, _OTHERS) and f is not compute_view]
FORMATS = [*REGISTERED, *SCALED]
"""All formats that numbers are written in; `compute_view` is of read-only views of a parameter.
Formats of a plugin (`pytest -p module`) are registered before this line is run."""

QUICK = {
    *("bf16x2", "bf16x3", "fp16x2", "fp32x2", "fp64x2", "bf16x2sr", "fp32x2br"),
    *("bf16i16", "bf16i8", "bf16i8sr", "bf16br", "fp16i16", "fp16i8", "e4m3i8", "mxfp8", "ue5m3"),
    *("q4", "ue4"),
    *("scaled(float16)", "scaled(fp16x2)", "scaled(fp16i8)"),
    *(toy.name for toy in toys.TOYS),
}
"""Formats that `make test` takes, one of each kind; `make test-all` takes all."""


def propagates(f) -> bool:
    """Whether scales are carried along through operations."""
    return isinstance(f, mcf.scaling.ScaledFormat)


def shares(f) -> bool:
    """Whether blocks of elements of a row share a component."""
    return not propagates(f) and bool(f.shared)


def holds_states_alone(f) -> bool:
    """Whether no model can compute with the format."""
    return shares(f) and f.computes_as is None


def stores(f) -> bool:
    """Whether arithmetic out of place gives plain tensors."""
    return not propagates(f) and f.result is not f


def is_unsigned(f) -> bool:
    return f.name.startswith("ue")


def packs(f) -> bool:
    """Whether a byte holds two elements of a row."""
    return not propagates(f) and bool(f.packed)


def storable(f, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape, or one with an even second dimension for formats that pack it."""
    return (shape[0], shape[1] + shape[1] % 2, *shape[2:]) if packs(f) else shape


def is_scaled_fp8(f) -> bool:
    return propagates(f) and f.dtype.itemsize == 1


def is_scaled_e4m3(f) -> bool:
    return propagates(f) and f.dtype == torch.float8_e4m3fn


def is_float16(f) -> bool:
    return f.dtype == torch.float16


@dataclass(frozen=True)
class Exempt:
    """A promise that some formats do not make, and why."""

    promise: str
    which: Callable[[mcf.Format], bool]
    why: str


EXEMPT = [
    Exempt("parameters", holds_states_alone, "models compute with the leading component: codes"),
    Exempt("vectors", shares, "blocks lie in rows, and vectors have none"),
    Exempt("range", propagates, "one scale: numbers that differ by 2^24 do not fit under it"),
    Exempt("finfo", propagates, "the range is that of an int32 exponent"),
    Exempt("identity", propagates, "numbers pass through float32, where a tail may reach further"),
    Exempt("reductions", propagates, "sums and the like have the precision of the leading term"),
    Exempt("without rules", propagates, "there are no sums into places"),
    Exempt("terms", propagates, "the exponent goes by a name of its own"),
    Exempt("pickles", is_scaled_fp8, "PyTorch pickles no float8; torch.save writes it"),
    Exempt("isfinite", is_scaled_e4m3, "PyTorch's own asks for the dtype, and does not know this"),
    Exempt("compiled bits", shares, "eager code notes a number as a factor, which is not rounded"),
    Exempt("special", is_scaled_fp8, "E4M3 has no infinity, and both saturate"),
    Exempt("special", is_unsigned, "it holds second moments, and negative numbers are NaN"),
    Exempt("signs", is_unsigned, "it holds second moments"),
    Exempt(
        "rounding", propagates, "mcf.scaling.scaled takes the rounding; there is no with_rounding"
    ),
    Exempt("even steps", packs, "codes are powers of two, and a step is as long as the number"),
    Exempt("counts", propagates, "stochastic rounding counts no writes, and nothing is balanced"),
    Exempt("modes", propagates, "states of scaled parameters are scaled; collage refuses others"),
    Exempt("modes", holds_states_alone, "no parameter is in it"),
    Exempt("modes", is_float16, "a plain second moment of float16 underflows"),
    Exempt("processes", propagates, "scales do not travel between processes"),
    Exempt("plain gradients", propagates, "gradients are scaled, too"),
    Exempt("plain gradients", holds_states_alone, "no parameter is in it"),
]


def makes(format, promise: str) -> bool:
    return not any(x.promise == promise and x.which(format) for x in EXEMPT)


def over(*promises: str, only: Callable[[mcf.Format], bool] = lambda f: True):
    """A test over the formats that make some promises; those of the package that are not of another
    kind than one in `QUICK` are slow."""
    known = {x.promise for x in EXEMPT}
    assert known.issuperset(promises)

    return pytest.mark.parametrize(
        "format",
        [
            pytest.param(f, id=f.name, marks=[] if is_quick(f) else [pytest.mark.slow])
            for f in FORMATS
            if only(f) and all(makes(f, x) for x in promises)
        ],
    )


def is_quick(f) -> bool:
    return f.name in QUICK or not type(f).__module__.startswith("mcftensor.")


# ------------------------------------------------------------------------------------- samples


def sample(format, *shape: int, seed: int = 0):
    """Numbers in [1/2, 2), of which every component is busy; signs alternate, if there are any."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.5 + 0.5
    steps = 2.0**20 if format.dtype == torch.float16 else 2.0**150  # so that halves have no more
    if propagates(format):
        x = (x * steps).round() / steps
    if isinstance(format, ExpansionFormat):
        terms = [x.to(format.base)]
        for i in range(1, format.terms):
            y = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
            terms.append(((y * format.u**i * steps).round() / steps).to(format.base))
        return mcf.MCFTensor(mcf.expansion.renormalize(terms), format)
    return mcf.as_expansion(x, format)


def parameter(format, *shape: int, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(sample(format, *shape, seed=seed))


def float32_patterns(count: int, seed: int = 0) -> Tensor:
    """Random bits, as finite float32."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    return torch.where(x.isfinite(), x, 1.0)


# ------------------------------------------------------------------------------- what is stored


def numbers(x: Tensor) -> Tensor:
    """The numbers in float64, those of longer formats rounded in the same order anywhere."""
    parts = floats(x)
    return functools.reduce(torch.add, parts[::-1])


def fractions(x: Tensor) -> list[Fraction]:
    """The numbers, exactly, as a flat list."""
    columns = [part.flatten().tolist() for part in floats(x)]
    return [sum(map(Fraction, row), Fraction(0)) for row in zip(*columns, strict=True)]


def floats(x: Tensor) -> list[Tensor]:
    """float64 tensors whose sum is the number."""
    x = x.detach()
    if isinstance(x, mcf.scaling.ScaledTensor):
        return [scales.exact(x)]
    if not isinstance(x, mcf.MCFTensor):
        return [x.double()]
    stored = [part.cpu() for part in x.components]
    if isinstance(x.format, ExpansionFormat):
        return [part.double() for part in stored]
    if isinstance(x.format, TailFormat):
        read = _of_halves if is_float16(x.format) else _of_bits
        return [read(stored, x.format.bits)]
    if isinstance(x.format, ScaledTailFormat):
        return [_of_patterns(*stored, x.format.bits)]
    if packs(x.format):
        return [_of_four_bits(_in_halves(stored[0]), stored[1], not is_unsigned(x.format))]
    if is_unsigned(x.format) or x.format.name.startswith("mxfp8"):
        return [_of_codes(*stored, TABLES[x.format.stem])]
    return [part.double() for part in x.format.decode(stored)]  # a toy's own definition


def _of_bits(stored: list[Tensor], bits: int) -> Tensor:
    """A pattern of float32 in two parts, of which the second has a sign."""
    pattern = stored[0].view(torch.int16).numpy().astype(np.int64) << 16
    if bits:
        pattern = pattern + (stored[1].numpy().astype(np.int64) << (16 - bits))
    pattern = np.ascontiguousarray(pattern.astype(np.uint32)).view(np.float32)
    return torch.from_numpy(pattern).double().view(stored[0].shape)


def _of_halves(stored: list[Tensor], bits: int) -> Tensor:
    """A float16 whose fraction of 10 bits goes on in the tail."""
    own = stored[0].view(torch.int16).long()
    size = ((own & 0x7FFF) << bits) + stored[1].long()
    exponent, fraction = size >> (10 + bits), size & ((1 << (10 + bits)) - 1)
    significand = fraction.double() * 2.0 ** -(10 + bits) + (exponent > 0)
    x = torch.ldexp(significand, exponent.clamp(min=1) - 15)
    x = torch.where(exponent == 31, torch.where(fraction > 0, torch.nan, torch.inf), x)
    return torch.where(own < 0, -x, x)


def _by_block(shared: Tensor, like: Tensor) -> Tensor:
    """E8M0 of each block of 32 elements of a row, for each element."""
    return torch.exp2(_repeated(shared, like).double() - 127)


def _repeated(shared: Tensor, like: Tensor) -> Tensor:
    """The number of each block of 32 elements of a row, for each element."""
    if not like.numel():
        return torch.zeros(like.shape, dtype=shared.dtype)
    each = shared.reshape(like.shape[0], -1).repeat_interleave(32, 1)
    return each[:, : like[0].numel()].reshape(like.shape)


def _of_patterns(codes: Tensor, tails: Tensor, shared: Tensor, bits: int) -> Tensor:
    """E4M3 whose significand goes on in the tail."""
    size = codes.long() & 0x7F
    pattern = (size << bits) + tails.long()
    exponent, fraction = pattern >> (3 + bits), pattern & ((8 << bits) - 1)
    significand = fraction.double() / (8 << bits) + (exponent > 0)
    x = significand * torch.exp2(exponent.clamp(min=1).double() - 7)
    x = torch.where(codes >= 128, -x, x) * _by_block(shared, codes)
    return torch.where(size == 0x7F, torch.nan, x)


def _of_codes(codes: Tensor, shared: Tensor, table: Tensor) -> Tensor:
    x = table[codes.long()] * _by_block(shared, codes)
    if table[-1] > 0:  # unsigned: the largest scale has an infinity and a NaN
        is_top = _by_block(shared, codes) == 2.0**127
        x = torch.where(is_top & (codes == len(table) - 2), torch.inf, x)
        x = torch.where(is_top & (codes == len(table) - 1), torch.nan, x)
    return x


def _of_four_bits(codes: Tensor, shared: Tensor, is_signed: bool) -> Tensor:
    """Signed, c (c + 1) / 2 parts of 28; or unsigned, steps below a scale: both count binades, of
    which a share leads up to the next in a straight line."""
    c = codes.long()
    if is_signed:
        share = torch.tensor([0, 1, 3, 6, 10, 15, 21, 28]).float() * (1 / 28)
        x = share[c % 8] * _repeated(shared.view(torch.bfloat16).float(), codes)
        return torch.where(c == 8, torch.nan, x.double() * torch.where(c > 8, -1, 1))
    shared = _repeated(shared, codes).double()
    step, highest = shared // 2048 / 8, shared % 2048 / 8
    binades = highest - (15 - c) * step
    whole = binades.floor()
    x = torch.exp2(whole.clamp(min=1) - 127) * (binades - whole + (whole > 0))
    x = torch.where(c == 0, 0.0, x)
    is_top = (highest == 254) & (step == 1)
    x = torch.where(is_top & (c == 14), torch.inf, x)
    return torch.where(is_top & (c == 15), torch.nan, x)


def _in_halves(packed: Tensor) -> Tensor:
    """The codes of bytes with two of a row, the first one in the last bits."""
    shape = (packed.shape[0], 2 * packed.shape[1], *packed.shape[2:])
    codes = [code for byte in packed.flatten().tolist() for code in (byte % 16, byte // 16)]
    return torch.tensor(codes).view(shape)


TABLES = {
    "mxfp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double(),
    "ue5m3": torch.tensor(
        [0.0] + [2.0 ** ((c >> 3) - 31) * (1 + (c & 7) / 8) for c in range(1, 256)],
        dtype=torch.float64,
    ),
}
"""What codes are, before they are scaled."""


def bits(x: Tensor) -> list[object]:
    """All that is stored, exponents and counts of writes too, byte by byte."""
    x = x.detach()
    own = [*x.components, x.exponent if isinstance(x, mcf.scaling.ScaledTensor) else x.writes]
    raw = [None if t is None else t.reshape(-1).view(torch.uint8).tolist() for t in own]
    return [x.format, x.shape, *raw]


def assert_same(x: Tensor, y: Tensor) -> None:
    """Of one format, and the same bits."""
    assert bits(x) == bits(y)


def unit(format) -> float:
    """The largest error of one rounding, in shares of a number near 1; of the largest number, where
    a scale is for several."""
    last = 2.0**-format.precision
    if not propagates(format):  # the last term of a long format may have no smaller numbers
        last = max(last, mcf.finfo(format).smallest_subnormal / 2)
    return last * (1 if is_nearest(format) else 2)


def is_nearest(format) -> bool:
    return format.rounding == "nearest"


def loss(format) -> float:
    """What one operation loses beside the largest number, for numbers near 1: the rounding of an
    expansion's algorithm, or PyTorch's own of float32 and then the format's."""
    if propagates(format):
        return 2 * unit(format)
    if not stores(format):
        return 8 * unit(format)
    return 1.01 * unit(format) + 2.0**-21


def assert_near(found: Tensor, expected: list[Fraction], bound: float, around: float = 2.0) -> None:
    """Numbers are what is expected, but for a share of the largest of them, or of the operands."""
    got = fractions(found)
    assert len(got) == len(expected)
    size = max([abs(x) for x in expected] + [Fraction(around)])
    errors = [abs(x - y) for x, y in zip(got, expected, strict=True)]
    worst = max(errors, default=Fraction(0))
    assert worst <= Fraction(bound) * size, f"{float(worst / Fraction(bound) / size)} of the bound"


def by(table: dict[str, Callable]):
    """A test over the functions of a table."""
    return pytest.mark.parametrize("do", table.values(), ids=table)


def saved_and_loaded(x):
    """What torch.load gives of it, by weights alone."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def kinds(x: Tensor) -> list[str]:
    """Of each number whether it is none, infinite, or what it is."""
    return [
        "nan" if math.isnan(v) else str(v) if math.isinf(v) else "finite"
        for v in x.double().flatten().tolist()
    ]


WITHOUT_RULES = {"square_", "index_fill_", "masked_scatter_"}
"""Operations that have no rule for scales: the error says what to write."""
