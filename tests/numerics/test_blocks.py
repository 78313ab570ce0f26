"""Formats of blocks against tables of their codes, in float64 and with torch's own E4M3."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mcftensor as mcf
from mcftensor.arithmetic.noise import noise_of
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.kernels.block_scales import BLOCK_SIZE, block_max, shape_of_shared, spread
from mcftensor.kernels.eager import indices
from mcftensor.passes.format_conversion import decode_columns, encode_columns

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
UE5M3 = np.array([0.0] + [2.0 ** ((c >> 3) - 31) * (1 + (c & 7) / 8) for c in range(1, 256)])
TABLES = {"mxfp8": E4M3, "ue5m3": UE5M3}
FORMATS = [mcf.mxfp8, mcf.ue5m3]
ROUNDINGS = ["nearest", "balanced", "stochastic"]

SHAPES = st.lists(st.integers(1, 70), min_size=2, max_size=3).map(tuple)

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
by_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def encoded(x: Tensor, format: mcf.Format, key: int = 3) -> list[Tensor]:
    noise = noise_of(format.rounding, torch.tensor(key), indices(x)) if format.takes_key else None
    return list(format.encode(Sum([x]), noise))


def decoded(stored: list[Tensor], format: mcf.Format) -> np.ndarray:
    return format.decode(stored)[0].double().numpy()


def said(stored: list[Tensor], format: mcf.Format) -> np.ndarray:
    """What codes and scales say, by the table."""
    codes, scales = (x.numpy() for x in stored)
    rows = codes.reshape(codes.shape[0], torch.Size(codes.shape[1:]).numel())
    exponents = np.repeat(scales.astype(np.float64) - 127, BLOCK_SIZE, 1)[:, : rows.shape[1]]
    return (TABLES[format.stem][rows] * 2.0**exponents).reshape(codes.shape)


def sample(format: mcf.Format, *shape: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp(spread * torch.randn(shape, generator=generator))
    return x * x if format.stem == "ue5m3" else x


def scales_of(x: np.ndarray, format: mcf.Format) -> np.ndarray:
    """By the rule, in float64."""
    rows = np.abs(x.reshape(x.shape[0], torch.Size(x.shape[1:]).numel()).astype(np.float64))
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK_SIZE)))
    largest = rows.reshape(x.shape[0], rows.shape[1] // BLOCK_SIZE, BLOCK_SIZE).max(2)
    # Of the least float64, a subnormal, for zero.
    exponents = np.log2(np.maximum(largest, 5e-324) / {"mxfp8": 448, "ue5m3": 1.875}[format.stem])
    return np.maximum(np.ceil(exponents) + 127, 1)


@by_format
@by_rounding
@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 7), (1, 1), (2, 33), (5, 32, 3), (2, 0), (0, 7)])
class TestCodec:
    def test_codes_say_what_the_table_says(self, format, rounding, shape):
        format = format.with_rounding(rounding)
        stored = encoded(sample(format, *shape), format)
        assert np.array_equal(decoded(stored, format), said(stored, format))

    def test_scales_are_the_least_that_hold_the_largest(self, format, rounding, shape):
        format = format.with_rounding(rounding)
        x = sample(format, *shape)
        assert np.array_equal(encoded(x, format)[1].numpy(), scales_of(x.numpy(), format))

    @pytest.mark.thinned(of=2)
    def test_a_code_is_one_of_the_two_neighbours(self, format, rounding, shape):
        format = format.with_rounding(rounding)
        x = sample(format, *shape)
        stored = encoded(x, format)
        exact, got = x.double().numpy().ravel(), decoded(stored, format).ravel()
        units = np.repeat(2.0 ** (stored[1].double().numpy() - 127), BLOCK_SIZE, 1)
        units = units[:, : torch.Size(shape[1:]).numel()].ravel()
        table = np.unique(TABLES[format.stem][np.isfinite(TABLES[format.stem])])
        for a, b, unit in zip(exact, got, units, strict=True):
            own = table * unit
            below = own[own <= a].max()
            above = own[own >= a].min()
            if format.stem == "ue5m3" and a > 0:
                below = max(below, own[1])
            assert b in (below, above)
            if rounding == "nearest" and below < a:
                assert abs(b - a) == min(a - below, above - a)

    def test_columns_have_the_bits_of_eager_code(self, format, rounding, shape):
        format = format.with_rounding(rounding)
        x = sample(format, *shape)
        expected = encoded(x, format)
        got = [torch.empty_like(y) for y in expected]
        keys = [torch.tensor(3)] if format.takes_key else []
        encode_columns(format, [x], [[y] for y in got], keys)
        assert all(map(torch.equal, got, expected))
        numbers = torch.empty_like(x)
        decode_columns(format, [[y] for y in got], [numbers])
        assert torch.equal(numbers, format.decode(expected)[0])


def test_ties_go_to_even_codes():
    x = torch.tensor([[448.0, 1 + 1 / 16, 1 + 3 / 16, 2.0**-10, 3 * 2.0**-10, -1 - 1 / 16]])
    got = decoded(encoded(x, mcf.mxfp8.nearest), mcf.mxfp8)
    assert got.tolist() == [[448, 1, 1.25, 0, 2 * 2.0**-9, -1]]


def test_nearest_is_nearest_below_the_normal_numbers():
    """Where float32 has more bits than the sum by which they are rounded."""
    just_above = np.nextafter(np.float32(2.0**-10), np.float32(1))
    just_below = np.nextafter(np.float32(2.0**-10), np.float32(0))
    x = torch.tensor([[448.0, just_above, just_below, -just_above]])
    got = decoded(encoded(x, mcf.mxfp8.nearest), mcf.mxfp8)
    assert got.tolist() == [[448, 2.0**-9, 0, -(2.0**-9)]]


class TestNothingIsLost:
    @given(st.integers(-126, 125), st.integers(-149, 126), st.sampled_from(ROUNDINGS))
    def test_a_second_moment_is_zero_only_if_it_is(self, high, low, rounding):
        x = torch.zeros(1, 32)
        x[0, :2] = torch.tensor([2.0**high, 2.0**low], dtype=torch.float64)
        format = mcf.ue5m3.with_rounding(rounding)
        for key in range(3):
            y = format.decode(encoded(x, format, key))[0]
            assert torch.equal(y == 0, x == 0)

    @given(st.integers(-126, 127), st.floats(1, 2, exclude_max=True, width=32), st.integers(0, 99))
    def test_nothing_else_saturates(self, exponent, fraction, key):
        """Than numbers above the largest of four bits, in whatever way they are rounded."""
        x = torch.full((1, 32), fraction * 2.0**exponent, dtype=torch.float64).float()
        most = {"mxfp8": 1.875 * 2.0**127, "ue5m3": 1.625 * 2.0**127}
        for format, rounding in itertools.product(FORMATS, ROUNDINGS):
            y = decoded(encoded(x, format.with_rounding(rounding), key), format)
            wanted = np.minimum(x.double().numpy(), most[format.stem])
            error = 2.0**-4 if rounding == "nearest" else 2.0**-3
            assert abs(y / wanted - 1).max() <= error or exponent < -117
            assert y.max() <= most[format.stem]

    def test_the_mean_over_writes_is_the_number(self):
        """Of first moments; of second ones the mean of the root."""
        x = torch.linspace(1, 2, 4096).view(64, 64)
        x[:, 0] = 7.5
        for format, power in ((mcf.mxfp8, 1.0), (mcf.ue5m3, 0.5)):
            for rounding, allowed in (("balanced", 3e-4), ("stochastic", 3e-3)):
                own = format.with_rounding(rounding)
                total = np.zeros((64, 64))
                for key in range(512):
                    total += decoded(encoded(x, own, key * 7919), own) ** power
                error = abs(total / 512 / x.double().numpy() ** power - 1)
                assert error.mean() < allowed

    def test_the_root_has_no_bias(self):
        """Rounded without one itself, a second moment would have a root that is 2e-4 low."""
        x = torch.linspace(1, 2, 4096, dtype=torch.float64).view(64, 64)[:, :-1].float()
        x = torch.cat([torch.full((64, 1), 1.875), x], 1)
        total = np.zeros((64, 64))
        for key in range(512):
            total += decoded(encoded(x, mcf.ue5m3, key * 7919), mcf.ue5m3) ** 0.5
        assert abs((total / 512 / x.double().numpy() ** 0.5 - 1).mean()) < 5e-5


LARGE = [2.0e38, 3.4e38, math.inf]
SPECIAL = [("mxfp8", math.nan), ("mxfp8", -math.inf), ("ue5m3", math.nan), ("ue5m3", -1e-3)]


@pytest.mark.parametrize(
    ("stem", "number"), [*SPECIAL, *((f.stem, x) for f in FORMATS for x in LARGE)]
)
@by_rounding
def test_what_is_no_number_stays_alone(stem, number, rounding):
    """The others of its block are finite, and no second moment is less than it was."""
    format = mcf.formats.named(stem).with_rounding(rounding)
    x = torch.rand(2, 64) + 1
    x[0, 3], x[0, 4] = number, 0
    stored = encoded(x, format)
    y = decoded(stored, format)
    if math.isfinite(number) and number > 0:
        assert 0.7 * number <= y[0, 3] <= 1.1 * number
    else:
        wanted = math.inf if (stem, number) == ("ue5m3", math.inf) else math.nan
        assert np.array_equal(y[0, 3], wanted, equal_nan=True)
    own = encoded(x[:, 32:].contiguous(), format)
    assert np.isfinite(np.delete(y, 3, 1)).all()
    assert y[0, 4] == 0
    if stem == "ue5m3":
        assert (np.delete(y[0, :32], [3, 4]) >= 1).all()
    assert np.isfinite(decoded(own, format)).all()
    # Read and written again it is the same.
    again = format.nearest.encode(Sum([format.decode(stored)[0]]), None)
    assert np.array_equal(decoded(list(again), format), y, equal_nan=True)


def test_older_blocks_without_numbers_are_read():
    """The scale 255 made NaNs of all."""
    stored = [torch.zeros(1, 64, dtype=torch.uint8), torch.tensor([[255, 127]], dtype=torch.uint8)]
    for format in FORMATS:
        assert np.isnan(decoded(stored, format)[0, :32]).all()
        assert not np.isnan(decoded(stored, format)[0, 32:]).any()


def test_negative_zeros_are_second_moments():
    x = torch.ones(1, 64)
    x[0, 40] = -0.0
    assert torch.equal(mcf.ue5m3.decode(encoded(x, mcf.ue5m3.nearest))[0], x)
    with pytest.raises(ValueError, match="negative"):
        mcf.as_expansion(torch.full((2, 32), -1.0), mcf.ue5m3)


class TestSharing:
    @given(SHAPES, st.integers(0, 2**31 - 1))
    def test_the_largest_of_each_block(self, shape, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 2**31 - 1, shape, generator=generator, dtype=torch.int32)
        found = block_max(x)
        assert found.shape == shape_of_shared(x.shape)
        for row, own in zip(x.reshape(shape[0], -1), found, strict=True):
            assert own.tolist() == [int(part.max()) for part in row.split(BLOCK_SIZE)]

    @given(SHAPES)
    def test_what_blocks_share_is_spread(self, shape):
        x = torch.zeros(shape)
        shared = torch.arange(shape_of_shared(x.shape).numel()).view(shape_of_shared(x.shape))
        found = spread(shared, x).reshape(shape[0], -1)
        assert found.shape[1] == x[0].numel()
        for row, own in zip(found, shared, strict=True):
            assert row.tolist() == [int(own[i // BLOCK_SIZE]) for i in range(len(row))]
