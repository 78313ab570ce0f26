"""Attributes that users set on parameters stay in whatever exchanges their contents."""

import copy

import pytest
import torch
from torch import nn

import mcftensor as mcf

FORMATS = [None, mcf.bf16x3, mcf.bf16i16, mcf.bf16i8, mcf.fp32x2]


def marked():
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    model[0].weight._no_weight_decay = True
    model[0].bias._optim = {"lr": 0.0}
    model[1].running_mean.tag = "mean"
    return model


def assert_marked(model, *, buffers=True):
    assert model[0].weight._no_weight_decay
    assert model[0].bias._optim == {"lr": 0.0}
    assert not buffers or model[1].running_mean.tag == "mean"


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_conversions_in_both_directions(format):
    model = mcf.as_expansion(marked(), format)
    assert_marked(model)
    assert_marked(mcf.as_expansion(model, mcf.fp32x3))
    assert_marked(copy.deepcopy(model))
    assert_marked(mcf.as_plain(model))
    assert set(vars(model[0].weight)) == {"_no_weight_decay"}


@pytest.mark.parametrize("move", ["cpu", "share_memory", "to", "to_empty"])
def test_moves_of_a_module(move):
    model = mcf.as_expansion(marked(), mcf.bf16i16)
    call = getattr(model, move)
    call() if move in ("cpu", "share_memory") else call(device="cpu")
    assert_marked(model, buffers=False)  # PyTorch makes buffers anew, of plain modules too


def test_prepared_and_scaled():
    model = marked()
    mcf.prepare(model, torch.optim.AdamW(model.parameters()))
    assert_marked(model)
    model = mcf.scaling.scalify(marked())
    assert_marked(model)
    assert_marked(mcf.as_plain(model))


def test_a_group_that_a_mark_exempts_does_not_decay():
    model = nn.Module()
    model.rates = nn.Parameter(torch.ones(8))
    model.rates._no_weight_decay = True
    mcf.as_expansion(model)
    decay = 0.0 if getattr(model.rates, "_no_weight_decay", False) else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)
    for _ in range(100):
        model.rates.grad = torch.zeros_like(model.rates)
        optimizer.step()
    assert mcf.as_plain(model.rates, torch.float32).tolist() == [1.0] * 8
