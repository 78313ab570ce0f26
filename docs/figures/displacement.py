"""How far from float64 the weights are, step by step, in plain bf16 and in three modes."""

from __future__ import annotations

import torch
from drawing import FIRST, FOURTH, INK, SECOND, THIRD, Axis, Drawings, Line, chart, superscript
from torch import Tensor, nn

import mcftensor as mcf

STEPS, COUNT = 1000, 1000


def run(weight: nn.Parameter, mode: str | None) -> list[Tensor]:
    """What AdamW's weights moved by after 1, 2, 4, 8, ... steps."""
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.1, fused=True)
    if mode:
        mcf.collage(optimizer, mode)
    generator = torch.Generator().manual_seed(0)
    slope = 0.1 * torch.randn(COUNT, generator=generator)
    first = mcf.as_plain(weight.detach(), torch.float64).clone()
    moved = []
    for step in range(1, STEPS + 1):
        gradient = (slope + torch.randn(COUNT, generator=generator)).to(torch.bfloat16)
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
        if step in points():
            moved.append(mcf.as_plain(weight.detach(), torch.float64) - first)
    return moved


def points() -> list[int]:
    """Evenly on a logarithmic scale."""
    return sorted({round(10 ** (k / 10)) for k in range(31)})


def draw() -> Drawings:
    """One curve a strategy."""
    generator = torch.Generator().manual_seed(1)
    start = (0.02 * torch.randn(COUNT, generator=generator)).to(torch.bfloat16)
    exact = run(nn.Parameter(start.double()), None)
    x2, x3 = (mcf.as_expansion(start, f) for f in (mcf.bf16x2, mcf.bf16x3))
    strategies = {
        "plain bf16": (nn.Parameter(start.clone()), None, THIRD, ""),
        "light": (nn.Parameter(x2.clone()), "light", SECOND, ""),
        "plus": (nn.Parameter(x2.clone()), "plus", FIRST, ""),
        "full": (nn.Parameter(x2.clone()), "full", FOURTH, ""),
        "float32": (nn.Parameter(start.float()), None, INK, "1 5"),
        "full, bf16x3": (nn.Parameter(x3.clone()), "full", FOURTH, "5 4"),
    }
    lines = []
    for name, (weight, mode, colour, dash) in strategies.items():
        errors = [
            (step, max(((a - b).norm() / b.norm()).item(), 1e-9))
            for step, a, b in zip(points(), run(weight, mode), exact, strict=True)
        ]
        lines.append(Line(name, errors, colour, dash))
    x = Axis(1, STEPS, {1.0: "1", 10.0: "10", 100.0: "100", 1000.0: "1000"}, log=True)
    y = Axis(1e-8, 2, {10.0**e: f"10{superscript(e)}" for e in range(-8, 1, 2)}, log=True)
    return chart(x, y, lines, "steps", "relative error", 110)
