"""Gradients of values carry the precision of the format, as the values do."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

import mcftensor as mcf
from support.helpers import exact, sample

FUNCTIONS = {
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "amax": lambda x: x.amax(0),
    "cat": lambda x: torch.cat([x, x * 2]),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "convolution": lambda x: F.conv1d(x[None], x[:, None, :2].expand(3, 3, 2)),
    "cumsum": lambda x: x.cumsum(0),
    "determinant": lambda x: torch.linalg.det(x[:, :3] + 3 * torch.eye(3)),
    "division": lambda x: x / (x * x + 2),
    "expand": lambda x: x.unsqueeze(0).expand(2, 3, 4),
    "exponential": torch.exp,
    "gelu": F.gelu,
    "index": lambda x: x[[0, 2, 2]],
    "inverse": lambda x: torch.linalg.inv(x[:, :3] + 3 * torch.eye(3)),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "logsumexp": lambda x: x.logsumexp(1),
    "matmul": lambda x: x @ x.T,
    "max": lambda x: x.max(0).values,
    "mean": torch.mean,
    "pad": lambda x: F.pad(x, (1, 1)),
    "prod": lambda x: x.prod(1),
    "quantile": lambda x: x.quantile(0.3, dim=0),
    "rms norm": lambda x: F.rms_norm(x, (4,)),
    "root": lambda x: (x * x + 1).sqrt(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(0).values,
    "sum of products": lambda x: x * x + 1 / (x * x + 1),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "variance": lambda x: x.var(0),
    "where": lambda x: torch.where(x > 0, x, x * 2),
}


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward(name, format):
    x = sample(format, 3, 4).requires_grad_()
    wide = exact(x).requires_grad_()
    result, expected = FUNCTIONS[name](x), FUNCTIONS[name](wide)
    torch.manual_seed(5)  # not that of the sample
    seed = mcf.as_expansion(torch.randn(expected.shape, dtype=torch.float64), format)
    result.backward(seed)
    expected.backward(exact(seed))
    assert isinstance(x.grad, mcf.MCFTensor)
    error = (exact(x.grad) - wide.grad).abs().max() / wide.grad.abs().max()
    assert error <= 64 * 2.0**-format.precision


CONVERSIONS = {
    "double": lambda x: x.double(),
    "to a dtype": lambda x: x.to("cpu", torch.float64),
    "to a tensor": lambda x: x.to(torch.ones(1, dtype=torch.float64)),
    "to a value": lambda x: x.to(mcf.as_expansion(torch.ones(1), mcf.fp64x2)).double(),
    "type": lambda x: x.type(torch.float64),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float64)),
    "softmax": lambda x: F.softmax(x, 0, dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(0, dtype=torch.float64),
    "float_power": lambda x: torch.float_power(x.abs(), 2.5),
    "copy_": lambda x: torch.zeros(4, dtype=torch.float64).copy_(x),
    "+=": lambda x: torch.zeros(4, dtype=torch.float64).__iadd__(x),
    "[]=": lambda x: torch.zeros(4, dtype=torch.float64).index_put_((torch.arange(4),), x),
}


@pytest.mark.wing("wide")
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.fp32x2], ids=lambda f: f.name)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_gradients_come_back_from_plain_tensors_with_all_terms(name, format):
    x = sample(format, 4).requires_grad_()
    wide = exact(x).requires_grad_()
    seed = torch.tensor([1.0, 3.0, 7.0, -5.0], dtype=torch.float64) / 3
    (CONVERSIONS[name](x) * seed).sum().backward()
    (CONVERSIONS[name](wide) * seed).sum().backward()
    assert x.grad.format is format
    torch.testing.assert_close(exact(x.grad), wide.grad, rtol=8 * 2.0**-format.precision, atol=0)


def test_gradients_of_conversions_have_gradients():
    x = sample(mcf.fp32x2, 4).requires_grad_()
    for function in (torch.Tensor.double, lambda x: x.quantile(0.3)):
        (grad,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        assert grad.requires_grad


@pytest.mark.wing("wide")
@pytest.mark.thinned(of=4)
@pytest.mark.filterwarnings("ignore:Input #0 requires gradient and is not a double")
@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.fp64x2], ids=lambda f: f.name)
@pytest.mark.parametrize(
    "function",
    [
        FUNCTIONS["sum of products"],
        FUNCTIONS["matmul"],
        FUNCTIONS["root"],
        FUNCTIONS["index"],
        FUNCTIONS["cat"],
        FUNCTIONS["mean"],
        lambda x: torch.linalg.vector_norm(x, dim=0),
    ],
)
def test_gradcheck(function, format):
    assert gradcheck(function, (sample(format, 3, 4).requires_grad_(),))


def test_data_is_outside_of_autograd():
    x = sample(mcf.bf16x2, 3).requires_grad_()
    y = (x * x).sum()
    version = x._version
    x.data.mul_(2)
    assert x._version == version
    y.backward()
    assert x.data.components[0].data_ptr() == x.components[0].data_ptr()


def test_operators_of_plain_tensors_are_no_writes():
    """Their names end as those of methods that write."""
    x = mcf.as_expansion(torch.tensor([2.5, 3.5]), mcf.fp32x2).requires_grad_()
    plain = torch.tensor([7.0, 9.0], dtype=torch.float64)
    for found in (plain // x, plain.__rsub__(x), plain.__rpow__(x)):
        assert found.format is mcf.fp32x2
