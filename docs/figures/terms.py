"""One number in expansions of one, two and three terms."""

from __future__ import annotations

from fractions import Fraction

import torch
from drawing import FIRST, FOURTH, SECOND, THIRD, Drawings, Row, bits

import mcftensor as mcf


def draw() -> Drawings:
    """0.999 in bf16, in bf16x2, in bf16x3, and in float64."""
    value = torch.tensor(0.999, dtype=torch.float64)
    terms = mcf.expansion.expand(value, mcf.bf16x3)
    exact = [Fraction(t.item()) for t in terms]
    rounded = Fraction(float(f"{0.999}")).limit_denominator(2**33)
    rounded = Fraction(round(Fraction(0.999) * 2**33), 2**33)
    return bits(
        [
            Row("0.999", rounded, 33, FOURTH, ""),
            None,
            Row("leading term", exact[0], 8, FIRST, "= 1: all that bf16 has"),
            Row("second term", exact[1], 8, SECOND, "bf16x2 ends here"),
            Row("third term", exact[2], 8, THIRD, "bf16x3"),
        ]
    )
