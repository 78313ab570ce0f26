"""two_prod, bit by bit."""

from __future__ import annotations

from fractions import Fraction

import torch
from drawing import FIRST, FOURTH, INK, SECOND, Drawings, Row, bits

import mcftensor as mcf


def draw() -> Drawings:
    """Two bf16 numbers, the 16 bits of their product, and how two bf16 numbers hold them."""
    a, b = torch.tensor([1.4453125, 1.2421875], dtype=torch.bfloat16)
    p, e = mcf.eft.two_prod(a, b)
    exact = [Fraction(x.item()) for x in (a, b, p, e)]
    return bits(
        [
            Row("a", exact[0], 8, INK),
            Row("b", exact[1], 8, INK),
            None,
            Row("a · b, exact", exact[0] * exact[1], 16, FOURTH),
            Row("p = RN(a · b)", exact[2], 8, FIRST),
            Row("e", exact[3], 8, SECOND),
        ],
        cell=24,
    )
