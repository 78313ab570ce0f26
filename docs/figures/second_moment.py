"""Adam's second moment in bf16, and as an expansion, over the exact one."""

from __future__ import annotations

import torch
from drawing import FIRST, INK, THIRD, Axis, Drawings, Line, chart

import mcftensor as mcf

BETA, STEPS, COUNT = 0.999, 8000, 256


def draw() -> Drawings:
    """Medians over a few hundred elements, as shares of the float64 moment at the end."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.zeros(COUNT, dtype=torch.float64)
    plain = torch.zeros(COUNT, dtype=torch.bfloat16)
    whole = mcf.as_expansion(plain.clone(), mcf.bf16x2)
    rows: dict[str, list[tuple[float, float]]] = {"plain": [], "whole": [], "exact": []}
    with torch.no_grad():
        for step in range(1, STEPS + 1):
            size = 1.0 if step <= STEPS // 2 else 0.5
            g = (size * torch.randn(COUNT, generator=generator)).to(torch.bfloat16)
            exact.mul_(BETA).addcmul_(g.double(), g.double(), value=1 - BETA)
            plain.mul_(BETA).addcmul_(g, g, value=1 - BETA)
            whole.mul_(BETA).addcmul_(g, g, value=1 - BETA)
            if step % 100 == 0:
                rows["exact"].append((step, exact.mean().item()))
                rows["plain"].append((step, plain.double().mean().item()))
                rows["whole"].append((step, mcf.as_plain(whole, torch.float64).mean().item()))
    lines = [
        Line("plain bf16", rows["plain"], THIRD),
        Line("bf16x2", rows["whole"], FIRST),
        Line("float64", rows["exact"], INK, dash="1 5", shift=14, width=2.4),
    ]
    x = Axis(0, STEPS, {n: f"{n}" for n in range(0, STEPS + 1, 2000)})
    top = 0.5 * (1 + int(2 * max(v for _, v in rows["plain"])))
    y = Axis(0, top, {k / 2: f"{k / 2:g}" for k in range(int(2 * top) + 1)})
    return chart(x, y, lines, "steps", "mean of the second moment", 100)
