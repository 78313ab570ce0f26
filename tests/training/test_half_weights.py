"""Training of float16 weights with integer tails: range, exactness, scaled gradients, serving."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn import functional as F

import mcftensor as mcf
from support.helpers import assert_same_bits
from support.releases import GRAD_DTYPE

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
@pytest.mark.parametrize(
    "kind", [torch.float16, pytest.param(torch.bfloat16, marks=GRAD_DTYPE)], ids=str
)
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


def small_gradients(weights, scale=1e-5, steps=1, optimizer=None):
    for _ in range(steps):
        for p in weights:
            p.grad = torch.full(p.shape, scale, dtype=p.dtype)
        optimizer.step()


@pytest.mark.parametrize("mode", [None, "full", "plus", "compact"])
@pytest.mark.parametrize("format", [mcf.fp16i16, mcf.fp16i8], ids=str)
def test_states_of_a_float32_run(format, mode):
    """Second moments of 3e-11 are far below the range of float16, and stay."""
    plain = nn.Linear(40, 40, bias=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    small_gradients([plain.weight], steps=50, optimizer=optimizer)
    model = mcf.as_expansion(copy.deepcopy(plain), format)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if mode is not None:
        mcf.collage(ours, mode)
    ours.load_state_dict(optimizer.state_dict())
    loaded = ours.state[model.weight]["exp_avg_sq"]
    right = optimizer.state[plain.weight]["exp_avg_sq"]
    assert (mcf.as_plain(loaded, torch.float32) / right - 1).abs().max() < 0.07
    before = mcf.as_plain(model.weight.detach(), torch.float64)
    small_gradients([model.weight], scale=1e-5, optimizer=ours)
    moved = (mcf.as_plain(model.weight.detach(), torch.float64) - before).abs()
    assert 0.9e-3 < moved.max() < 1.1e-3


@pytest.mark.parametrize("mode", [None, "full", "compact"])
@pytest.mark.parametrize("format", [mcf.fp16i16, mcf.fp16i8], ids=str)
def test_a_run_resumed_by_distributed_checkpoints(format, mode):
    """`get_state_dict` and `set_state_dict`, into an optimizer that has states and a fresh one."""

    def made():
        model = mcf.as_expansion(nn.Linear(40, 40), format)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer if mode is None else mcf.collage(optimizer, mode)

    model, optimizer = made()
    small_gradients([*model.parameters()], steps=3, optimizer=optimizer)
    saved = copy.deepcopy(dcp.get_state_dict(model, optimizer))
    for has_states in (False, True):
        other, resumed = made()
        if has_states:
            small_gradients([*other.parameters()], optimizer=resumed)
        dcp.set_state_dict(
            other, resumed, model_state_dict=saved[0], optim_state_dict=copy.deepcopy(saved[1])
        )
        assert_same_bits(other.state_dict(), saved[0])
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_same_bits(dict(resumed.state[q]), dict(optimizer.state[p]))


def test_second_moments_that_two_float16_terms_do_not_hold():
    p = nn.Parameter(mcf.as_expansion(torch.ones(64), mcf.fp16x2))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    match = (
        r"AdamW: second moments in fp16x2 are zero where gradients are not, .*exp_avg_sq of 0\.0\. "
        r"Keep them in .*'compact'.* or weights in mcf\.fp16i16"
    )
    with pytest.warns(mcf.errors.ZeroMomentWarning, match=match) as caught:
        small_gradients([p], steps=3, optimizer=optimizer)
    assert len(caught) == 1
    large = nn.Parameter(mcf.as_expansion(torch.ones(64), mcf.fp16x2))
    small_gradients([large], scale=1.0, optimizer=torch.optim.AdamW([large], lr=1e-3))
    compact = nn.Parameter(mcf.as_expansion(torch.ones(8, 64), mcf.fp16x2))
    optimizer = mcf.collage(torch.optim.AdamW([compact], lr=1e-3, weight_decay=0), "compact")
    small_gradients([compact], optimizer=optimizer)
    assert 0.9e-3 < (mcf.as_plain(compact.detach(), torch.float64) - 1).abs().max() < 1.1e-3
