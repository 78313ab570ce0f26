"""Trainings with weights on the host, and with expansions in one memory."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import mcftensor as mcf

FORMATS = {"default": None, **{f.name: f for f in (mcf.bf16i8, mcf.bf16i16, mcf.bf16x3)}}
OPTIMIZERS = {
    "for-loop": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "foreach plus": lambda ps: mcf.collage(torch.optim.AdamW(ps, lr=1e-2, foreach=True), "plus"),
    "fused compact": lambda ps: mcf.collage(torch.optim.AdamW(ps, lr=1e-2, fused=True), "compact"),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8), nn.Linear(8, 8)
    model = nn.Sequential(*layers).bfloat16()
    model[4].weight.requires_grad_(False)
    model[4].register_buffer("scale", torch.tensor(2.0))
    return model


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 32, generator=generator).bfloat16()
    model(x).float().square().mean().backward()


def own(x):
    """The shard of this process."""
    return getattr(x, "_local_tensor", x)


def leading(x):
    return getattr(own(x), "compute_tensor", own(x))


def assert_follows(model, host):
    """The device has the leading terms."""
    held = dict(host.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(own(p), leading(held[name])), name


def left(weights, optimizer):
    return dict(weights.named_parameters()), optimizer.state_dict()


def plainly(model, weights, optimizer, step):
    backward(model, step)
    optimizer.step()
    (model if step % 2 else optimizer).zero_grad()


def clipped(model, weights, optimizer, step):
    backward(model, step)
    clip_grad_norm_(weights.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model, weights, optimizer, step):
    backward(model, 2 * step)
    backward(model, 2 * step + 1)
    optimizer.step()
    optimizer.zero_grad()


WAYS = {
    "plain": (plainly, {}),
    "clipped": (clipped, {}),
    "accumulated": (accumulated, {}),
    "accumulated without rounding": (accumulated, {"accumulate": True}),
    "in backward": (plainly, {"released": 0}),
    "in backward, in buckets": (plainly, {"released": 1 << 22}),
}


def trained(on_host, format, make, way, steps=8, accumulate=False, released=None):
    model = network()
    weights = mcf.host.weights(model, format) if on_host else mcf.as_expansion(model, format)
    optimizer = make(weights.parameters())
    if accumulate:
        mcf.accumulate_gradients(weights)
    if released is not None:
        mcf.step_in_backward(weights, optimizer, bucket_bytes=released)
    for step in range(steps):
        way(model, weights, optimizer, step)
    return model, weights, optimizer
