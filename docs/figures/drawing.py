"""What figures are drawn with: SVG in the colours of the page, whichever scheme the reader has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from html import escape

INK, SOFT, FAINT = "var(--figure-ink)", "var(--figure-soft)", "var(--figure-faint)"
FIRST, SECOND = "var(--figure-first)", "var(--figure-second)"
THIRD, FOURTH = "var(--figure-third)", "var(--figure-fourth)"


class Drawing:
    """Shapes on a canvas; y grows downwards."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0
    ) -> None:
        """A box, its corners a little round."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2.5" '
            f'style="fill:{fill};opacity:{opacity}"/>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.2, dash: str = ""
    ) -> None:
        """A line from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" style="fill:none;stroke:{colour};stroke-width:{width};'
            f'stroke-linejoin:round;stroke-dasharray:{dash or "none"}"/>'
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 3.0) -> None:
        """A point."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="fill:{colour}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = INK,
        size: float = 12.5,
        anchor: str = "start",
        mono: bool = False,
    ) -> None:
        """A word or a line of them, on the base line y."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{" class=mono" if mono else ""} '
            f'style="fill:{colour};font-size:{size}px">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """The whole, as one line: Markdown leaves it alone."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'aria-hidden="true">{"".join(self.parts)}</svg>'
        )


# -------------------------------------------------------------------------------------------- bits


def binary(value: Fraction, precision: int) -> tuple[int, str]:
    """Exponent of the first of `precision` bits of a float, and the bits; zero has none."""
    if value == 0:
        return 0, ""
    magnitude = abs(value)
    exponent = 0
    while magnitude >= 2 ** (exponent + 1):
        exponent += 1
    while magnitude < Fraction(2) ** exponent:
        exponent -= 1
    significand = magnitude / Fraction(2) ** (exponent - precision + 1)
    assert significand.denominator == 1, "not a float of this precision"
    return exponent, f"{significand.numerator:0{precision}b}"


class Row:
    """A number in a picture of bits: its name, its value, how many bits it has, and its colour."""

    def __init__(
        self, name: str, value: Fraction, precision: int, colour: str, note: str = ""
    ) -> None:
        self.name, self.value, self.precision = name, value, precision
        self.colour, self.note = colour, note


def bits(rows: Sequence[Row | None], cell: float = 15.0, width: float = 720.0) -> str:
    """Significands over one axis of powers of two; None draws a rule."""
    placed = [(row, *binary(row.value, row.precision)) for row in rows if row is not None]
    high = max(exponent for _, exponent, digits in placed if digits)
    low = min(exponent - len(digits) + 1 for _, exponent, digits in placed if digits)
    left, line = 128.0, 27.0
    count = high - low + 1
    cell = min(cell, (width - left - 6) / count)
    drawing = Drawing(width, 34 + line * len(rows) + 4)
    step = next(s for s in (1, 2, 4, 8) if s * cell >= 40)
    for power in range(high, low - 1, -1):
        if power % step == 0:
            x = left + (high - power + 0.5) * cell
            drawing.line([(x, 24), (x, drawing.height - 4)], FAINT, 0.8)
            drawing.text(x, 16, f"2{superscript(power)}", SOFT, 11, "middle")
    y = 34.0
    for row in rows:
        if row is None:
            drawing.line([(left - 120, y + 10), (left + count * cell, y + 10)], SOFT, 1)
            y += line
            continue
        exponent, digits = binary(row.value, row.precision)
        drawing.text(left - 12, y + 14, row.name, row.colour, 13, "end")
        sign = "−" if row.value < 0 else ""
        for k, digit in enumerate(digits):
            x = left + (high - exponent + k) * cell
            drawing.rectangle(x + 0.6, y, cell - 1.2, 20, row.colour, 1.0 if digit == "1" else 0.22)
            if cell >= 9:
                inside = "var(--md-default-bg-color)" if digit == "1" else INK
                drawing.text(x + cell / 2, y + 14, digit, inside, min(11, cell), "middle", True)
        start = left + (high - exponent) * cell if digits else left
        if sign:
            drawing.text(start - 3, y + 14.5, sign, row.colour, 14, "end")
        if not digits:
            drawing.text(start + 2, y + 14, "0", row.colour, 13)
        if row.note:
            end = start + len(digits) * cell + 8
            drawing.text(end, y + 14, row.note, SOFT, 12)
        y += line
    return drawing.svg()


def superscript(number: int) -> str:
    """An exponent."""
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# ------------------------------------------------------------------------------------------ charts


class Axis:
    """Numbers to places between two ends, on a linear or a logarithmic scale."""

    def __init__(self, low: float, high: float, ticks: dict[float, str], log: bool = False) -> None:
        self.scale: Callable[[float], float] = math.log10 if log else float
        self.low, self.high, self.ticks = self.scale(low), self.scale(high), ticks

    def __call__(self, value: float, start: float, end: float) -> float:
        """The place of a value."""
        place = (self.scale(value) - self.low) / (self.high - self.low)
        return start + min(max(place, 0.0), 1.0) * (end - start)


class Line:
    """A curve, its colour, and its name, which stands at its end."""

    def __init__(
        self,
        name: str,
        points: Sequence[tuple[float, float]],
        colour: str,
        dash: str = "",
        stairs: bool = False,
        shift: float = 0.0,
        width: float = 2.0,
    ) -> None:
        self.name, self.points, self.colour = name, points, colour
        self.dash, self.stairs, self.shift, self.width = dash, stairs, shift, width


def chart(
    x: Axis, y: Axis, lines: Sequence[Line], xlabel: str, ylabel: str, right: float = 150.0
) -> str:
    """Curves with their names beside them."""
    width, height, left, top, bottom = 720.0, 330.0, 62.0, 30.0, 46.0
    drawing = Drawing(width, height)
    x0, x1, y0, y1 = left, width - right, height - bottom, top
    for value, label in y.ticks.items():
        place = y(value, y0, y1)
        drawing.line([(x0, place), (x1, place)], FAINT, 0.8)
        drawing.text(x0 - 8, place + 4, label, SOFT, 11.5, "end")
    for value, label in x.ticks.items():
        place = x(value, x0, x1)
        drawing.line([(place, y0), (place, y0 + 4)], SOFT, 1)
        drawing.text(place, y0 + 18, label, SOFT, 11.5, "middle")
    drawing.line([(x0, y0), (x1, y0)], SOFT, 1)
    drawing.text((x0 + x1) / 2, height - 8, xlabel, INK, 12.5, "middle")
    drawing.text(6, 15, ylabel, INK, 12.5)
    for line in lines:
        points = [(x(a, x0, x1), y(b, y0, y1)) for a, b in line.points]
        if line.stairs:
            points = [q for p, n in itertools.pairwise(points) for q in (p, (n[0], p[1]))]
        drawing.line(points, line.colour, line.width, line.dash)
        drawing.text(x1 + 8, points[-1][1] + 4 + line.shift, line.name, line.colour, 12.5)
    return drawing.svg()
