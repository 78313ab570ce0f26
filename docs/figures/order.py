"""Two processes that add the same three numbers, one after the other, in bf16."""

from __future__ import annotations

import torch
from drawing import FIRST, INK, NARROW, SECOND, SOFT, WIDE, Drawing, Drawings

ORDERS = ((256.0, 1.0, 1.0), (1.0, 1.0, 256.0))
HEIGHT = 150.0


def partial_sums(numbers: tuple[float, ...]) -> list[float]:
    """What bf16 has after each addition."""
    sums = [torch.tensor(numbers[0]).bfloat16()]
    for x in numbers[1:]:
        sums.append(sums[-1] + torch.tensor(x).bfloat16())
    return [x.item() for x in sums]


def draw() -> Drawings:
    """One row for each process."""
    return tuple(_drawn(width) for width in (WIDE, NARROW))  # type: ignore[return-value]


def _drawn(width: float) -> str:
    drawing = Drawing(width, HEIGHT)
    step = (width - 110) / 3
    for row, (numbers, colour) in enumerate(zip(ORDERS, (FIRST, SECOND), strict=True)):
        y = 45.0 + 68 * row
        drawing.text(0, y, f"process {row + 1}", INK)
        for i, (x, total) in enumerate(zip(numbers, partial_sums(numbers), strict=True)):
            left = 90 + step * i
            drawing.rectangle(left, y - 26, step - 22, 40, colour, 0.15)
            drawing.text(left + 8, y - 9, f"+ {x:g}", SOFT, 11.5, mono=True)
            drawing.text(left + 8, y + 8, f"{total:g}", INK, mono=True)
            if i:
                drawing.line([(left - 20, y - 6), (left - 3, y - 6)], SOFT)
    return drawing.svg()
