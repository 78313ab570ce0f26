"""Scaled formats: what is encoded how, what leaves them, and what copies, views and files keep."""

import copy
import io
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mcftensor as mcf
from support.scales import FORMATS, FP16, at, bits_of, exact, is_scaled, least_of, normal, rms

FEW = settings(max_examples=20)
TAILED = mcf.scaling.scaled(torch.float16, tail=8)
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


@formats
@FEW
@given(s=st.integers(-100, 100), spread=st.sampled_from([0.0, 1.0, 4.0]))
def test_encoding_rounds_once_and_places_by_size(format, s, spread):
    generator = torch.Generator().manual_seed(s + 100)
    numbers = torch.randn(300, generator=generator, dtype=torch.float64)
    numbers = numbers * (torch.randn(300, generator=generator, dtype=torch.float64) * spread).exp()
    numbers = numbers * 2.0**s
    x = mcf.as_expansion(numbers, format)
    largest = x.components[0].double().abs().max().item()
    # the data's root mean square is in [1, 2), unless the largest number would not fit
    room = {torch.float16: 15, torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}.get(format.dtype, 61)
    assert largest <= 2.0**room
    assert 0.95 <= rms(x) <= 2.05 or (rms(x) < 1 and largest >= 2.0 ** (room - 1))
    unit, least = 2.0 ** -bits_of(format), 2.0 ** (least_of(format) - 1 + x.exponent.item())
    bound = numbers.abs() * unit * (1 + 2.0**-20) + least
    error = (exact(x) - numbers).abs()
    assert (error <= bound).all()
    normal_ones = numbers.abs() >= 2.0 ** (x.exponent.item() - 5)
    assert spread or (error / bound)[normal_ones].max() > 0.2  # or the bound would say nothing


def test_float64_is_rounded_once():
    # just above the middle between two float16, by less than float32 can see
    x = torch.tensor([1 + 2.0**-11 + 2.0**-40, 1.0], dtype=torch.float64)
    assert mcf.as_expansion(x, FP16).components[0][0] == 1 + 2.0**-10


@FEW
@given(s=st.integers(-140, 120))
def test_a_scaled_expansion_has_22_bits_over_the_whole_range(s):
    generator = torch.Generator().manual_seed(s + 200)
    binades = torch.randint(-12, 1, (200,), generator=generator)
    numbers = torch.rand(200, generator=generator, dtype=torch.float64) * 2.0 ** (binades + s)
    x = mcf.as_expansion(numbers, mcf.scaling.scaled(mcf.fp16x2))
    relative = ((exact(x) - numbers).abs() / numbers)[numbers > 2.0 ** (s - 13)]
    assert relative.max() <= 2.0**-22
    assert relative.max() > 2.0**-25


@formats
def test_bits_and_bytes(format):
    x = mcf.as_expansion(torch.ones(3), format)
    assert format.precision == bits_of(format)
    assert format.bytes == sum(part.element_size() for part in x.components[:-1])
    assert eval(repr(format), {"mcf": mcf, "torch": torch}) is format


def test_an_integer_tail_rounds_float64_once():
    # just above the middle between two numbers of 19 bits, by less than float32 can see
    x = torch.tensor([1 + 2.0**-19 + 2.0**-40, 1.0], dtype=torch.float64)
    made = mcf.as_expansion(x, TAILED)
    assert exact(made)[0] == 1 + 2.0**-18
    assert made.components[0][0] == 1


def test_ties_of_integer_tails_go_to_even():
    units = torch.tensor([1.0, 3.0, 5.0, -1.0, -3.0]) * 2.0**-19  # halves of the last bit
    made = mcf.as_expansion(torch.where(units > 0, 1 + units, units - 1), TAILED)
    steps = torch.tensor([0, 2, 2, 0, -2]) * 2.0**-18
    assert exact(made).tolist() == [1, 1 + 2.0**-17, 1 + 2.0**-17, -1, -1 - 2.0**-17]
    assert (exact(made) - units.sign() == steps.double()).all()
    small = torch.tensor([2.5, 3.5, 2.0**33]) * 2.0**-33  # below the normal range: halves of 2^-32
    assert exact(at_tail(small)).tolist() == [2.0**-33 * 2, 2.0**-33 * 4, 1]


