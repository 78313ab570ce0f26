"""float16 and an integer: patterns and values against exact integers and fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import mcftensor as mcf
from mcftensor.arithmetic.number_protocol import Sum
from support.helpers import Given

SIX = mcf.Format(torch.bfloat16, 6)
BY_BITS = {8: mcf.fp16i8.nearest, 16: mcf.fp16i16}
EDGES = np.array(
    [
        sign | (exponent << 23) | fraction
        for sign in (0, 1 << 31)
        for exponent in (0, 1, 64, 84, 86, 87, 100, 108, 109, 110, 111, 112, 113, 127, 141, 142)
        for fraction in (0, 1, 2, 7, 8, 0xF, 0x10, 0x11, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000,
                         0x3FE000, 0x400000, 0x7FDFFF, 0x7FE000, 0x7FEFF0, 0x7FEFFF)
    ],
    dtype=np.uint32,
)  # fmt: skip


def in_range(count, seed=0):
    """Patterns of float32 numbers of all sizes that float16 has, and some smaller ones."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(127 - 46, 127 + 16, count, dtype=np.uint32)
    low = rng.integers(0, 2**23, count, dtype=np.uint32)
    low = np.where(rng.random(count) < 0.5, low & 0x7FF000, low)  # ties of float16 among them
    sign = rng.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    return sign | (exponent << np.uint32(23)) | low


def numbers(patterns):
    return torch.from_numpy(np.ascontiguousarray(patterns).view(np.int32)).view(torch.float32)


def spacing(x: Fraction, bits: int) -> Fraction:
    """Of the numbers of a format around one."""
    exponent = max(_exponent(x), -14)
    return max(Fraction(2) ** (exponent - 10 - bits), Fraction(2) ** (_exponent(x) - 23))


def _exponent(x: Fraction) -> int:
    e = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    return e if abs(x) >= Fraction(2) ** e else e - 1


def nearest(x: Fraction, step: Fraction) -> Fraction:
    return round(x / step) * step  # ties to even


def expected(x: Fraction, bits: int) -> tuple[Fraction, int]:
    """The number as it is stored, and the magnitude of its pattern, by the definition."""
    if x == 0:
        return Fraction(0), 0
    y = nearest(x, spacing(x, bits))
    size, exponent = abs(y), max(_exponent(y), -14) if y else -14
    pattern = size / (Fraction(2) ** (exponent - 10 - bits))
    if size >= Fraction(1, 2**14):
        pattern += (exponent + 14) << (10 + bits)
    assert pattern.denominator == 1
    return y, pattern.numerator


def read(stored, format):
    return [Fraction(v) for v in format.decode(stored)[0].tolist()]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("patterns", [EDGES, in_range(3000)], ids=["edges", "random"])
def test_one_rounding_and_its_pattern(bits, patterns):
    x = numbers(patterns)
    x = x[x.abs() < 65519]
    stored = BY_BITS[bits].encode(Sum([x]), None)
    wanted = [expected(Fraction(v), bits) for v in x.tolist()]
    assert read(stored, BY_BITS[bits]) == [y for y, _ in wanted]
    own = stored[0].view(torch.int16).long() & 0x7FFF
    assert ((own << bits) + stored[1].long()).tolist() == [p for _, p in wanted]
    assert own.tolist() == [(p + (1 << (bits - 1))) >> bits for _, p in wanted]  # away from zero
    assert torch.equal(stored[0].signbit(), x.signbit())


def test_a_float32_from_2_to_the_minus_17_comes_back():
    x = numbers(in_range(1 << 16, seed=1))
    x = x[(x.abs() >= 2.0**-17) & (x.abs() < 65520)]
    assert torch.equal(mcf.as_plain(mcf.as_expansion(x, mcf.fp16i16), torch.float32), x)
    below = x.sign() * 2.0**-17 * (1 - 2.0**-24)
    assert not torch.equal(mcf.as_plain(mcf.as_expansion(below, mcf.fp16i16), torch.float32), below)


def test_every_float16_is_its_own_leading_component():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    for format in BY_BITS.values():
        leading, tail = format.encode(Sum([every.float()]), None)
        assert not tail.any()
        assert torch.equal(leading.nan_to_num(7.0, 1e4, -1e4), every.nan_to_num(7.0, 1e4, -1e4))
        assert torch.equal(format.decode((leading, tail))[0].half().isinf(), every.isinf())


