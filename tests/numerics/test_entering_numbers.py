"""Numbers and integers that become expansions, or meet them, keep all bits that a format holds."""

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch

import mcftensor as mcf
from mcftensor.arithmetic.rounding import round_to
from support.contract import fractions
from support.no_float64 import no_float64

LONG = pytest.mark.parametrize(
    "format", [mcf.fp32x3, mcf.fp64x2, mcf.Format(torch.bfloat16, 6)], ids=lambda f: f.name
)
TENTH = 0.1  # 53 bits
WHOLE = [2**53 + 1, -(2**62) - 3, 2**40 + 1, 7]


def modes(format):
    """With float64, and without it where the format does not consist of it."""
    return [nullcontext()] if format.dtype == torch.float64 else [nullcontext(), no_float64()]


@pytest.mark.thinned(of=4)
@LONG
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda x: x * TENTH, 3 * Fraction(TENTH), id="mul"),
        pytest.param(lambda x: x.clone().mul_(TENTH), 3 * Fraction(TENTH), id="mul_"),
        pytest.param(lambda x: x + TENTH, 3 + Fraction(TENTH), id="add"),
        pytest.param(lambda x: x.clamp(max=TENTH), Fraction(TENTH), id="clamp"),
        pytest.param(lambda x: x.clone().fill_(TENTH), Fraction(TENTH), id="fill_"),
        pytest.param(lambda x: x.new_tensor([TENTH]), Fraction(TENTH), id="new_tensor"),
        pytest.param(lambda x: torch.where(x > 0, TENTH, x), Fraction(TENTH), id="where"),
        pytest.param(lambda x: torch.tensor([TENTH], dtype=x.format), Fraction(TENTH), id="tensor"),
        pytest.param(lambda x: torch.full((1,), TENTH, dtype=x.format), Fraction(TENTH), id="full"),
        pytest.param(
            lambda x: torch.full((1,), fill_value=TENTH, dtype=x.format),
            Fraction(TENTH),
            id="fill_value",
        ),
        pytest.param(lambda x: torch.full_like(x, TENTH), Fraction(TENTH), id="full_like"),
        pytest.param(lambda x: x % TENTH, Fraction(3) % Fraction(TENTH), id="remainder"),
    ],
)
def test_numbers(make, expected, format):
    for mode in modes(format):
        with mode:
            found = make(mcf.as_expansion(torch.tensor([3.0]), format))
        assert fractions(found) == [expected]


@LONG
def test_numbers_on_the_tape(format):
    for mode in modes(format):
        with mode:
            p = torch.nn.Parameter(mcf.as_expansion(torch.ones(3), format))
            p.grad = torch.zeros(3, dtype=format.dtype)
            torch.optim.SGD([p], lr=1.0, momentum=0.0, weight_decay=TENTH).step()
        u = Fraction(2) ** -format.precision
        assert all(abs(x - (1 - Fraction(TENTH))) <= 4 * u for x in fractions(p))


@LONG
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x, whole: whole.to(x.format), id="to"),
        pytest.param(lambda x, whole: x + whole, id="add"),
        pytest.param(lambda x, whole: x.copy_(whole), id="copy_"),
        pytest.param(lambda x, whole: torch.where(x == 0, whole, x), id="where"),
    ],
)
def test_integers(make, format):
    for mode in modes(format):
        with mode:
            found = make(mcf.as_expansion(torch.zeros(len(WHOLE)), format), torch.tensor(WHOLE))
        if format.precision >= 63:
            assert fractions(found) == WHOLE
        else:
            u = Fraction(2) ** -format.precision
            for x, y in zip(fractions(found), WHOLE, strict=True):
                assert abs(x - y) <= abs(y) * u


ROUNDED = [
    sign * (2**k + 2 ** (k - bits) + nudge)
    for k in range(24, 63)
    for bits in (4, 8, 11, 16)
    for nudge in (-1, 0, 1)
    for sign in (1, -1)
]
"""Integers at and beside the middle between two numbers of so many bits."""


@pytest.mark.parametrize("bits", [pytest.param(8, id="bf16"), pytest.param(16, id="bf16i8")])
def test_integers_are_rounded_once(bits):
    format = {8: torch.bfloat16, 16: mcf.bf16i8.nearest}[bits]
    whole = torch.tensor(ROUNDED)
    for mode in modes(mcf.bf16i8):
        with mode:
            found = round_to(whole, format) if bits == 8 else whole.to(format)
        assert fractions(found) == [nearest_of(x, bits) for x in ROUNDED]


