"""Products of 8-bit data: as exact as the data is, in both directions, and counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.scaling import Fp8Linear, counting, fp8, fp8_linear, fp8_product
from support.scales import FP16, assert_near, exact, half, normal

E4M3, E5M2 = mcf.scaling.scaled(torch.float8_e4m3fn), mcf.scaling.scaled(torch.float8_e5m2)
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]
EXPONENTS = st.integers(-100, 100)


def to_eight_bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest numbers of so many significant bits, without torch's 8-bit floats."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)


@pytest.mark.parametrize("emulated", [False, True], ids=["native", "emulated"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0].name} {p[1].name}")
@settings(max_examples=8)
@given(s=EXPONENTS, t=EXPONENTS, m=st.integers(1, 20), k=st.integers(1, 40), n=st.integers(1, 20))
def test_products_are_exact_but_for_one_rounding(pair, emulated, s, t, m, k, n):
    x = mcf.as_expansion(exact(normal(m, k, exponent=s)), pair[0])
    y = mcf.as_expansion(exact(normal(k, n, exponent=t, seed=1)), pair[1])
    with pytest.MonkeyPatch.context() as patch, counting() as counts:
        if emulated:
            patch.setattr(fp8, "_is_native", lambda x, y: False)
        made = fp8_product(x, y)
    assert counts == {("fp8", "emulated" if emulated else "native"): 1}
    assert made.format is FP16
    assert made.exponent.item() == x.exponent.item() + y.exponent.item() + half(k)
    slack = 2.0**-20 * (exact(x).abs() @ exact(y).abs())
    assert_near(made, exact(x) @ exact(y), slack)


@settings(max_examples=8)
@given(s=EXPONENTS, t=EXPONENTS, u=EXPONENTS)
def test_the_error_is_that_of_the_data_types(s, t, u):
    x, w = normal(30, 64, exponent=s), normal(48, 64, exponent=t, seed=1)
    gradient = normal(30, 48, exponent=u, seed=2)
    x.requires_grad_()
    w.requires_grad_()
    made = fp8_linear(x, w)
    made.backward(gradient)
    rounded_x, rounded_w = to_eight_bits(exact(x), 4), to_eight_bits(exact(w), 4)
    rounded_g = to_eight_bits(exact(gradient), 3)
    for found, true, of_types in (
        (made, exact(x) @ exact(w).t(), rounded_x @ rounded_w.t()),
        (x.grad, exact(gradient) @ exact(w), rounded_g @ rounded_w),
        (w.grad, exact(gradient).t() @ exact(x), rounded_g.t() @ rounded_x),
    ):
        error = (exact(found) - true).norm() / true.norm()
        alone = (of_types - true).norm() / true.norm()
        assert 0.99 * alone < error < 1.01 * alone
        assert 0.02 < alone < 0.08


def test_a_linear_layer_with_bias_and_batches():
    layer = mcf.scaling.scalify(nn.Linear(16, 8), products="fp8")
    assert type(layer) is Fp8Linear
    x = torch.randn(2, 3, 16)
    with counting() as counts:
        made = layer(x)
        made.square().mean().backward()
    assert counts["fp8", "native"] == 2  # x takes no gradient
    expected = F.linear(x.double(), exact(layer.weight), exact(layer.bias))
    assert (exact(made) - expected).norm() / expected.norm() < 0.06
    assert layer.bias.grad.shape == (8,)
    assert layer.weight.grad.dtype == torch.float16


def test_what_is_saved_for_backward_has_eight_bits():
    x, w = normal(4, 8).requires_grad_(), normal(6, 8, seed=1).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fp8_linear(x, w)
    assert [x.dtype for x in saved] == [torch.float8_e4m3fn] * 2


def test_eight_bits_saturate():
    x = mcf.as_expansion(torch.tensor([1.0]), E4M3)
    for format, most in ((E4M3, 448.0), (E5M2, 57344.0)):
        assert format.store(torch.tensor([1e9, -torch.inf]))[0].tolist() == [most, -most]
    assert (x * torch.tensor(1e30)).item() == pytest.approx(1e30, rel=2.0**-4)


def test_wrong_operands():
    x = mcf.as_expansion(torch.ones(2, 3), E4M3)
    with pytest.raises(TypeError, match="as_expansion"):
        fp8_product(x, normal(3, 2))
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        fp8_product(x, x)
