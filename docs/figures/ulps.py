"""The numbers of bf16 around 1, and what rounds to 1."""

from __future__ import annotations

from drawing import FIRST, INK, NARROW, SECOND, SOFT, WIDE, Drawing, Drawings


def draw() -> Drawings:
    """A number line."""
    return _line(WIDE, 0.9840, 1.0260), _line(NARROW, 0.9870, 1.0190)


def _line(width: float, low: float, high: float) -> str:
    narrow = width < WIDE
    drawing = Drawing(width, 128)

    def place(value: float) -> float:
        return 14 + (value - low) / (high - low) * (width - 28)

    axis = 74.0
    left, right = place(1 - 2**-9), place(1 + 2**-8)
    drawing.rectangle(left, axis - 17, right - left, 34, FIRST, 0.18)
    drawing.line([(14, axis), (width - 14, axis)], SOFT, 1.2)
    numbers = [1 - k * 2**-8 for k in range(4, 0, -1)] + [1 + k * 2**-7 for k in range(4)]
    for k, value in enumerate(numbers):
        if not low < value < high:
            continue
        x = place(value)
        drawing.line([(x, axis - 11), (x, axis + 11)], FIRST if value == 1 else INK, 2)
        if value >= 1 or (k == 1 if narrow else k % 2 == 1):
            drawing.text(x, axis + 32, f"{value:.5g}", INK, 12, "middle")
    x = place(1)
    drawing.text(x + 6, 28, "1 − 0.0001", SECOND, 13)
    drawing.line([(place(0.9999), axis - 10), (place(0.9999), 34)], SECOND, 1.6)
    drawing.dot(place(0.9999), axis, SECOND, 3.4)
    label = "rounds to 1" if narrow else "all of this rounds to 1"
    drawing.text((left + right) / 2 + 24, axis - 24, label, FIRST, 12)
    drawing.text(place(1 - 1.5 * 2**-8), axis - 18, "2⁻⁸", SOFT, 12, "middle")
    drawing.text(place(1 + 1.5 * 2**-7), axis - 18, "2⁻⁷", SOFT, 12, "middle")
    return drawing.svg()
