"""Probes of what an optimizer step loses, each against the same optimizer in float64.

A probe takes a strategy: how the weights are held, and which mode and path the optimizer has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import mcftensor as mcf

PATHS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Strategy:
    """A weight held in a format or plain dtype, and AdamW over it in one of torch's paths."""

    held: mcf.Format | torch.dtype
    path: str = "fused"
    mode: str = "full"

    @property
    def name(self) -> str:
        """Such as `bf16x2 plus, fused`."""
        if isinstance(self.held, mcf.Format):
            return f"{self.held.name} {self.mode}, {self.path}"
        return f"torch {str(self.held).removeprefix('torch.')}, {self.path}"


EXACT = Strategy(torch.float64, "for-loop")


def adamw(start: Tensor, gradients: Iterator[Tensor], strategy: Strategy, **settings: float):
    """Run AdamW, and return the optimizer after its last step."""
    if isinstance(strategy.held, mcf.Format):
        weight = nn.Parameter(mcf.as_expansion(start, strategy.held))
    else:
        weight = nn.Parameter(start.to(strategy.held, copy=True))
    keywords = {"lr": settings["lr"], "weight_decay": settings["weight_decay"]}
    betas = (0.9, settings.get("beta2", 0.999))
    optimizer = torch.optim.AdamW([weight], betas=betas, **keywords, **PATHS[strategy.path])
    if isinstance(strategy.held, mcf.Format):
        mcf.collage(optimizer, strategy.mode)
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return optimizer


def weight_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """The one weight of an optimizer, whole, in float64."""
    return mcf.as_plain(optimizer.param_groups[0]["params"][0], torch.float64)


def held_start(start: Tensor, strategy: Strategy) -> Tensor:
    """The starting weights as the strategy can hold them."""
    if isinstance(strategy.held, mcf.Format):
        return mcf.as_plain(mcf.as_expansion(start, strategy.held), torch.float64)
    return start.to(strategy.held).double()


def frozen_weight(strategy: Strategy) -> float:
    """Displacement of a weight of 1 after 100 steps of constant gradient, over the exact one."""
    start = torch.ones(16)
    settings = {"lr": 1e-4, "weight_decay": 0.0}

    def moved(strategy: Strategy) -> Tensor:
        gradient = torch.full((16,), 0.01, dtype=torch.bfloat16)
        return weight_of(adamw(start, iter([gradient] * 100), strategy, **settings)) - 1

    return (moved(strategy) / moved(EXACT)).mean().item()


def decay(strategy: Strategy, kind: str, count: int = 4096) -> tuple[float, float]:
    """1000 steps of pure decay, exact ratio 0.99005: ratio of sums of magnitudes, and displacement
    over the exact one."""
    start = starting_weights(kind, count)
    zeros = torch.zeros(count, dtype=torch.bfloat16)
    settings = {"lr": 1e-3, "weight_decay": 1e-2}
    end = weight_of(adamw(start, iter([zeros] * 1000), strategy, **settings))
    begin = held_start(start, strategy)
    exact = begin * ((1 - 1e-5) ** 1000 - 1)
    moved = ((end - begin) * exact).sum() / (exact * exact).sum()
    return (end.abs().sum() / begin.abs().sum()).item(), moved.item()


def starting_weights(kind: str, count: int) -> Tensor:
    """`small`: normal with deviation 0.02; `ones`: 1."""
    if kind == "ones":
        return torch.ones(count)
    small = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.02
    return small.bfloat16().float()


def gradient_stream(count: int, steps: int, drift: float = 0.3) -> Iterator[Tensor]:
    """Gradients in bf16: a fixed part that differs from weight to weight, and noise."""
    generator = torch.Generator().manual_seed(1)
    mean = drift * torch.randn(count, generator=generator)
    for _ in range(steps):
        yield ((torch.randn(count, generator=generator) + mean) * 1e-2).bfloat16()


def displacement(
    strategies: list[Strategy], kind: str, lr: float, beta2: float, count: int, steps: int = 1000
) -> dict[str, float]:
    """Relative error of the displacement (root mean square), by name of strategy."""
    settings = kind, lr, beta2, count, steps
    exact = _moved(EXACT, *settings)
    errors = {s.name: _moved(s, *settings) - exact for s in strategies}
    return {name: (error.norm() / exact.norm()).item() for name, error in errors.items()}


@functools.cache
def _moved(
    strategy: Strategy, kind: str, lr: float, beta2: float, count: int, steps: int
) -> Tensor:
    start, stream = starting_weights(kind, count), gradient_stream(count, steps)
    optimizer = adamw(start, stream, strategy, lr=lr, beta2=beta2, weight_decay=0.1)
    return weight_of(optimizer) - start.double()


def second_moment(strategy: Strategy, beta2: float, count: int = 1024, steps: int = 5000) -> float:
    """Median of the second moment over the exact one after stationary random gradients."""
    settings = beta2, count, steps
    return (_moment(strategy, *settings) / _moment(EXACT, *settings)).median().item()


@functools.cache
def _moment(strategy: Strategy, beta2: float, count: int, steps: int) -> Tensor:
    stream = gradient_stream(count, steps, drift=0.0)
    optimizer = adamw(torch.ones(count), stream, strategy, lr=1e-6, beta2=beta2, weight_decay=0.0)
    (state,) = optimizer.state.values()
    return mcf.as_plain(state["exp_avg_sq"], torch.float64)


def random_updates(size: float, steps: int = 50, count: int = 2**20) -> mcf.EDQ:
    """A meter of updates from N(0, size) on weights from N(0, 0.02), a "plain" one in bf16 and a
    "pair" in bf16x2; it has measured the first step and the last."""
    generator = torch.Generator().manual_seed(0)
    weights = (0.02 * torch.randn(count, generator=generator)).bfloat16()
    plain = nn.Parameter(weights.clone())
    pair = nn.Parameter(mcf.as_expansion(weights, mcf.bf16x2))
    optimizer = torch.optim.SGD([plain, pair], lr=1.0, foreach=True)
    edq = mcf.EDQ(optimizer, every=steps - 1, names=[("plain", plain), ("pair", pair)])
    for _ in range(steps):
        plain.grad = (size * torch.randn(count, generator=generator)).bfloat16()
        pair.grad = plain.grad.clone()
        optimizer.step()
    return edq
