"""Averages of weights in a wider plain dtype: writes without gradients use all terms."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mcftensor as mcf

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.bf16i16, mcf.bf16i8, mcf.fp16i16, mcf.fp16x2, mcf.fp32x2]


def weight(format):
    """A weight whose terms after the leading one are not zero, and its exact numbers."""
    numbers = 1 + torch.rand(4, 6, dtype=torch.float64) / 3
    w = nn.Parameter(mcf.as_expansion(numbers, format))
    exact = mcf.as_plain(w.detach(), torch.float64)
    assert (exact != w.detach().components[0].double()).any()
    return w, exact


WRITES = {
    "add_": lambda e, w: e.add_(w, alpha=0.01),
    "sub_": lambda e, w: e.sub_(w, alpha=0.5),
    "+=": lambda e, w: e.__iadd__(w),
    "mul_": lambda e, w: e.mul_(w),
    "div_": lambda e, w: e.div_(w),
    "addcmul_": lambda e, w: e.addcmul_(w, w, value=0.1),
    "addcdiv_": lambda e, w: e.addcdiv_(e, w, value=0.1),
    "lerp_": lambda e, w: e.lerp_(w, 0.01),
    "lerp_ by a tensor": lambda e, w: e.lerp_(w, torch.full_like(e, 0.25)),
    "addmm_": lambda e, w: e[:4, :4].addmm_(w, w.t(), beta=0.5),
    "index_add_": lambda e, w: e.index_add_(0, torch.tensor([2, 1, 0, 2]), w),
    "atan2_": lambda e, w: e.atan2_(w),
    "_foreach_add_": lambda e, w: torch._foreach_add_([e], [w], alpha=0.01),
    "_foreach_mul_": lambda e, w: torch._foreach_mul_([e, e], [w, w]),
    "_foreach_lerp_": lambda e, w: torch._foreach_lerp_([e], [w], 0.01),
    "_foreach_addcmul_": lambda e, w: torch._foreach_addcmul_([e], [w], [w], value=0.1),
    "_foreach_copy_": lambda e, w: torch._foreach_copy_([e], [w]),
    "add(out=)": lambda e, w: torch.add(e, w, alpha=0.01, out=e),
    "lerp(out=)": lambda e, w: torch.lerp(e, w, 0.01, out=e),
}  # fmt: skip


@pytest.mark.thinned(of=5)
@pytest.mark.parametrize("way", ["no_grad", "inference_mode", "detach", "data", "no gradients"])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.with_float64("the oracle is float64")
def test_a_write_uses_all_terms(format, name, way):
    w, exact = weight(format)
    dtype = torch.float64 if format is mcf.fp32x2 else torch.float32
    average = torch.rand(4, 6, dtype=dtype)
    right = average.double()
    WRITES[name](right, exact)
    write = WRITES[name]
    if way == "no_grad":
        write = torch.no_grad()(write)
    elif way == "inference_mode":
        write = torch.inference_mode()(write)
    elif way == "no gradients":
        w.requires_grad_(False)
    else:
        w = getattr(w, way)
        w = w() if callable(w) else w
    write(average, w)
    limit = 4 * torch.finfo(dtype).eps if dtype is torch.float32 else 2.0**-44
    assert (average.double() - right).abs().max() <= limit * right.abs().max()


def test_what_carries_gradients_is_a_forward_pass():
    w, _ = weight(mcf.bf16x3)
    x = torch.rand(4, 6)
    hidden = x.clone().add_(w)
    assert torch.equal(hidden.detach(), x + w.detach().components[0])
    hidden.sum().backward()
    assert w.grad is not None
    # No wider dtype: a plain tensor of 16 bits has no room for more.
    narrow = torch.zeros(4, 6, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(narrow.add_(w), w.components[0])


def test_a_float32_average_of_a_slow_weight_follows_it():
    """The average that everybody advises to keep in float32, of a weight that moves by lr 1e-5."""
    w = nn.Parameter(mcf.as_expansion(torch.ones(8), mcf.bf16x3))
    optimizer = torch.optim.Adam([w], lr=1e-5)
    average, exact = torch.ones(8), torch.ones(8, dtype=torch.float64)
    for _ in range(150):
        w.grad = torch.ones_like(w)
        optimizer.step()
        with torch.no_grad():
            average.mul_(0.98).add_(w, alpha=0.02)
            exact.mul_(0.98).add_(mcf.as_plain(w, torch.float64), alpha=0.02)
    assert exact[0] < 0.9991
    assert (average.double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("of", [None, "ema"])
@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.bf16i16], ids=str)
def test_a_model_averaged_since_before_the_conversion(format, of):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    averages = {} if of is None else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    average = AveragedModel(model, **averages)
    whole = AveragedModel(copy.deepcopy(model).double(), **averages)
    mcf.as_expansion(model, format)
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 2.0**-14 * (step + 1))
        average.update_parameters(model)
        whole.update_parameters(mcf.as_plain(copy.deepcopy(model), torch.float64))
    for p, q in zip(average.parameters(), whole.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert (p.double() - q).abs().max() <= 2.0**-21 * q.abs().max()
