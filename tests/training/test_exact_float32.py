"""Over `bf16i16`, stock optimizers give the bits that they give over float32."""

import itertools

import pytest
import torch
from torch import nn

import mcftensor as mcf
from common.database import cases, configurations, paths_of
from support.optimizers import SAMPLE

SHAPES = [(), (7,), (3, 5), (2, 3, 4), (40, 50)]
STEPS = 100
CASES = [case for case in cases() if case[2] in ("for-loop", "foreach")]


def state_of(optimizer, parameters):
    """Every tensor of an optimizer, by what it is, as plain float32 where it is stored."""
    for i, p in enumerate(parameters):
        for name, x in optimizer.state[p].items():
            if isinstance(x, torch.Tensor):
                yield (i, name), mcf.as_plain(x, torch.float32) if x.is_floating_point() else x


def gradients(parameters):
    """Again and again gradients that are the same for parameters of either kind, and a loss."""
    generator = torch.Generator().manual_seed(1)
    for count in itertools.count():
        for p in parameters:
            gradient = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = gradient.to(p.dtype)
        yield torch.tensor(1e6 - 10.0 * count)


@pytest.mark.thinned(of=9)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id="-".join(case), marks=() if SAMPLE[case[0]] == case[1] else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_the_bits_of_float32(case):
    name, configuration, path = case
    subject = configurations(name)[configuration]
    shapes = [(7, 5), (40, 50)] if name == "Muon" else SHAPES
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ours = [nn.Parameter(mcf.as_expansion(x, mcf.bf16i16)) for x in start]
    theirs = [nn.Parameter(x.clone()) for x in start]
    keywords = subject.keywords | paths_of(name)[path]
    optimizers = [getattr(torch.optim, name)(p, **keywords) for p in (ours, theirs)]
    for optimizer, parameters in zip(optimizers, (ours, theirs), strict=True):
        calls = gradients(parameters)
        for _ in range(STEPS):
            if name == "LBFGS":
                optimizer.step(lambda calls=calls: next(calls))
            else:
                next(calls)
                optimizer.step()
    for p, q, x in zip(ours, theirs, start, strict=True):
        assert torch.equal(mcf.as_plain(p, torch.float32), q)
        assert not torch.equal(q, x)
    got, wanted = (dict(state_of(o, p)) for o, p in zip(optimizers, (ours, theirs), strict=True))
    assert got.keys() == wanted.keys()
    for key, x in wanted.items():
        assert torch.equal(got[key], x), key
