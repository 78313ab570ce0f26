"""A step says when its parameters were made anew, or have no gradients."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mcftensor as mcf

DETACHED = mcf.errors.DetachedParameterWarning


def make(count=2):
    torch.manual_seed(0)
    return mcf.as_expansion(nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))))


def backward(model):
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()


def replaced(part, name):
    p = getattr(part, name)
    setattr(part, name, nn.Parameter(p.data.to(torch.bfloat16)))


@pytest.mark.parametrize("with_gradients", [False, True])
def test_parameters_that_were_made_anew(with_gradients):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if with_gradients:
        backward(model)
    replaced(model[1], "weight")
    replaced(model[1], "bias")
    with pytest.warns(DETACHED, match=r"SGD: 1\.weight, 1\.bias are no longer in the module"):
        optimizer.step()
    optimizer.step()  # once


def test_in_the_middle_of_a_training():
    """Every parameter is looked at within a few steps."""
    model = make(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(20):
        backward(model)
        if i == 7:
            replaced(model[17], "weight")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        if caught:
            break
    assert "17.weight is no longer" in str(caught[0].message)
    assert 7 <= i < 13


@pytest.mark.parametrize("fused", [False, True])
def test_no_gradients(fused):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with pytest.warns(DETACHED, match=r"none of its parameters has a gradient: 0\.weight, 0\.bias"):
        optimizer.step()
    optimizer.step()


def test_a_module_that_was_replaced():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model[0] = nn.Linear(4, 4, dtype=torch.bfloat16)
    backward(model)
    with pytest.warns(
        mcf.errors.DetachedParameterWarning, match=r"weight.* no longer in the module"
    ) as w:
        optimizer.step()
    assert [x.filename for x in w] == [__file__]


def test_what_is_as_it_should_be():
    """Some gradients, closures, steps in backward, plain models, copies, parts that moved, and
    modules that are gone say nothing."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1](torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()

    def closure():
        backward(model)
        return 0.0

    model = make()
    torch.optim.SGD(model.parameters(), lr=0.1).step(closure)
    plain = nn.Linear(2, 2)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    copied = copy.deepcopy(model)
    copied.zero_grad()
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    del model
    backward(copied)
    optimizer.step()

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = mcf.step_in_backward(model, optimizer)
    backward(model)
    optimizer.step()
    handle.remove()

    orphan = next(iter(make().parameters()))
    orphan.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    torch.optim.SGD([orphan], lr=0.1).step()

    model = make()
    p = model[0].weight
    optimizer = torch.optim.SGD([p], lr=0.1)
    model.moved = nn.Module()
    del model[0].weight
    model.moved.register_parameter("original", p)
    p.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.step()
