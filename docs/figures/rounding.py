"""A number between two of bf16, and the one that it rounds to."""

from __future__ import annotations

from drawing import FIRST, INK, NARROW, SECOND, SOFT, WIDE, Drawing, Drawings

ULP = 2.0**-11


def draw() -> Drawings:
    """The number 0.1 on a line with its neighbours."""
    return _line(WIDE), _line(NARROW)


def _line(width: float) -> str:
    drawing = Drawing(width, 128)
    low, high = 203.6 * ULP, 205.4 * ULP

    def place(value: float) -> float:
        return 14 + (value - low) / (high - low) * (width - 28)

    axis = 74.0
    below, above, middle = (place(k * ULP) for k in (204, 205, 204.5))
    drawing.rectangle(middle, axis - 17, place(high) - middle, 34, FIRST, 0.18)
    drawing.line([(14, axis), (width - 14, axis)], SOFT, 1.2)
    drawing.line([(middle, axis - 17), (middle, axis + 17)], SOFT, 1, "3 3")
    drawing.text(middle, axis + 32, "midpoint", SOFT, 12, "middle")
    for x, value, colour in ((below, 204 * ULP, INK), (above, 205 * ULP, FIRST)):
        drawing.line([(x, axis - 11), (x, axis + 11)], colour, 2)
        drawing.text(x, axis + 32, f"{value:.5f}", INK, 12, "middle")
    x = place(0.1)
    drawing.dot(x, axis, SECOND, 3.4)
    drawing.line([(x, axis - 10), (x, 34)], SECOND, 1.6)
    drawing.text(x, 26, "0.1", SECOND, 13, "middle")
    drawing.line([(x, 40), (above, 40), (above, axis - 13)], SECOND, 1.2, "4 3")
    drawing.text(above - 4, 32, "RN(0.1)", FIRST, 13, "start")
    return drawing.svg()
