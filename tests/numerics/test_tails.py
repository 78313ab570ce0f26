"""float32 in a bfloat16 and an integer: every pattern, and rounding against exact integers."""

import struct

import numpy as np
import pytest
import torch

import mcftensor as mcf
from mcftensor.arithmetic import noise
from mcftensor.arithmetic.number_protocol import Sum
from support.helpers import Given

ALONE = mcf.Format(torch.bfloat16, 1, rounding="balanced").nearest
BY_BITS = {0: ALONE, 8: mcf.bf16i8.nearest, 16: mcf.bf16i16}
EDGES = np.array(
    [
        sign | (exponent << 23) | fraction
        for sign in (0, 1 << 31)
        for exponent in (0, 1, 2, 126, 127, 128, 253, 254, 255)
        for high in (0, 1, 0x3F, 0x40, 0x7E, 0x7F)
        for low in (0, 1, 0x7F, 0x80, 0x81, 0x7FFF, 0x8000, 0x8001, 0xFF7F, 0xFF80, 0xFFFF)
        for fraction in [(high << 16) | low]
    ],
    dtype=np.uint32,
)


def numbers(patterns):
    return torch.from_numpy(np.ascontiguousarray(patterns).view(np.int32)).view(torch.float32)


def patterns(x):
    return x.view(torch.int32).numpy().view(np.uint32)


def encoded(x, format, given=None):
    return format.encode(Sum([x]), given)


def is_nan(p):
    return (p & 0x7FFFFFFF) > 0x7F800000


def assert_all_come_back(p):
    found = encoded(numbers(p), mcf.bf16i16)
    back = patterns(mcf.bf16i16.decode(found)[0])
    assert np.array_equal(back, np.where(is_nan(p), np.uint32(0x7FC00000), p))
    # The leading component is the nearest bfloat16, ties away from zero.
    nearest = ((p.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    leading = found[0].view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(leading, np.where(is_nan(p), np.uint16(0x7FC0), nearest))


def test_edges_come_back():
    assert_all_come_back(EDGES)


def test_random_patterns_come_back():
    assert_all_come_back(np.random.default_rng(0).integers(0, 2**32, 1 << 18, dtype=np.uint32))


@pytest.mark.slow
def test_every_pattern_comes_back():
    for start in range(0, 2**32, 1 << 24):
        assert_all_come_back(np.arange(start, start + (1 << 24), dtype=np.uint64).astype(np.uint32))


def rounded(p, bits, addend):
    """Patterns cut to 16 + bits, given what is added before, in Python's integers."""
    lost = 16 - bits
    results = []
    for x in p.tolist():
        add = ((x >> lost) & 1) + (1 << (lost - 1)) - 1 if addend is None else addend
        results.append(0x7FC00000 if is_nan(np.uint32(x)) else ((x + add) >> lost) << lost)
    return np.array(results, dtype=np.uint32)


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1 - 2.0**-20])
def test_the_last_bits_are_rounded_off(bits, share):
    p = np.concatenate([EDGES, np.random.default_rng(1).integers(0, 2**32, 5000, dtype=np.uint32)])
    given = None if share is None else Given(torch.full((len(p),), share, dtype=torch.float64))
    found = encoded(numbers(p), BY_BITS[bits], given)
    addend = None if share is None else int(share * 2 ** (16 - bits))
    assert np.array_equal(patterns(BY_BITS[bits].decode(found)[0]), rounded(p, bits, addend))


def test_all_codes_of_a_tail_are_in_use():
    p = np.arange(0x3F800000, 0x3F820000, dtype=np.uint32)
    _, tail = encoded(numbers(p), mcf.bf16i8.nearest)
    assert set(tail.tolist()) == set(range(-128, 128))


def test_expansions_are_rounded_once():
    terms = (torch.tensor([1 + 2.0**-7]).bfloat16(), torch.tensor([2.0**-16]).bfloat16())
    rest = torch.tensor([2.0**-30, -(2.0**-30)]).bfloat16()
    x = [t.expand(2) for t in terms] + [rest]
    found = mcf.bf16i8.nearest.encode(Sum(x), None)
    assert mcf.bf16i8.decode(found)[0].tolist() == [1 + 2.0**-7 + 2.0**-15, 1 + 2.0**-7]


