"""A difference of two numbers of like size, which needs no rounding."""

from __future__ import annotations

from fractions import Fraction

import torch
from drawing import FIRST, FOURTH, INK, Drawings, Row, bits


def draw() -> Drawings:
    """Two bf16 numbers, the second larger than half of the first, and their difference."""
    a, b = torch.tensor([131 / 128, 219 / 256], dtype=torch.bfloat16)
    x, y, difference = (Fraction(t.item()) for t in (a, b, a - b))
    assert x - y == difference
    return bits(
        [
            Row("a", x, 8, INK),
            Row("b", y, 8, FIRST),
            None,
            Row("a − b, exact", difference, 6, FOURTH),
        ],
        cell=24,
    )
