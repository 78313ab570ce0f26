"""Products of plain tensors with values of every format, and what transforms make of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from support.helpers import exact

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.bf16i16, mcf.bf16i8, mcf.fp16i16, mcf.fp32x2]
PRODUCTS = {
    "linear": lambda x, w, b: F.linear(x, w),
    "linear with a bias": F.linear,
    "matmul": lambda x, w, b: x @ w.t(),
    "einsum": lambda x, w, b: torch.einsum("...i,oi->...o", x, w),
    "functional_call": lambda x, w, b: torch.func.functional_call(
        nn.Linear(4, 5), {"weight": w, "bias": b}, (x,)
    ),
}


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.with_float64("the oracle is float64")
def test_plain_inputs_of_any_dtype_meet_values(format, product, dtype, needs_grad):
    w, b = (mcf.as_expansion(torch.rand(shape), format) for shape in ((5, 4), (5,)))
    x = torch.rand(3, 2, 4).to(dtype)
    right = PRODUCTS[product](x.double(), exact(w), exact(b))
    found = PRODUCTS[product](x, w.requires_grad_(needs_grad), b)
    assert (exact(found.detach()) - right).abs().max() <= 2.0**-14 * right.abs().max()
    if needs_grad:
        found.sum().backward()
        assert w.grad.shape == w.shape


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_jacobians_of_products(format):
    a, w = torch.rand(2, 4), torch.rand(4, 4)
    found = torch.func.jacrev(lambda a: a @ mcf.as_expansion(w, format))(a)
    assert found.shape == (2, 4, 2, 4)


@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16i16, mcf.bf16i8], ids=str)
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}], ids=str)
def test_steps_over_meta_tensors_compute_nothing(format, options):
    """2^40 elements would take hours."""
    p = nn.Parameter(mcf.as_expansion(torch.empty(2**20, 2**20, device="meta"), format))
    p.grad = torch.empty(2**20, 2**20, device="meta", dtype=p.dtype)
    optimizer = torch.optim.AdamW([p], **options)
    for _ in range(2):
        optimizer.step()
    assert optimizer.state[p]["exp_avg"].shape == p.shape