def test_bits_of_a_number_by_hand():
    x = torch.tensor([1 + 2.0**-8 + 2.0**-20])
    leading, tail = encoded(x, mcf.bf16i16)
    (pattern,) = struct.unpack("<I", struct.pack("<f", x.item()))
    assert pattern == 0x3F808008
    assert (leading.view(torch.int16).item(), tail.item()) == (0x3F81, 0x8008 - 0x10000)


def test_what_they_are():
    assert [f.precision for f in BY_BITS.values()] == [8, 16, 24]
    assert [f.bytes for f in BY_BITS.values()] == [2, 3, 4]
    assert [f.dtype for f in BY_BITS.values()] == [torch.bfloat16] * 3
    for f in (mcf.bf16i16, mcf.bf16i8, mcf.bf16i8.nearest, mcf.bf16i8.with_rounding("stochastic")):
        assert eval(repr(f), {"mcf": mcf, "torch": torch}) is f is mcf.Format.from_name(f.name)
    for rounding in ("stochastic", "balanced"):
        f = mcf.Format(torch.bfloat16, 1, rounding=rounding)
        assert eval(repr(f), {"mcf": mcf, "torch": torch}) is f
        assert f.nearest is ALONE
    assert mcf.bf16i8.rounding == "balanced"
    with pytest.raises(ValueError, match="bf16i16 has no rounding"):
        mcf.bf16i16.with_rounding("balanced")
    with pytest.raises(ValueError, match="1 terms given"):
        mcf.Format(torch.bfloat16, 1)
    with pytest.raises(ValueError, match="1 terms given"):
        mcf.Format(torch.float16, 1, rounding="balanced")


def test_foreign_nans_become_one():
    leading = torch.tensor([0x7F80, 0x7FC0, 0x7FFF, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    tail = torch.tensor([5, -1, 3, 7], dtype=torch.int16)
    x = mcf.checkpoint.from_terms({"x": leading, "x.bf16i16.tail": tail})["x"]
    back = patterns(mcf.as_plain(x, torch.float32))
    assert back.tolist() == [0x7FC00000, 0x7FC00000, 0x7FC00000, 0x3F800007]


@pytest.mark.with_float64("the numbers are given in float64")
class TestBalancedNoise:
    def test_the_numbers_are_those_of_the_formula(self):
        def lowbias32(z):
            z = ((z ^ (z >> 16)) * 0x7FEB352D) % 2**32
            z = ((z ^ (z >> 15)) * 0x846CA68B) % 2**32
            return z ^ (z >> 16)

        index = [0, 1, 2, 77, 2**31, 2**32 - 1]
        for t in (0, 1, 1000, 2**31 + 5, 2**40, (-77 << 32) + 1000):
            for stream, step in enumerate((0x9E3779B9, 0x6A09E667, 0xBB67AE85, 0xA54FF53B)):
                found = noise.Balanced(torch.tensor(t), torch.tensor(index), stream)
                places = [(i + (t >> 32)) % 2**32 for i in index]
                wanted = [(lowbias32(i) + t * step) % 2**32 for i in places]
                assert found.uniform().tolist() == [x / 2**32 for x in wanted]
                assert found.bits(8).tolist() == [x >> 24 for x in wanted]
                assert found.bits(16).tolist() == [x >> 16 for x in wanted]

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("stream", range(4))
    def test_round_ups_are_right_to_a_logarithm(self, stream):
        """Of T writes with one remainder; independent numbers are off by up to 90 here."""
        count, writes = 500, 4096
        share = torch.rand(count, dtype=torch.float64)
        ups = torch.zeros(count, dtype=torch.float64)
        worst = torch.zeros(count, dtype=torch.float64)
        for t in range(writes):
            found = noise.Balanced(torch.tensor(t), torch.arange(count), stream)
            ups += found.uniform() < share
            worst = torch.maximum(worst, (ups - (t + 1) * share).abs())
        assert worst.max() < 7

    def test_elements_are_spread_evenly(self):
        n = 1 << 18
        found = noise.Balanced(torch.tensor(3), torch.arange(n), 0).uniform()
        counts = torch.histc(found, 64, 0, 1)
        chi_square = ((counts - n / 64) ** 2 / (n / 64)).sum().item()
        assert 63 - 5 * 126**0.5 < chi_square < 63 + 5 * 126**0.5
        stack = torch.stack([found, found.roll(1), found.roll(64), found.roll(1000)])
        assert (torch.corrcoef(stack) - torch.eye(4)).abs().max() < 5 / n**0.5