@pytest.mark.parametrize("format", [mcf.mxfp8, mcf.ue5m3, mcf.e4m3i8, mcf.e4m3i16], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_integers_in_blocks(format, dtype):
    whole = torch.randint(torch.iinfo(dtype).max, (4, 64), dtype=dtype) >> 12 * (dtype.itemsize > 4)
    expected = mcf.as_expansion(whole.to(torch.float64), format)
    for mode in modes(format):
        with mode:
            found = whole.to(format)
        assert torch.equal(found, expected)


def nearest_of(whole: int, bits: int) -> int:
    """An integer rounded to so many bits, to even at the middle."""
    dropped = max(0, abs(whole).bit_length() - bits)
    return round(Fraction(whole, 2**dropped)) * 2**dropped


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "format", [mcf.bf16x3, mcf.fp32x2, mcf.fp32x3, mcf.fp64x2], ids=lambda f: f.name
)
def test_evenly_spaced_numbers(format):
    start, end, step = Fraction(TENTH), Fraction(1.3), Fraction(1.3) - Fraction(TENTH)
    for mode in modes(format):
        with mode:
            spaced = torch.linspace(TENTH, 1.3, 10, dtype=format)
            stepped = torch.arange(TENTH, 1.3, TENTH, dtype=format)
            assert torch.linspace(0, 1, 1, dtype=format).tolist() == [0.0]
            assert torch.linspace(0, 1, 0, dtype=format).shape == (0,)
            assert torch.arange(5, dtype=format).tolist() == [0, 1, 2, 3, 4]
        assert len(stepped) == len(torch.arange(TENTH, 1.3, TENTH, dtype=torch.float64))
        u = Fraction(2) ** -format.precision
        expected = [start + step * i / 9 for i in range(10)]
        for x, y in zip(fractions(spaced), expected, strict=True):
            assert abs(x - y) <= 8 * u * y
        assert abs(fractions(spaced)[-1] - end) <= 2 * u * end
        for i, x in enumerate(fractions(stepped)):
            assert abs(x - start * (i + 1)) <= 8 * u * x


def test_what_float32_rounds_is_refused():
    with no_float64(), pytest.raises(NotImplementedError, match=r"logspace.*takes float64"):
        torch.logspace(0, 1, 5, dtype=mcf.fp32x2)


@pytest.mark.parametrize("format", [mcf.fp32x3, mcf.fp64x2], ids=lambda f: f.name)
def test_numbers_that_replace_elements_keep_their_bits(format):
    x = mcf.as_expansion(torch.tensor([0.5, torch.nan, torch.inf, -torch.inf]), format)
    for found in (
        torch.nn.functional.threshold(x, 0.75, 0.1)[0],
        torch.nan_to_num(x, 0.1, 0.1, 0.1)[1],
        torch.nan_to_num(x, 0.1, 0.1, 0.1)[2],
        torch.nan_to_num(x, 0.1, 0.1, 0.1)[3],
    ):
        assert mcf.exact.to_fraction(found) == Fraction(0.1)


@pytest.mark.parametrize("format", [mcf.fp32x3, mcf.fp64x2], ids=lambda f: f.name)
def test_moments_of_no_numbers_are_nan(format):
    x = mcf.as_expansion(torch.zeros(2, 0), format)
    for found in (x.std(), x.var(), torch.std_mean(x)[1], x.std(1), torch.var_mean(x, 1)[0]):
        assert torch.isnan(found).all()
    assert x.std(1).shape == (2,)
    assert x.std(0, keepdim=True).shape == (1, 0)


def into_places(target, x):
    target[:] = x


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("write", [torch.Tensor.copy_, into_places], ids=["copy_", "places"])
@LONG
def test_integers_that_are_written_to_are_those_of_a_conversion(format, write, dtype):
    for mode in modes(format):
        with mode:
            x = mcf.exact.from_exact(WHOLE, format)
            target = torch.zeros(len(WHOLE), dtype=dtype)
            write(target, x)
            assert torch.equal(target, x.to(dtype))
            assert dtype != torch.int64 or target.tolist() == WHOLE


