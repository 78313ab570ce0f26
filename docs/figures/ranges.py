"""Which powers of two each format holds: its range, and the bits of a number near 1."""

from __future__ import annotations

from drawing import FAINT, FIRST, INK, NARROW, SECOND, SOFT, WIDE, Drawing, Drawings, superscript

LOW, HIGH = -150, 128
# Least power of a subnormal, least of a normal, largest; the bits of a number near 1, term by term.
ROWS = {
    "fp32": (-149, -126, 127, [24]),
    "tf32": (-136, -126, 127, [11]),
    "bf16": (-133, -126, 127, [8]),
    "fp16": (-24, -14, 15, [11]),
    "fp8 E4M3": (-9, -6, 8, [4]),
    "fp8 E5M2": (-16, -14, 15, [3]),
    "bf16x2": (-133, -126, 127, [8, 8]),
    "bf16x3": (-133, -126, 127, [8, 8, 8]),
    "bf16i8": (-141, -126, 127, [8, 8]),
    "bf16i16": (-149, -126, 127, [8, 16]),
    "fp16x2": (-24, -14, 15, [11, 11]),
}


def draw() -> Drawings:
    """A row for each format, over one axis of exponents."""
    return _ranges(WIDE), _ranges(NARROW)


def _ranges(width: float) -> str:
    left, right, height = 76.0, 8.0, 22.0
    drawing = Drawing(width, 34 + height * len(ROWS))

    def place(power: float) -> float:
        return left + (HIGH - power) / (HIGH - LOW) * (width - left - right)

    for power in range(-128, 129, 64 if width < WIDE else 32):
        x = place(power)
        drawing.line([(x, 8), (x, 12 + height * len(ROWS))], FAINT, 1)
        drawing.text(x, 28 + height * len(ROWS), f"2{superscript(power)}", SOFT, 11, "middle")
    for i, (name, (least, normal, largest, terms)) in enumerate(ROWS.items()):
        y = 12 + height * i
        drawing.text(left - 8, y + 11, name, INK, 12, "end")
        drawing.rectangle(place(largest), y + 3, place(normal) - place(largest), 9, FIRST, 0.3)
        drawing.rectangle(place(normal), y + 3, place(least) - place(normal), 9, SOFT, 0.3)
        top = 0.0
        for term, bits in enumerate(terms):
            # A further term begins one place lower: its sign is a bit of its own.
            start = top - (1 if term and "x" in name else 0)
            colour = (FIRST, SECOND, INK)[term]
            drawing.rectangle(place(start), y, place(start - bits) - place(start), 15, colour)
            top = start - bits
    return drawing.svg()
