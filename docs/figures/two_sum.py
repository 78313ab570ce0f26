"""two_sum, bit by bit."""

from __future__ import annotations

from fractions import Fraction

import torch
from drawing import FIRST, FOURTH, INK, SECOND, Drawings, Row, bits

import mcftensor as mcf


def draw() -> Drawings:
    """Two bf16 numbers, their rounded sum, and what the rounding lost."""
    a, b = torch.tensor([1.3125, 0.0101], dtype=torch.bfloat16)
    s, e = mcf.eft.two_sum(a, b)
    exact = [Fraction(x.item()) for x in (a, b, s, e)]
    return bits(
        [
            Row("a", exact[0], 8, INK),
            Row("b", exact[1], 8, INK),
            None,
            Row("a + b, exact", exact[0] + exact[1], 15, FOURTH),
            Row("s = RN(a + b)", exact[2], 8, FIRST),
            Row("e", exact[3], 8, SECOND),
        ],
        cell=24,
    )