def at_tail(numbers):
    """Encoded under the scale 1."""
    exponent = torch.tensor(0, dtype=torch.int32)
    return mcf.MCFTensor([*TAILED.store(numbers), exponent], TAILED)


def test_the_leading_float16_of_an_integer_tail_is_the_nearest():
    x = torch.randn(5000, dtype=torch.float64)
    made = mcf.as_expansion(x, TAILED)
    leading = made.components[0].double() * 2.0 ** made.exponent.item()
    nearest = mcf.as_expansion(x, FP16)
    assert (leading == exact(nearest)).double().mean() > 0.995  # but for ties of 19 bits
    assert ((leading - exact(made)).abs() <= 2.0**-11 * exact(made).abs()).all()
    assert made.components[1].unique().numel() == 256


@formats
def test_leaving_is_exact(format):
    x = mcf.as_expansion(torch.randn(50, dtype=torch.float64) * 2.0**-90, format)
    assert torch.equal(mcf.as_plain(x, torch.float64), exact(x))
    assert torch.equal(mcf.as_plain(x, torch.float32), exact(x).float())
    assert x.tolist() == exact(x).tolist()
    assert (x.numpy() == exact(x).numpy()).all()
    assert x[3].item() == exact(x)[3].item()
    assert mcf.as_plain(x).dtype == format.dtype


def test_exact_numbers():
    x = mcf.exact.from_exact(["1/3", "1e-30", 0], mcf.scaling.scaled(mcf.fp16x2))
    one, small, zero = mcf.exact.to_fraction(x)
    assert abs(one - Fraction(1, 3)) <= Fraction(1, 3 * 2**22)
    assert zero == 0
    assert small == 0  # 2^98 below the largest: one scale for all
    assert mcf.exact.to_fraction(mcf.exact.from_exact("1e-30", FP16)) == Fraction(
        exact(mcf.exact.from_exact("1e-30", FP16)).item()
    )


def test_other_types_of_data_keep_the_scale():
    x = normal(40, exponent=-70)
    wide = x.float()
    assert is_scaled(wide)
    assert torch.equal(exact(wide), exact(x))
    assert torch.equal(exact(wide.half()), exact(x))
    assert type(x.double()) is torch.Tensor
    assert torch.equal(x.double(), exact(x))
    huge = at(torch.tensor([2.0**30, 1.0]), 0)
    assert huge.half().isfinite().all()  # moved, since it would not fit


