"""Weights that remain when a parametrization is removed have all terms."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import mcftensor as mcf

KINDS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3, mcf.bf16i16, mcf.bf16i8], ids=str)
@pytest.mark.with_float64("the oracle is float64")
def test_the_weight_that_remains_keeps_the_format(kind, format):
    model = nn.Sequential(nn.Linear(8, 8))
    KINDS[kind](model[0]).eval()
    mcf.as_expansion(model, format)
    right = mcf.as_plain(copy.deepcopy(model), torch.float64)[0].weight.detach()
    parametrize.remove_parametrizations(model[0], "weight")
    weight = model[0].weight
    assert (weight.role, weight.requires_grad) == ("parameter", True)
    error = (mcf.as_plain(weight.detach(), torch.float64) - right).abs().max()
    assert error <= 2.0**-13 * right.abs().max()  # the leading term is off by 2^-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.rand(2, 8).to(weight.dtype)).sum().backward()
        optimizer.step()


def test_plain_modules_are_left_to_pytorch():
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    right = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(layer.weight, right)
