"""A weight that plain bf16 freezes, and the same weight as an expansion."""

from __future__ import annotations

import torch
from drawing import FIRST, INK, SECOND, THIRD, Axis, Drawings, Line, chart
from torch import Tensor, nn

import mcftensor as mcf

STEPS = 200


def course(start: Tensor, leading: bool = False) -> list[tuple[float, float]]:
    """The weight, or its leading term, after every step of AdamW on a constant gradient."""
    weight = nn.Parameter(start)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0, fused=True)
    points = []
    for step in range(STEPS + 1):
        points.append((step, float(weight.components[0] if leading else weight.detach())))
        weight.grad = torch.full((1,), 0.5, dtype=weight.dtype)
        optimizer.step()
    return points


def draw() -> Drawings:
    """Four lines: what should happen, what bf16 does, what an expansion and its first part do."""
    one = torch.ones(1, dtype=torch.bfloat16)
    x2 = mcf.as_expansion(one, mcf.bf16x2)
    lines = [
        Line("bf16: frozen at 1", course(one.clone()), THIRD),
        Line("leading term of bf16x2", course(x2.clone(), leading=True), SECOND, "", True, -14),
        Line("bf16x2, as a whole", course(x2.clone()), FIRST, shift=-1),
        Line("float64", course(one.double()), INK, dash="1 5", shift=13, width=2.4),
    ]
    x = Axis(0, STEPS, {n: str(n) for n in range(0, STEPS + 1, 50)})
    y = Axis(0.979, 1.0015, {v: f"{v:.3f}" for v in (0.98, 0.985, 0.99, 0.995, 1.0)})
    return chart(
        x, y, lines, "steps of AdamW at a learning rate of 1e-4", "the weight", 165, drawn=True
    )