def test_special_values():
    x = mcf.as_expansion(torch.tensor([torch.inf, -torch.inf, torch.nan, 3e-20, -0.0]), FP16)
    assert x[3].item() == pytest.approx(3e-20, rel=2**-11, abs=0)
    assert x.isfinite().tolist() == [False, False, False, True, True]
    assert torch.signbit(x.components[0][4])
    zeros = mcf.as_expansion(torch.zeros(3), FP16)
    assert exact(zeros).tolist() == [0, 0, 0]
    assert mcf.as_expansion(torch.empty(0), FP16).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_infinities_without_other_numbers(dtype):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=dtype)
    made = mcf.as_expansion(x, FP16)
    found = mcf.as_plain(made, torch.float64)
    torch.testing.assert_close(found, x.double(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(made.components[0]), torch.signbit(x))


def test_what_is_no_format_raises():
    with pytest.raises(TypeError, match="fp16x2"):
        mcf.scaling.scaled(torch.int8)
    with pytest.raises(TypeError, match="fp16x2"):
        mcf.scaling.scaled(mcf.fp32x2)
    with pytest.raises(TypeError, match="floating"):
        mcf.as_expansion(torch.arange(3), FP16)
    with pytest.raises(ValueError, match="components"):
        mcf.MCFTensor([torch.ones(2).half()], FP16)
    with pytest.raises(ValueError, match="components of shapes"):
        mcf.MCFTensor([torch.ones(2).half(), torch.zeros(1).int()], FP16)
    with pytest.raises(ValueError, match="components of shapes"):
        mcf.MCFTensor(
            [torch.ones(2).half(), torch.ones(3, dtype=torch.int8), torch.tensor(0).int()], TAILED
        )
    with pytest.raises(TypeError, match=r"torch\.float16 in a format of torch\.int8: the tail"):
        mcf.MCFTensor([*[torch.ones(2).half()] * 2, torch.tensor(0).int()], TAILED)
    with pytest.raises(TypeError, match=r"int32: the exponent"):
        mcf.MCFTensor([torch.ones(2).half(), torch.tensor(0)], FP16)


# ----------------------------------------------------------------------------------------- copies


@pytest.mark.thinned(of=2)
@formats
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "save", "clone"])
def test_copies(format, way, tmp_path):
    if way == "pickle" and format.dtype.itemsize == 1:
        pytest.skip("torch pickles no 8-bit floats, but for torch.save")
    x = mcf.as_expansion(torch.randn(3, 4) * 1e-9, format)
    if way == "save":
        torch.save(x, tmp_path / "x")
        y = torch.load(tmp_path / "x", weights_only=True)
    else:
        y = {
            "pickle": lambda: pickle.loads(pickle.dumps(x)),
            "deepcopy": lambda: copy.deepcopy(x),
            "clone": x.clone,
        }[way]()
    assert type(y) is mcf.MCFTensor
    assert y.format is x.format
    assert torch.equal(exact(y), exact(x))
    y.mul_(2.0**30)
    assert not torch.equal(exact(y), exact(x))


def test_parameters_stay_parameters(tmp_path):
    p = nn.Parameter(normal(3, exponent=-9))
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    for q in (copy.deepcopy(p), torch.load(buffer, weights_only=True)):
        assert isinstance(q, nn.Parameter)
        assert q.requires_grad
        assert torch.equal(exact(q), exact(p))


def test_printing():
    assert repr(at(torch.tensor([1.0, 1.5]).half(), -1)) == (
        "MCFTensor([0.5000, 0.7500], format=scaled(float16), exponent=-1)"
    )


def test_data():
    p = nn.Parameter(normal(3, exponent=-9))
    p.data = normal(3, exponent=50, seed=1)
    assert torch.equal(exact(p), exact(normal(3, exponent=50, seed=1)))
    with pytest.raises(TypeError, match="copy_"):
        p.data = torch.ones(3).half()
    with pytest.raises(ValueError, match="shape"):
        p.data = normal(4)
    with pytest.raises(TypeError, match="storage"):
        p.set_(torch.ones(3).half())


# ----------------------------------------------------------------------------- views and writes


@pytest.mark.parametrize(
    "format", [FP16, TAILED, mcf.scaling.scaled(mcf.fp16x2)], ids=lambda f: f.name
)
@FEW
@given(s=st.integers(-60, 60), t=st.integers(-60, 60))
def test_a_write_into_a_view_raises_the_exponent_of_all(format, s, t):
    x = mcf.as_expansion(exact(normal(4, 5)) / 3 * 2.0**s, format)
    before, view, row, least = exact(x), x.view(20), x[1], x.exponent.item()
    new = normal(5, exponent=t, seed=1)
    row.copy_(new)
    assert row.exponent is x.exponent
    assert x.exponent.item() >= least
    expected = before.clone()
    expected[1] = exact(new)
    least = 2.0 ** (x.exponent.item() + least_of(format) - 1)
    bound = least + 2.0 ** -bits_of(format) * expected.abs()
    assert ((exact(x) - expected).abs() <= bound).all()
    assert torch.equal(exact(view), exact(x).view(20))
    assert torch.equal(exact(row), exact(x)[1])


def test_a_write_into_all_moves_views_along():
    x = normal(4, 5)
    row = x[1]
    x.mul_(2.0**-50)
    assert torch.equal(exact(row), exact(x)[1])
    assert rms(x) >= 0.9