def test_the_leading_component_is_the_nearest_float16():
    x = numbers(in_range(1 << 16, seed=2))
    x = x[x.abs() < 65504]
    for format in BY_BITS.values():
        y = mcf.as_expansion(x, format)
        leading, exact = y.components[0], mcf.as_plain(y, torch.float32)
        theirs = exact.half()
        errors = [(exact.double() - z.double()).abs() for z in (leading, theirs)]
        assert torch.equal(*errors)
        is_other = leading != theirs
        assert 0 < is_other.sum() < len(x) / 4
        assert (leading.abs() > theirs.abs())[is_other].all()


@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2.0**-20])
def test_noise_is_added_below_the_tail(share):
    x = numbers(in_range(2000, seed=3))
    x = x[x.abs() < 65000]
    given = Given(torch.full((len(x),), share, dtype=torch.float64))
    found = read(BY_BITS[8].encode(Sum([x]), given), BY_BITS[8])
    for v, y in zip(map(Fraction, x.tolist()), found, strict=True):
        _, pattern = expected(v, 16)
        cut = (pattern + int(share * 256)) >> 8
        exponent, fraction = cut >> 18, cut & (2**18 - 1)
        size = (fraction + (2**18 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 15 - 18)
        assert abs(y) == size


def test_numbers_of_more_bits_are_rounded_once():
    """Beside ties of the unit 2^-40, where float32 has one bit more, and of the tail of 8 bits."""
    tie = 2.0**-18 + 2.0**-41
    for format, x, step in (
        (mcf.fp16i16, tie, 2.0**-40), (mcf.fp16i16, tie + 2.0**-40, 2.0**-40),
        (mcf.fp16i8.nearest, 1 + 2.0**-19, 2.0**-18),
        (mcf.fp16i8.nearest, 2.0**-20 + 2.0**-33, 2.0**-32),
    ):  # fmt: skip
        wide = torch.tensor(
            [s * x * (1 + d) for s in (1, -1) for d in (0, 2.0**-45, -(2.0**-45))],
            dtype=torch.float64,
        )
        wanted = [float(nearest(Fraction(v), Fraction(step))) for v in wide.tolist()]
        assert len({abs(v) for v in wanted}) == 2
        for y in (wide, mcf.as_expansion(wide, mcf.fp32x3), mcf.as_expansion(wide, SIX)):
            assert mcf.as_expansion(y, format).tolist() == wanted
        zeros = mcf.as_expansion(torch.zeros(6), format)
        assert zeros.copy_(wide).tolist() == wanted


def test_all_codes_of_a_tail_are_in_use():
    x = torch.arange(1 << 18, 1 << 19, dtype=torch.float32) * 2.0**-18
    _, tail = mcf.as_expansion(x, mcf.fp16i8.nearest).components
    assert set(tail.tolist()) == set(range(-128, 128))


def test_what_others_wrote_gets_the_one_form_that_numbers_have():
    leading = torch.tensor([1.0, 1.0, 0.0, torch.inf, torch.nan, 2.0**-14], dtype=torch.float16)
    tail = torch.tensor([8, 13, -1, 3, 0, 5], dtype=torch.int16)
    found, misfits = mcf.fp16i16.normalized([leading, tail])
    assert misfits == 1
    assert found[0].tolist()[:2] == [1.0, 1.0]
    assert found[1].tolist() == [8, 8, 0, 0, 0, 0]
    assert found[0][2:5].isnan().all()


def test_what_they_are():
    assert [f.precision for f in BY_BITS.values()] == [19, 24]
    assert [f.bytes for f in BY_BITS.values()] == [3, 4]
    for f in (mcf.fp16i16, mcf.fp16i8, mcf.fp16i8.nearest, mcf.fp16i8.with_rounding("stochastic")):
        assert eval(repr(f), {"mcf": mcf, "torch": torch}) is f is mcf.Format.from_name(f.name)
        assert f.of_states is mcf.bf16i16
    info = mcf.finfo(mcf.fp16i16)
    assert (info.full_precision_min, info.smallest_subnormal) == (2.0**-17, 2.0**-40)
    assert (info.max, mcf.finfo(mcf.fp16i8).max) == (65520 - 2.0**-8, 65520 - 2.0**-3)
    for f in BY_BITS.values():
        x = mcf.as_expansion(torch.tensor([mcf.finfo(f).max]), f)
        assert x.item() == mcf.finfo(f).max
        assert x.components[0].item() == 65504
