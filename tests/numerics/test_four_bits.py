"""Formats of four bits against tables of their codes, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import mcftensor as mcf
from mcftensor.arithmetic.noise import noise_of
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.kernels.block_scales import pack, unpack
from mcftensor.kernels.eager import indices
from mcftensor.passes.format_conversion import decode_columns, encode_columns

PARTS = np.array([0, 1, 3, 6, 10, 15, 21, 28], np.float32)
Q4 = np.array([*PARTS, math.nan, *-PARTS[1:]], np.float32) * np.float32(1 / 28)
STEPS = (1, 2, 4, 8)  # of second moments, in eighths of a binade
FINEST = dict(zip((0.1, 0.2, 0.4, 2.0), STEPS, strict=True))  # of some block, by spread
SHAPES = [(4, 64), (3, 6, 7), (1, 2), (2, 34), (5, 32, 3), (2, 0), (0, 8)]

by_format = pytest.mark.parametrize("format", [mcf.q4, mcf.ue4], ids=lambda f: f.name)
by_rounding = pytest.mark.parametrize("rounding", ["nearest", "balanced", "stochastic"])


def encoded(x: Tensor, format: mcf.Format, key: int = 3) -> list[Tensor]:
    noise = noise_of(format.rounding, torch.tensor(key), indices(x)) if format.takes_key else None
    return list(format.encode(Sum([x]), noise))


def decoded(stored: list[Tensor], format: mcf.Format) -> np.ndarray:
    return format.decode(stored)[0].double().numpy()


def tables(stored: list[Tensor], format: mcf.Format, count: int) -> np.ndarray:
    """The numbers of all codes of each element: by the table, times the scale of its block."""
    scales = np.repeat(stored[1].numpy(), 32, 1)[:, :count, None]
    if format.stem == "q4":  # a bfloat16, and products rounded to float32
        return (Q4 * (scales.astype(np.uint32) << 16).view(np.float32)).astype(np.float64)
    binades = scales % 2048 / 8 - scales // 2048 / 8 * np.arange(15, -1, -1)
    whole = np.floor(binades)
    numbers = 2.0 ** (np.maximum(whole, 1) - 127) * (binades - whole + (whole > 0))
    return numbers * (np.arange(16) > 0)


def said(stored: list[Tensor], format: mcf.Format) -> np.ndarray:
    """What codes and scales say: bytes hold two of a row, the first one last."""
    packed = stored[0].numpy().reshape(len(stored[0]), stored[0].shape[1:].numel())
    codes = np.stack([packed % 16, packed // 16], -1).reshape(len(packed), 2 * packed.shape[1])
    every = tables(stored, format, codes.shape[1])
    return np.take_along_axis(every, codes[..., None].astype(int), 2)[..., 0]


def scales_of(rows: np.ndarray, format: mcf.Format) -> np.ndarray:
    """The largest element as bfloat16; the least multiple of the step that none exceeds, and the
    least step of which 14 span the block, or the largest."""
    padded = np.pad(abs(rows), ((0, 0), (0, -rows.shape[1] % 32)))
    blocks = padded.reshape(len(rows), padded.shape[1] // 32, 32)
    largest = blocks.max(2)
    if format.stem == "q4":
        return torch.from_numpy(largest).bfloat16().view(torch.int16).numpy()
    smallest = np.where(blocks > 0, blocks, np.inf).min(2)
    high, low = (x.astype(np.float32).view(np.int32) / 2**20 for x in (largest, smallest))
    step = np.select([high - low <= 14 * step for step in STEPS], STEPS, STEPS[-1])
    return np.ceil(high / step) * step + 2048 * step


def sample(format: mcf.Format, *shape: int, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    sizes = torch.exp(spread * torch.randn(shape, generator=generator))
    return sizes * sizes if format.stem == "ue4" else x * sizes


@by_format
@by_rounding
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", FINEST)
def test_codec(format, rounding, shape, spread):
    """Codes are of the table; scales the least that hold the largest; each number becomes one of
    its neighbours; columns have the same bits."""
    format = format.with_rounding(rounding)
    x = sample(format, *shape, spread=spread)
    stored, rows = encoded(x, format), x.double().numpy().reshape(shape[0], x.shape[1:].numel())
    got = decoded(stored, format).reshape(rows.shape)
    assert stored[0].shape == (shape[0], shape[1] // 2, *shape[2:])
    assert np.array_equal(got, said(stored, format))
    assert np.array_equal(stored[1].numpy(), scales_of(rows, format))
    if format.stem == "ue4" and rows.size > 100:
        assert FINEST[spread] in stored[1] // 2048
    every = tables(stored, format, rows.shape[1]).reshape(rows.size, 16)
    for a, b, table in zip(rows.flat, got.flat, every, strict=True):
        table = table[np.isfinite(table)]
        above = table[table >= a].min(initial=np.inf)
        below = table[table <= a].max(initial=table.min())
        below = max(below, table[1]) if format.stem == "ue4" else below  # zero is of zero alone
        above = below if np.isinf(above) else above
        is_largest = format.stem == "q4" and a > (1 - 2.0**-8) * table.max()
        assert b in ((table.max(), table.min()) if is_largest else (below, above))
        if rounding == "nearest" and below < a and not is_largest:
            assert abs(b - a) <= min(a - below, above - a) * (1 + 1e-6)
    columns = [torch.empty_like(y) for y in stored]
    keys = [torch.tensor(3)] if format.takes_key else []
    encode_columns(format, [x], [[y] for y in columns], keys)
    assert all(map(torch.equal, columns, stored))
    numbers = torch.empty_like(x)
    decode_columns(format, [[y] for y in columns], [numbers])
    assert np.array_equal(numbers.double().numpy().reshape(rows.shape), got)


def test_ties_of_first_moments_go_up():
    ties = (PARTS[1:-1] + PARTS[:-2]) / 2
    x = torch.from_numpy(np.array([[28, 0, *ties, *-ties, *(ties * (1 - 2.0**-18))]], np.float32))
    got = decoded(encoded(x / 28, mcf.q4.nearest), mcf.q4)
    up = PARTS[1:-1]
    assert np.allclose(28 * got, [[28, 0, *up, *-up, *PARTS[:-2]]], rtol=1e-6)


@by_format
def test_numbers_of_a_format_stay(format):
    """The largest first moment of a block remains so, and a smaller step of second moments raises
    none of the numbers of a larger one."""
    for spread in (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0):
        x = sample(format, 32, 64, spread=spread)
        held = format.decode(encoded(x, format))[0]
        for rounding in ("nearest", "balanced", "stochastic"):
            again = format.with_rounding(rounding)
            assert torch.equal(again.decode(encoded(held, again, key=7))[0], held)


@by_format
def test_the_mean_over_writes(format):
    """First moments are right in the mean, and second ones in the mean of the root, to 1 % of the
    step between two codes, whatever the step; to nearest they are not."""
    x = torch.linspace(1, 2, 1024).view(16, 64)
    x[:, 0] = x[:, 32] = 2.0
    step = torch.full((16, 1), 1 / 8)
    for row, binades in ((0, 12), (4, 5), (8, 2)):  # all steps of second moments
        x[row : row + 4, 1] = x[row : row + 4, 33] = 2.0**-binades
        step[row : row + 4] = 2.0 ** -(row // 4)
    power = 1.0 if format.stem == "q4" else 0.5
    exact = x.double().numpy() ** power

    def error(format):
        keys = range(0, 256 * 7919, 7919)
        total = sum(decoded(encoded(x, format, key), format) ** power for key in keys)
        return abs(total / len(keys) - exact)

    scales = encoded(x, format)[1].numpy()
    assert power == 1 or np.array_equal(scales // 2048, (8 * step).repeat(1, 2).numpy())
    assert (error(format) < (0.01 if power == 1 else 0.005 * step.numpy())).all()
    assert error(format.nearest).max() > 0.1


@by_rounding
def test_a_second_moment_is_zero_only_if_it_is(rounding):
    format = mcf.ue4.with_rounding(rounding)
    for low in (*range(-149, 0, 7), 0):
        x = torch.zeros(1, 32)
        x[0, :2] = torch.tensor([1.0, 2.0**low], dtype=torch.float64)
        for key in range(3):
            y = format.decode(encoded(x, format, key))[0]
            assert torch.equal(y == 0, x == 0)
            assert y[0, 1] >= 2.0**-14


@by_rounding
def test_the_range_of_second_moments(rounding):
    """Powers of two stay from the smallest normal number on, up to 2^126 in blocks of one size."""
    format = mcf.ue4.with_rounding(rounding)
    for binade in (*range(-126, -100), 0, 125, 126):
        for smallest in (2.0**-149, 2.0**binade):
            x = torch.full((1, 32), 2.0**binade)
            x[0, 0] = smallest
            y = format.decode(encoded(x, format))[0]
            assert (y[0, 1:] == 2.0**binade).all()
            assert 0 < y[0, 0] <= max(x[0, 0], 2.0 ** max(binade - 13, -126))
    x = torch.full((1, 32), 1.01 * 2.0**126)
    assert (format.decode(encoded(x, format))[0] == 2.0**125).all()


SPECIAL = [
    ("q4", math.nan, math.nan),
    ("q4", -math.inf, math.nan),
    ("q4", 3.4e38, 255 * 2.0**120),
    ("ue4", math.nan, math.nan),
    ("ue4", math.inf, math.inf),
    ("ue4", -1.0, math.nan),
    ("ue4", 3e38, 2.0**125),
]


@pytest.mark.parametrize(("stem", "number", "expected"), SPECIAL)
@by_rounding
def test_what_is_no_number_stays_alone(stem, number, expected, rounding):
    """The others of its block are finite, and no second moment is less than it was."""
    format = mcf.formats.named(stem).with_rounding(rounding)
    x = torch.ones(2, 64)
    x[0, 3], x[0, 4] = number, 0
    stored = encoded(x, format)
    y = decoded(stored, format)
    assert np.array_equal(y[0, 3], expected, equal_nan=True)
    assert np.isfinite(np.delete(y, 3, 1)).all()
    assert y[0, 4] == 0
    assert (y[:, 32:] == 1).all()
    if stem == "ue4":
        assert (np.delete(y[0, :32], [3, 4]) >= 1).all()
    elif not math.isfinite(number):
        assert (np.delete(y[0, :32], [3, 4]) == 1).all()
    again = format.nearest.encode(Sum([format.decode(stored)[0]]), None)
    assert np.array_equal(decoded(list(again), format), y, equal_nan=True)


def test_halves_of_bytes():
    codes = torch.arange(24, dtype=torch.uint8).view(2, 4, 3) % 16
    assert pack(codes).tolist()[0] == [[16, 50, 84], [118, 152, 186]]
    assert torch.equal(unpack(pack(codes)), codes)
    with pytest.raises(ValueError, match=r"even second dimension, not of shape \(2, 3\)"):
        mcf.as_expansion(torch.ones(2, 3), mcf.q4)
    with pytest.raises(ValueError, match=r"negative.*mcf\.mxfp8"):
        mcf.as_expansion(-torch.ones(2, 4), mcf.ue4)


def test_memory():
    """Half a byte an element, and two bytes for each 32."""
    x = mcf.as_expansion(torch.rand(8, 64, 3), mcf.ue4)
    assert sum(y.untyped_storage().nbytes() for y in x.components) == x.nbytes == 8 * (96 + 2 * 6)
    assert (x.shape, x.stride(), x.dtype) == ((8, 64, 3), (192, 3, 1), torch.float32)
    assert mcf.finfo(mcf.q4).bits == 4