@FEW
@given(s=st.integers(-100, 100), factor=st.floats(1e-30, 1e30))
def test_writes_neither_overflow_nor_underflow(s, factor):
    x = normal(300, exponent=s)
    before = exact(x)
    for _ in range(4):
        x.mul_(factor)
        before = before * factor
    assert torch.isfinite(x.components[0]).all()
    assert rms(x) >= 0.9
    assert (
        (exact(x) - before).abs()
        <= 2.0**-8 * before.abs() + rms(x) * 2.0 ** (x.exponent.item() - 22)
    ).all()


def test_parameters_stay_near_one_where_other_tensors_need_not():
    p, x = nn.Parameter(normal(300)), normal(300)
    with torch.no_grad():
        for _ in range(20):
            p.mul_(1.4)
            x.mul_(1.4)
    assert rms(p) < 4
    assert rms(x) > 16
    assert x.exponent.item() == 0


def test_small_steps_leave_the_exponent_alone():
    p = nn.Parameter(at(normal(300).components[0] * 1.5, -4))
    with torch.no_grad():
        p.mul_(1 - 3e-5).add_(normal(300, exponent=-14))
    assert p.exponent.item() == -4


def test_random_fills_and_constants():
    x = normal(2000, exponent=-40)
    x.normal_(0, 1e-12)
    assert exact(x).std().item() == pytest.approx(1e-12, rel=0.1, abs=0)
    assert exact(x.fill_(1e-15)).unique().item() == pytest.approx(1e-15, rel=2**-11, abs=0)
    assert not exact(x.zero_()).any()
    made = x.new_full((3,), 1e-15)
    assert exact(made)[0].item() == pytest.approx(1e-15, rel=2**-11, abs=0)
    assert exact(torch.full_like(x, 1e-15))[0].item() == pytest.approx(1e-15, rel=2**-11, abs=0)
    assert exact(torch.ones_like(x)).unique().tolist() == [1]


# ---------------------------------------------------------------------------------------- modules


def test_a_module_and_back():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[2].weight
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    mcf.as_expansion(model, FP16, overrides={"1.*": None})
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert [is_scaled(p) for p in parameters] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert type(model[1].running_mean) is torch.Tensor
    mcf.as_plain(model, torch.float32)
    for p, x in zip(parameters, before, strict=True):
        assert type(p) is nn.Parameter
        assert torch.allclose(p, x, rtol=2**-10, atol=1e-7)


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    mcf.scaling.scalify(model)
    assert model["b"].weight is model["a"].weight


def test_mistakes_are_named():
    model = nn.Linear(3, 3)
    with pytest.raises(TypeError, match="scaled format"):
        mcf.scaling.scalify(model, torch.float16)
    with pytest.raises(RuntimeError, match=r"weight_ih_l0 .* Recurrent layers .*: None"):
        mcf.scaling.scalify(nn.LSTM(3, 3))
    with pytest.raises(ValueError, match="rounding"):
        mcf.scaling.scaled(torch.float32, rounding="stochastic")
    for base, tail in ((torch.bfloat16, 8), (torch.float16, 16), (mcf.fp16x2, 8)):
        with pytest.raises(ValueError, match="tail of 8 bits"):
            mcf.scaling.scaled(base, tail=tail)
    with pytest.raises(ValueError, match="products"):
        mcf.scaling.scalify(model, products="int8")
    with pytest.raises(ValueError, match="matches none"):
        mcf.scaling.scalify(model, overrides={"gain": None})


def test_state_dicts():
    model, other = mcf.scaling.scalify(nn.Linear(3, 3)), mcf.scaling.scalify(nn.Linear(3, 3))
    other.load_state_dict(model.state_dict())
    assert torch.equal(exact(other.weight), exact(model.weight))
    plain = nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.weight.detach().double(), exact(model.weight))
    other.load_state_dict(plain.state_dict())
    assert torch.equal(exact(other.weight), exact(model.weight))
