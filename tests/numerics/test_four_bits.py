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

SIGNED = [0.0, *(2.0 ** (c - 7) for c in range(1, 8))]
TABLES = {
    "e3m0": np.array([*SIGNED, math.nan, *(-x for x in SIGNED[1:])]),
    "ue4m0": np.array([0.0, *(2.0 ** (c - 15) for c in range(1, 16))]),
}
SHAPES = [(4, 64), (3, 6, 7), (1, 2), (2, 34), (5, 32, 3), (2, 0), (0, 8)]

by_format = pytest.mark.parametrize("format", [mcf.e3m0, mcf.ue4m0], ids=lambda f: f.name)
by_rounding = pytest.mark.parametrize("rounding", ["nearest", "balanced", "stochastic"])


def encoded(x: Tensor, format: mcf.Format, key: int = 3) -> list[Tensor]:
    noise = noise_of(format.rounding, torch.tensor(key), indices(x)) if format.takes_key else None
    return list(format.encode(Sum([x]), noise))


def decoded(stored: list[Tensor], format: mcf.Format) -> np.ndarray:
    return format.decode(stored)[0].double().numpy()


def exponents(stored: list[Tensor], count: int) -> np.ndarray:
    """Of the scale of each element, one row for each."""
    return np.repeat(stored[1].numpy().astype(np.float64) - 127, 32, 1)[:, :count]


def said(stored: list[Tensor], format: mcf.Format) -> np.ndarray:
    """What codes and scales say, by the table: bytes hold two of a row, the first one last."""
    packed = stored[0].numpy().reshape(len(stored[0]), stored[0].shape[1:].numel())
    codes = np.stack([packed % 16, packed // 16], -1).reshape(len(packed), 2 * packed.shape[1])
    return TABLES[format.stem][codes] * 2.0 ** exponents(stored, codes.shape[1])


def sample(format: mcf.Format, *shape: int, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp(spread * torch.randn(shape, generator=generator))
    return x * x if format.stem == "ue4m0" else x


@by_format
@by_rounding
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codec(format, rounding, shape):
    """Codes are of the table; scales the least that hold the largest; each number becomes one of
    its neighbours; columns have the same bits."""
    format = format.with_rounding(rounding)
    x = sample(format, *shape)
    stored, rows = encoded(x, format), x.double().numpy().reshape(shape[0], x.shape[1:].numel())
    got = decoded(stored, format).reshape(rows.shape)
    assert stored[0].shape == (shape[0], shape[1] // 2, *shape[2:])
    assert np.array_equal(got, said(stored, format))
    padded = np.pad(abs(rows), ((0, 0), (0, -rows.shape[1] % 32)))
    largest = padded.reshape(shape[0], padded.shape[1] // 32, 32).max(2)
    assert np.array_equal(stored[1].numpy(), np.ceil(np.log2(largest)) + 127)
    table = np.unique(TABLES[format.stem][np.isfinite(TABLES[format.stem])])
    units = 2.0 ** exponents(stored, rows.shape[1])
    for a, b, unit in zip(rows.flat, got.flat, units.flat, strict=True):
        below, above = (table[table * unit <= a].max(), table[table * unit >= a].min())
        below = max(below, table[1]) if format.stem == "ue4m0" else below  # zero is of zero alone
        assert b in (below * unit, above * unit)
        if rounding == "nearest" and below * unit < a:
            assert abs(b - a) == min(a - below * unit, above * unit - a)
    columns = [torch.empty_like(y) for y in stored]
    keys = [torch.tensor(3)] if format.takes_key else []
    encode_columns(format, [x], [[y] for y in columns], keys)
    assert all(map(torch.equal, columns, stored))
    numbers = torch.empty_like(x)
    decode_columns(format, [[y] for y in columns], [numbers])
    assert np.array_equal(numbers.double().numpy().reshape(rows.shape), got)


def test_ties_go_to_even_codes_and_nearest_is_nearest_to_zero():
    half = np.float32(2.0**-7)  # half the smallest code
    above, below = np.nextafter(half, np.float32(1)), np.nextafter(half, np.float32(0))
    x = torch.tensor([[1.0, 0.75, 0.375, half, -above, above, below, -0.1875]])
    got = decoded(encoded(x, mcf.e3m0.nearest), mcf.e3m0)
    assert got.tolist() == [[1, 0.5, 0.5, 0, -(2.0**-6), 2.0**-6, 0, -0.125]]


@by_format
def test_the_mean_over_writes(format):
    """First moments are right in the mean, and second ones in the mean of the root, to 1 % of the
    step between two codes; to nearest they are not."""
    x = torch.linspace(1, 2, 1024).view(16, 64)
    x[:, 0] = x[:, 32] = 2.0
    power = 1.0 if format.stem == "e3m0" else 0.5
    exact = x.double().numpy() ** power

    def error(format):
        keys = range(0, 256 * 7919, 7919)
        total = sum(decoded(encoded(x, format, key), format) ** power for key in keys)
        return abs(total / len(keys) - exact)

    assert error(format).max() < (0.01 if power == 1 else 0.015)
    assert error(format.nearest).max() > 0.1


@by_rounding
def test_a_second_moment_is_zero_only_if_it_is(rounding):
    format = mcf.ue4m0.with_rounding(rounding)
    for low in (*range(-149, 0, 7), 0):
        x = torch.zeros(1, 32)
        x[0, :2] = torch.tensor([1.0, 2.0**low], dtype=torch.float64)
        for key in range(3):
            y = format.decode(encoded(x, format, key))[0]
            assert torch.equal(y == 0, x == 0)
            assert y[0, 1] >= 2.0**-14


SPECIAL = [
    ("e3m0", math.nan, math.nan),
    ("e3m0", -math.inf, math.nan),
    ("e3m0", 3e38, 2.0**127),
    ("ue4m0", math.nan, math.nan),
    ("ue4m0", math.inf, math.inf),
    ("ue4m0", -1.0, math.nan),
    ("ue4m0", 3e38, 2.0**125),
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
    if stem == "ue4m0":
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
        mcf.as_expansion(torch.ones(2, 3), mcf.e3m0)
    with pytest.raises(ValueError, match=r"negative.*mcf\.mxfp8"):
        mcf.as_expansion(-torch.ones(2, 4), mcf.ue4m0)


def test_memory():
    """Half a byte an element, and a byte for each 32."""
    x = mcf.as_expansion(torch.rand(8, 64, 3), mcf.ue4m0)
    assert sum(y.untyped_storage().nbytes() for y in x.components) == x.nbytes == 8 * (96 + 6)
    assert (x.shape, x.stride(), x.dtype) == ((8, 64, 3), (192, 3, 1), torch.float32)
    assert mcf.finfo(mcf.e3m0).bits == 4