BEYOND = 2**53 + 1
HOLDING = [mcf.fp64x2, mcf.Format(torch.float64, 3), mcf.fp32x3]
ENTRIES = {
    "==": lambda x, n, f: (x == n).to(torch.int64) * n,
    "!=": lambda x, n, f: (x != n).to(torch.int64) + n,
    "<=": lambda x, n, f: (x <= n).to(torch.int64) * n,
    "x - n": lambda x, n, f: x - n + x,
    "n - x": lambda x, n, f: (n - x) + x,
    "zeros + n": lambda x, n, f: torch.zeros_like(x) + n,
    "ones * n": lambda x, n, f: torch.ones_like(x) * n,
    "n * ones": lambda x, n, f: n * torch.ones_like(x),
    "n / 1": lambda x, n, f: n / torch.ones_like(x),
    "alpha": lambda x, n, f: torch.add(torch.zeros_like(x), torch.ones_like(x), alpha=n),
    "alpha in place": lambda x, n, f: torch.zeros_like(x).add_(torch.ones_like(x), alpha=n),
    "value": lambda x, n, f: torch.addcmul(
        torch.zeros_like(x), torch.ones_like(x), torch.ones_like(x), value=n
    ),
    "+=": lambda x, n, f: torch.zeros_like(x).__iadd__(n),
    "full": lambda x, n, f: torch.full((1,), n, dtype=f),
    "full by name": lambda x, n, f: torch.full((1,), fill_value=n, dtype=f),
    "full_like": lambda x, n, f: torch.full_like(x, n),
    "full_like with a format": lambda x, n, f: torch.full_like(torch.ones(1), n, dtype=f),
    "new_full": lambda x, n, f: x.new_full((1,), n),
    "scalar_tensor": lambda x, n, f: torch.scalar_tensor(n, dtype=f).view(1),
    "fill_": lambda x, n, f: torch.zeros_like(x).fill_(n),
    "x[0] = n": lambda x, n, f: _set(torch.zeros_like(x), 0, n),
    "x[mask] = n": lambda x, n, f: _set(torch.zeros_like(x), torch.tensor([True]), n),
    "x[:] = n": lambda x, n, f: _set(torch.zeros_like(x), slice(None), n),
    "tensor": lambda x, n, f: torch.tensor([n], dtype=f),
    "tensor beside a float": lambda x, n, f: torch.tensor([n, 0.5], dtype=f)[:1],
    "as_tensor": lambda x, n, f: torch.as_tensor([n], dtype=f),
    "new_tensor": lambda x, n, f: x.new_tensor([n]),
    "where": lambda x, n, f: torch.where(x > 0, n, x),
    "masked_fill": lambda x, n, f: torch.zeros_like(x).masked_fill(x > 0, n),
    "clamp": lambda x, n, f: torch.zeros_like(x).clamp(min=n),
    "maximum": lambda x, n, f: torch.zeros_like(x).clamp_min(n),
    "index_fill": lambda x, n, f: x.index_fill(0, torch.tensor([0]), n),
    "_foreach_add": lambda x, n, f: torch._foreach_add([torch.zeros_like(x)], n)[0],
    "_foreach_mul": lambda x, n, f: torch._foreach_mul([torch.ones_like(x)], [n])[0],
    "fma": lambda x, n, f: mcf.functional.fma(torch.ones_like(x), n, torch.zeros_like(x)),
    "lerp": lambda x, n, f: torch.lerp(torch.zeros_like(x), torch.ones_like(x), n),
    "pow": lambda x, n, f: torch.full((1,), n, dtype=f) ** 1,
    "remainder": lambda x, n, f: (x + 1) % n + (x - 1),
    "floor_divide": lambda x, n, f: (x // n) * x,
    "heaviside": lambda x, n, f: torch.heaviside(torch.zeros_like(x), x),
    "constant_pad_nd": lambda x, n, f: torch.constant_pad_nd(x, (0, 1), n)[1:],
}  # fmt: skip


def _set(x, index, n):
    x[index] = n
    return x


@pytest.mark.thinned(of=5)
@pytest.mark.parametrize("number", [BEYOND, -BEYOND, 2**62 + 2**9 - 1, 2**53 - 1, 3])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("format", HOLDING, ids=str)
@pytest.mark.with_float64("terms of float64")
def test_ints_of_any_length_enter_whole(format, entry, number):
    if number < 0 and entry in ("clamp", "maximum", "where", "masked_fill", "remainder"):
        return
    x = mcf.exact.from_exact([number], format)
    found = ENTRIES[entry](x, number, format)
    if found.dtype == torch.int64:
        assert found.item() == number
    else:
        assert mcf.exact.to_fraction(found) == [number]


@pytest.mark.parametrize("number", [2**100 + 1, -(2**90) - 1])
def test_ints_beyond_int64(number):
    for format in (mcf.fp64x2, mcf.Format(torch.float64, 3)):
        for x in (
            torch.tensor([number], dtype=format),
            torch.tensor([number, 0], dtype=format)[:1],
        ):
            assert mcf.exact.to_fraction(x) == [number]
    x = torch.zeros(2, dtype=mcf.fp64x2)
    x[1] = number
    assert mcf.exact.to_fraction(x) == [0, number]
