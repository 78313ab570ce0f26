"""Tensors in scaled formats are MCFTensors, and compute beside expansions."""

import copy
import io

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.scaling.scaled import _rebuilt
from support.scales import FORMATS, FP16, exact, is_scaled, normal

formats = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


@formats
def test_all_are_of_one_class(format):
    x = mcf.as_expansion(torch.randn(3, 4), format)
    p = nn.Parameter(x.clone())
    (p * x).sum().backward()
    made = [x, x * x, x.t(), x[0], x.clone(), x.sum(), torch.cat([x, x]), x.float(), p, p.grad]
    assert {type(y) for y in made} == {mcf.MCFTensor}
    assert isinstance(p, nn.Parameter)
    assert p.role == x.role == "value"  # a parameter computes with all it is
    assert x.exponent is x.components[-1]
    assert [y.dtype for y in x.components] == [c.dtype for c in format.components]
    assert x.nbytes == 12 * format.bytes + 4


def test_the_former_name_stands_for_the_formats():
    x = mcf.scaling.ScaledTensor([torch.ones(2).half()], torch.tensor(3, dtype=torch.int32))
    assert type(x) is mcf.MCFTensor
    assert x.format is FP16
    assert isinstance(x, mcf.scaling.ScaledTensor)
    assert not isinstance(mcf.as_expansion(x.double(), mcf.bf16x2), mcf.scaling.ScaledTensor)
    assert not isinstance(torch.ones(2), mcf.scaling.ScaledTensor)
    tailed = mcf.scaling.scaled(mcf.fp16x2)
    assert mcf.scaling.ScaledTensor([*[torch.ones(2).half()] * 2], x.exponent).format is tailed


def test_pytorch_sends_operators_to_the_rules_directly():
    assert not torch.overrides.has_torch_function((normal(3),))
    assert torch.overrides.has_torch_function((mcf.as_expansion(torch.ones(3), mcf.bf16x2),))


class Former:
    """A tensor as a pickle of the class that these tensors had."""

    def __init__(self, x, is_param):
        self.kept = x, is_param

    def __reduce__(self):
        x, is_param = self.kept
        *data, exponent = x.components
        return _rebuilt, (tuple(data), exponent, x.format.rounding, is_param, is_param), None


@pytest.mark.parametrize("is_param", [False, True])
@pytest.mark.parametrize(
    "format",
    [*FORMATS, mcf.scaling.scaled(torch.float16, rounding="stochastic")],
    ids=lambda f: f.name,
)
def test_files_of_the_former_class_load(format, is_param):
    x = mcf.as_expansion(torch.randn(3, 4) * 1e-9, format)
    buffer = io.BytesIO()
    torch.save({"x": Former(x, is_param)}, buffer)
    buffer.seek(0)
    y = torch.load(buffer, weights_only=True)["x"]
    assert type(y) is mcf.MCFTensor
    assert y.format is format
    assert isinstance(y, nn.Parameter) == y.requires_grad == is_param
    assert torch.equal(exact(y), exact(x))


def test_copies_of_a_view_write_through():
    x = normal(4, 5)
    row = copy.copy(x[1])
    row.mul_(2.0**9)  # raises the exponent of all
    assert torch.equal(exact(row), exact(x)[1])
    assert row.exponent is x.exponent


# ------------------------------------------------------------------------------ beside expansions

TO_NEAREST = [mcf.fp16x2, mcf.bf16x3, mcf.bf16i16]
EXPANSIONS = [*TO_NEAREST, mcf.bf16i8, mcf.mxfp8]


@pytest.mark.parametrize("format", EXPANSIONS, ids=lambda f: f.name)
def test_scales_win_where_they_meet_expansions(format):
    x = mcf.as_expansion(torch.randn(2, 32), FP16)
    e = mcf.as_expansion(torch.randn(2, 32), format)
    number = mcf.as_plain(e, torch.float64)
    for made, expected in (
        (x * e, exact(x) * number),
        (e * x, number * exact(x)),
        (torch.add(e, x), number + exact(x)),
        (torch.cat([e, x]), torch.cat([number, exact(x)])),
        (torch._foreach_mul([e, x], [x, x])[0], number * exact(x)),
    ):
        assert is_scaled(made)
        assert torch.allclose(exact(made), expected, rtol=2**-9, atol=2**-11)


@pytest.mark.parametrize("format", TO_NEAREST, ids=lambda f: f.name)
def test_copies_between_scaled_tensors_and_expansions_round_once(format):
    x = mcf.as_expansion(torch.randn(2, 32), mcf.scaling.scaled(mcf.fp16x2))
    e = mcf.as_expansion(torch.zeros(2, 32), format)
    e.copy_(x)
    assert e.format is format
    expected = mcf.as_plain(mcf.as_expansion(exact(x), format), torch.float64)
    assert torch.equal(mcf.as_plain(e, torch.float64), expected)
    x.copy_(e)
    assert torch.equal(exact(x), exact(mcf.as_expansion(expected, x.format)))


def test_a_format_in_the_place_of_a_dtype():
    x = torch.tensor([1e-9, 3e-9], dtype=torch.float64, requires_grad=True)
    y = x.to(FP16)
    assert torch.equal(exact(y), exact(mcf.as_expansion(x.detach(), FP16)))
    (y * y).sum().backward()
    assert type(x.grad) is torch.Tensor
    assert torch.allclose(x.grad, 2 * x.detach(), rtol=2**-9, atol=0)
    back = y.detach().to(mcf.bf16x3)
    assert torch.equal(mcf.as_plain(back, torch.float64), exact(y.detach()))
    assert torch.zeros(3, dtype=FP16).format is FP16
    assert mcf.as_expansion(torch.ones(3), "scaled(float16)").format is FP16


def test_numbers_are_rounded_once():
    x = mcf.as_expansion(torch.ones(3), mcf.scaling.scaled(mcf.fp16x2))
    x[0] = 1 / 3
    assert exact(x)[0].item() == pytest.approx(1 / 3, rel=2**-22, abs=0)
    made = x.new_tensor([1e-9, 3e-9])
    assert made.format is x.format
    assert exact(made)[0].item() == pytest.approx(1e-9, rel=2**-22, abs=0)


def test_where_scales_have_no_use():
    p = nn.Parameter(mcf.as_expansion(torch.ones(3), mcf.bf16x2))
    for call in (
        lambda: mcf.finfo(FP16),
        lambda: mcf.collage(torch.optim.AdamW([p]), {"exp_avg": FP16}),
        lambda: mcf.as_expansion(nn.Linear(3, 3), overrides={"bias": FP16}),
    ):
        with pytest.raises(TypeError, match=r"scaled\(float16\) has one scale for each tensor"):
            call()
    with pytest.raises(TypeError, match=r"cannot take the data of a scaled\(bfloat16\)"):
        p.data = normal(3, dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match="no exponent"):
        p.exponent  # noqa: B018


def test_what_all_tensors_have():
    x = normal(3, exponent=-9)
    assert x.share_memory_() is x
    assert x.is_shared()
    assert torch.equal(x.dequantize(), exact(x).float())
    assert f"{x[0]:.3f}" == f"{exact(x)[0].item():.3f}"
    assert "scaled(float16) (float16 + int32)" in x._repr_html_()
