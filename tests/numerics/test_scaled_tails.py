"""E4M3 codes with integer tails under shared scales, against exact rationals."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mcftensor as mcf
from mcftensor.arithmetic.number_protocol import Sum
from support.helpers import Given

FORMATS = [mcf.e4m3i8, mcf.e4m3i16]
over_both = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def code_value(code: int) -> Fraction | None:
    """What a byte of E4M3 is, by its table in the OCP specification."""
    exponent, fraction = (code >> 3) & 15, code & 7
    if exponent == 15 and fraction == 7:
        return None
    size = Fraction(fraction, 8) + (exponent > 0)
    return (-1) ** (code >> 7) * size * Fraction(2) ** (max(exponent, 1) - 7)


CODES = {c: v for c in range(256) if (v := code_value(c)) is not None}
MAGNITUDES = [CODES[c] for c in range(127)]


def scale_of(numbers: list[Fraction]) -> Fraction:
    """The least power of two, from 2^-101 on, under which no magnitude is above 448."""
    largest, scale = max(map(abs, numbers)), Fraction(2) ** -101
    while largest > 448 * scale:
        scale *= 2
    return scale


def unit_of(x: Fraction, bits: int) -> Fraction:
    """What numbers of the size of x, under a scale of 1, are multiples of."""
    below = max([v for v in MAGNITUDES if v <= abs(x)])
    exponent = max(-6, math.floor(math.log2(below)) if below else -6)
    return Fraction(2) ** (exponent - 3 - bits)


def rounded(x: Fraction, bits: int, share: Fraction | None = None) -> Fraction:
    """To nearest, ties to even, or up from 1 minus a share on; away from zero is up."""
    unit = unit_of(x, bits)
    size = abs(x) / unit
    whole = round(size) if share is None else math.floor(size + share)
    return whole * unit * (-1 if x < 0 else 1)


def encoded(format, x, noise=None):
    return format.encode(Sum([x]), noise)


def fractions(x):
    return [Fraction(v) for v in x.double().reshape(-1).tolist()]


def exact(stored, format):
    """What components are, without the format's own way to say it: nearest codes say where."""
    codes, tails, scales = (x.reshape(-1).tolist() for x in stored)
    columns = stored[0].shape[1]
    width = stored[2].shape[1]
    found = []
    for i, (c, t) in enumerate(zip(codes, tails, strict=True)):
        scale = Fraction(2) ** (scales[i // columns * width + i % columns // 32] - 127)
        pattern = ((c & 0x7F) << format.bits) + t
        exponent, fraction = pattern >> (3 + format.bits), pattern & ((8 << format.bits) - 1)
        size = Fraction(fraction, 8 << format.bits) + (exponent > 0)
        size *= Fraction(2) ** (max(exponent, 1) - 7)
        found.append((-1) ** (c >> 7) * size * scale)
    return found


def drawn(seed, count=2048):
    """Random patterns of float32, of which blocks have all ranges."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, (count // 64, 64), dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    x = torch.where(x.abs() < 2.0**127, x, 1.0)
    spread = torch.from_numpy(generator.standard_normal((count // 64, 64)).astype(np.float32))
    sizes = torch.exp2(torch.from_numpy(generator.integers(-20, 3, (count // 64, 64))).float())
    near = spread * sizes  # a half, of sizes that a block has together
    return torch.cat([x, near])


@over_both
def test_every_code_with_every_tail_comes_back(format):
    """Beside 448, which fixes the scale."""
    tails = torch.iinfo(format.components[1].dtype)
    some = torch.arange(tails.min, tails.max + 1)
    if format.bits == 16:
        edges = torch.tensor([tails.min, tails.min + 1, -257, -1, 0, 1, 255, tails.max])
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(tails.min, tails.max + 1, (248,), generator=generator)
        some = torch.cat([edges, drawn])
    codes = torch.tensor(list(CODES)).repeat_interleave(len(some))
    some = some.repeat(len(CODES))
    size = codes & 0x7F
    fit = ~((size == 0) & (some < 0) | (size == 0x7E) & (some > 0))
    codes, some = codes[fit], some[fit]
    count = len(codes) // 31 * 31
    rows = [x[:count].view(-1, 31) for x in (codes, some)]
    firsts = [torch.full((len(rows[0]), 1), 0x7E), torch.zeros(len(rows[0]), 1, dtype=torch.int64)]
    codes, some = (torch.cat([f, r], 1) for f, r in zip(firsts, rows, strict=True))
    scales = torch.arange(len(codes)).view(-1, 1) % 180 + 26
    dtypes = (x.dtype for x in format.components)
    stored = [x.to(d) for x, d in zip((codes, some, scales), dtypes, strict=True)]
    (numbers,) = format.decode(stored)
    found = encoded(format.nearest, numbers)
    assert all(torch.equal(a, b) for a, b in zip(found, stored, strict=True))
    part = [x[:: max(1, len(x) // 400)] for x in stored]
    assert fractions(format.decode(part)[0]) == exact(part, format)


@pytest.mark.thinned(of=8)
@over_both
@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1 - 2.0**-20])
def test_numbers_are_rounded_once(format, share):
    x = drawn(1)
    noise = None if share is None else Given(torch.full(x.shape, share, dtype=torch.float64))
    stored = encoded(format.nearest, x, noise)
    got = fractions(format.decode(stored)[0])
    assert got == exact(stored, format)
    numbers = [v if abs(v) >= Fraction(2) ** -126 else Fraction(0) for v in fractions(x)]
    worst = Fraction(0)
    for start in range(0, len(numbers), 32):
        block = numbers[start : start + 32]
        scale = scale_of(block)
        for v, found in zip(block, got[start : start + 32], strict=True):
            unit = unit_of(v / scale, format.bits) * scale
            if share is None:
                assert found == rounded(v / scale, format.bits) * scale
                worst = max(worst, abs(found - v) / unit)
            else:  # by as many bits as there are of float32, or below the normal codes of 2^-29
                kept = Fraction(int(share * 2 ** (20 - format.bits)), 2 ** (20 - format.bits))
                y = v / scale
                y = round(y * 2**29) / Fraction(2**29) if abs(y) < Fraction(1, 64) else y
                assert found == rounded(y, format.bits, kept) * scale
    if share is None:
        assert Fraction(49, 100) < worst <= Fraction(1, 2)


@over_both
def test_the_code_is_the_nearest(format):
    x = drawn(2)
    stored = encoded(format.nearest, x)
    got = exact(stored, format)
    scales = stored[2].repeat_interleave(32, 1).reshape(-1).tolist()
    for c, s, v in zip(stored[0].reshape(-1).tolist(), scales, got, strict=True):
        distance = abs(abs(v) / Fraction(2) ** (s - 127) - MAGNITUDES[c & 0x7F])
        for other in ((c & 0x7F) - 1, (c & 0x7F) + 1):
            if 0 <= other < len(MAGNITUDES):
                assert distance <= abs(abs(v) / Fraction(2) ** (s - 127) - MAGNITUDES[other])


@over_both
def test_what_a_model_computes_with_is_code_times_scale(format):
    x = mcf.as_expansion(drawn(3), format.nearest)
    codes, _, scales = x.components
    wanted = codes.view(torch.float8_e4m3fn).double() * torch.exp2(
        scales.double().repeat_interleave(32, 1) - 127
    )
    assert x.dtype == torch.bfloat16
    p = torch.nn.Parameter(x)
    assert torch.equal((p + torch.zeros_like(wanted)).double(), wanted)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=40),
    st.sampled_from(FORMATS),
)
def test_any_row_is_as_near_as_it_can_be(numbers, format):
    stored = encoded(format.nearest, torch.tensor([numbers], dtype=torch.float32))
    got = exact(stored, format)
    clear = [v if abs(v) >= Fraction(2) ** -126 else Fraction(0) for v in map(Fraction, numbers)]
    for start in range(0, len(clear), 32):
        scale = scale_of(clear[start : start + 32])
        for v, found in zip(clear[start : start + 32], got[start : start + 32], strict=True):
            assert found == rounded(v / scale, format.bits) * scale
    again = encoded(format.nearest, format.decode(stored)[0])
    assert all(torch.equal(a, b) for a, b in zip(again, stored, strict=True))


@over_both
@pytest.mark.parametrize("scale", [-75, 0, 100])
def test_ties_below_the_normal_codes_are_those_of_the_number(format, scale):
    unit = 2.0 ** -(9 + format.bits)
    row = [0.5 * unit, 1.5 * unit, 2.5 * unit, unit * (0.5 + 2.0**-10), unit / 4, 448.0]
    x = torch.tensor([row], dtype=torch.float64) * 2.0**scale
    wanted = [0.0, 2 * unit, 2 * unit, unit, 0.0, 448.0]
    found = format.decode(encoded(format.nearest, x))[0].double() / 2.0**scale
    assert found.tolist() == [wanted]


@over_both
def test_edges(format):
    largest = 2.0**128 * (1 - 2.0 ** -(4 + format.bits))
    beyond = torch.finfo(torch.float32).max  # which would be rounded to 2^128
    x = torch.tensor([[0.0, -0.0, largest, -largest, 2.0**127, beyond, -beyond]])
    for noise in (None, Given(torch.full(x.shape, 1 - 2.0**-20, dtype=torch.float64))):
        stored = encoded(format.nearest, x, noise)
        assert stored[0][0].tolist() == [0, 0x80, 0x78, 0xF8, 0x70, 0x78, 0xF8]
        assert stored[2].tolist() == [[247]]
        back = format.decode(stored)[0]
        assert torch.equal(back[:, :5], x[:, :5])
        assert back[0, :2].signbit().tolist() == [False, True]
        assert back[0, 5:].tolist() == [largest, -largest]
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3.0, -3.0, 2.0**-127, -(2.0**-149)]])
    stored = encoded(format.nearest, x)
    assert stored[0][0, :3].tolist() == [0x7F, 0xFF, 0x7F]
    assert stored[1][0, :3].tolist() == [0, 0, 0]
    back = format.decode(stored)[0][0]
    assert back[:3].isnan().all()
    assert back[3:].tolist() == [3.0, -3.0, 0.0, 0.0]
    zeros = encoded(format.nearest, torch.zeros(2, 32))
    assert zeros[2].tolist() == [[26], [26]]
    least = torch.tensor([[448 * 2.0**-101, 2.0**-126, 0.75 * 2.0**-126]])
    wanted = [448 * 2.0**-101, 2.0**-126 if format.bits == 16 else 0.0, 0.0]
    assert format.decode(encoded(format.nearest, least))[0].tolist() == [wanted]


@over_both
def test_what_foreign_programs_write_is_made_one_form(format):
    lowest = torch.iinfo(format.components[1].dtype).min
    codes = torch.tensor([[0x00, 0x80, 0x00, 0x7F, 0xFF, 0x38]], dtype=torch.uint8)
    tail = torch.tensor([[-1, -2, lowest, 5, -5, -7]], dtype=format.components[1].dtype)
    scales = torch.tensor([[127]], dtype=torch.uint8)
    before = exact((codes, tail, scales), format)
    found, misfits = format.normalized((codes, tail, scales))
    assert misfits == 3
    assert found[0].tolist() == [[0x80, 0x00, 0x81, 0x7F, 0xFF, 0x38]]
    assert found[1].tolist() == [[1, 2, lowest, 0, 0, -7]]
    after = exact(found, format)
    # The pattern below zero is as far below as the tail says.
    unit = Fraction(2) ** -(9 + format.bits)
    assert after[:3] == [-unit, 2 * unit, lowest * unit]
    assert after[5] == before[5]
    again, none = format.normalized(found)
    assert none == 0
    assert all(a is b for a, b in zip(again, found, strict=True))


def test_what_they_are():
    for f, bits in zip(FORMATS, (8, 16), strict=True):
        assert (f.precision, f.bytes, f.dtype) == (4 + bits, 1 + bits // 8, torch.bfloat16)
        assert f.rounding == "balanced"
        for rounding in ("nearest", "stochastic", "balanced"):
            g = f.with_rounding(rounding)
            assert eval(repr(g), {"mcf": mcf}) is g is mcf.Format.from_name(g.name)
    with pytest.raises(ValueError, match=r"shape \(5,\); use mcf.bf16i16 for vectors"):
        mcf.as_expansion(torch.ones(5), mcf.e4m3i8)


@over_both
def test_finfo(format):
    """Of numbers that are the largest of their block."""
    info = mcf.finfo(format)
    own = format.nearest

    def held(x):
        made = mcf.as_plain(
            mcf.as_expansion(torch.full((1, 32), x, dtype=torch.float64), own), torch.float64
        )
        return made[0, 0].item()

    assert held(info.max) == info.max
    assert math.isnan(held(info.max * (1 + info.eps)))
    for x in (info.smallest_normal, info.full_precision_min):
        assert held(x * (1 + info.eps)) == x * (1 + info.eps)  # all bits, and below not
        assert held(x / 2 * (1 + info.eps)) != x / 2 * (1 + info.eps)
    assert held(info.smallest_subnormal) == info.smallest_subnormal
    assert held(info.smallest_subnormal * 0.49) == 0
    assert (info.bits, info.eps) == (8 + format.bits, 2.0 ** -(3 + format.bits))
