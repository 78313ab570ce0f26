"""Training of float16 weights with integer tails: range, exactness, scaled gradients, serving."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from support.helpers import assert_same_bits

KIND = (torch.Tensor, torch.float16)  # of gradients
PATHS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def test_what_lies_beyond_is_named_and_nothing_is_converted():
    model = net()
    with torch.no_grad():
        model[3].weight[1, 2] = 7e4
    before = copy.deepcopy(model.state_dict())
    message = (
        r"as_expansion: 3\.weight: fp16i8 has the range of float16, and 1 of 128 elements of a "
        r"tensor of shape \(4, 32\) are beyond it, which ends at 65519\.875; use mcf\.bf16i8"
    )
    with pytest.raises(ValueError, match=message):
        mcf.as_expansion(model, mcf.fp16i8)
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    assert_same_bits(model.state_dict(), before)
    mcf.as_expansion(model, mcf.fp16i8, overrides={"3.weight": mcf.bf16i8})
    assert [p.format.name for p in model.parameters()].count("fp16i8") == 5
    assert (model[3].weight.format, model[3].weight[1, 2].item()) == (mcf.bf16i8, 7e4)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["for-loop", "foreach"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam])
def test_the_bits_of_float32_in_the_range_of_float16(make, path, kind):
    """For weights from 2^-17 on, with float32 states."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.rand(s, generator=generator) * 50 + 0.5 for s in [(), (7,), (40, 50)]]
    ours = [nn.Parameter(mcf.as_expansion(x, mcf.fp16i16)) for x in start]
    theirs = [nn.Parameter(x.clone()) for x in start]
    for p in ours:
        p.grad_dtype = kind
    settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizers = [
        make(p, lr=1e-3, weight_decay=0.1, **settings, **PATHS[path]) for p in (ours, theirs)
    ]
    for _ in range(100):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(kind)
            q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for p, q, x in zip(ours, theirs, start, strict=True):
        assert torch.equal(mcf.as_plain(p, torch.float32), q)
        assert not torch.equal(q, x)
        for name, state in optimizers[1].state[q].items():
            assert torch.equal(mcf.as_plain(optimizers[0].state[p][name], torch.float32), state)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("format", [mcf.fp16i16, mcf.fp16i8], ids=str)
@pytest.mark.parametrize("mode", [None, "compact", {"exp_avg": mcf.bf16i16}], ids=str)
def test_the_weight_that_trains_is_the_weight_that_serves(format, mode):
    """A plain float16 model with the leading components has the same logits, to the bit."""
    model = mcf.as_expansion(net(), format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if mode is not None:
        mcf.collage(optimizer, mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    server = net(seed=1).half()
    losses = []
    for _ in range(30):
        x, y = batch(0)
        logits = model(x.half())
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        server.load_state_dict({name: p.components[0] for name, p in model.state_dict().items()})
        assert torch.equal(server(x.half()), logits)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        assert {(type(p.grad), p.grad.dtype) for p in model.parameters()} == {KIND}
    assert losses[-1] < losses[0] / 4
