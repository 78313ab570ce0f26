"""Which share of weights an update does not move, by the size of the update."""

from __future__ import annotations

import torch
from drawing import FIRST, SECOND, THIRD, Axis, Drawings, Line, chart, superscript

import mcftensor as mcf

COUNT = 4000


def lost(terms: int, share: float) -> float:
    """Of weights between 1 and 2, in percent; updates go down."""
    generator = torch.Generator().manual_seed(0)
    exact = 1 + torch.rand(COUNT, generator=generator, dtype=torch.float64)
    if terms == 1:
        weights = exact.to(torch.bfloat16)
        return (
            100 * ((weights - (exact * share).to(torch.bfloat16)) == weights).double().mean().item()
        )
    x = mcf.as_expansion(exact, mcf.Format(torch.bfloat16, terms))
    y = x - mcf.as_expansion(exact * share, x.format)
    same = mcf.as_plain(y, torch.float64) == mcf.as_plain(x, torch.float64)
    return 100 * same.double().mean().item()


def draw() -> Drawings:
    """One curve for each number of terms."""
    exponents = [k / 4 for k in range(-28 * 4, -4 * 4 + 1)]
    names = {
        1: ("bf16", THIRD, 2.0**-8.2, 90),
        2: ("bf16x2", FIRST, 2.0**-16.2, 90),
        3: ("bf16x3", SECOND, 2.0**-25.5, 22),
    }
    lines = [
        Line(name, [(2.0**e, lost(terms, 2.0**e)) for e in exponents], colour, at=tuple(at))
        for terms, (name, colour, *at) in names.items()
    ]
    x = Axis(2.0**-28, 2.0**-4, {2.0**e: f"2{superscript(e)}" for e in range(-28, -3, 4)}, log=True)
    y = Axis(0, 100, {v: f"{v} %" for v in (0, 25, 50, 75, 100)})
    return chart(x, y, lines, "update, relative to the weight", "weights that stay", 20)
