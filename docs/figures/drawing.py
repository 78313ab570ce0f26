"""What figures are drawn with: SVG in the colours of the page, whichever scheme the reader has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from html import escape

# The page says which colours these are. A drawing by itself, as a forge shows it, has those after
# the comma, which can be read on light and dark.
INK = "var(--figure-ink,#7b848e)"
SOFT = "var(--figure-soft,#8a929b)"
FAINT = "var(--figure-faint,#8a929b55)"
FIRST = "var(--figure-first,#2f8ae0)"
SECOND = "var(--figure-second,#ea6a1f)"
THIRD = "var(--figure-third,#d6447a)"
FOURTH = "var(--figure-fourth,#2f9e44)"
PAPER = "var(--md-default-bg-color,#fff)"

WIDE, NARROW = 720.0, 356.0
"""Two drawings of each figure: for a page of this width, and for a phone."""

Drawings = tuple[str, str]

MONO = ' class="mono" font-family="monospace"'


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
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{MONO if mono else ""} '
            f'style="fill:{colour};font-size:{size}px">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """The whole, as one line: Markdown leaves it alone."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'font-family="sans-serif" aria-hidden="true">{"".join(self.parts)}</svg>'
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


def bits(rows: Sequence[Row | None], cell: float = 15.0) -> Drawings:
    """Significands over one axis of powers of two; None draws a rule."""
    return _bits(rows, cell, WIDE), _bits(rows, cell, NARROW)


def _bits(rows: Sequence[Row | None], cell: float, width: float) -> str:
    """On a phone names stand above their numbers."""
    narrow = width < WIDE
    placed = [(row, *binary(row.value, row.precision)) for row in rows if row is not None]
    high = max(exponent for _, exponent, digits in placed if digits)
    low = min(exponent - len(digits) + 1 for _, exponent, digits in placed if digits)
    left, line, rule = (14.0, 42.0, 12.0) if narrow else (128.0, 27.0, 27.0)
    count = high - low + 1
    cell = min(cell, (width - left - 6) / count)
    drawing = Drawing(width, 38 + sum(rule if row is None else line for row in rows))
    step = next(s for s in (1, 2, 4, 8) if s * cell >= 40)
    for power in range(high, low - 1, -1):
        if power % step == 0:
            x = left + (high - power + 0.5) * cell
            drawing.line([(x, 24), (x, drawing.height - 4)], FAINT, 0.8)
            drawing.text(x, 16, f"2{superscript(power)}", SOFT, 11, "middle")
    y = 34.0
    for row in rows:
        if row is None:
            start = left if narrow else left - 120
            y_rule = y + 2 if narrow else y + 10
            drawing.line([(start, y_rule), (left + count * cell, y_rule)], SOFT, 1)
            y += rule
            continue
        exponent, digits = binary(row.value, row.precision)
        if narrow:
            drawing.text(left, y + 12, row.name, row.colour, 13)
            if row.note:
                drawing.text(left + 12 + 7 * len(row.name), y + 12, row.note, SOFT, 12)
            y += 17
        else:
            drawing.text(left - 12, y + 14, row.name, row.colour, 13, "end")
        for k, digit in enumerate(digits):
            x = left + (high - exponent + k) * cell
            drawing.rectangle(x + 0.6, y, cell - 1.2, 20, row.colour, 1.0 if digit == "1" else 0.22)
            if cell >= 9:
                inside = PAPER if digit == "1" else INK
                drawing.text(x + cell / 2, y + 14, digit, inside, min(11, cell), "middle", True)
        start = left + (high - exponent) * cell if digits else left
        if row.value < 0:
            drawing.text(start - 3, y + 14.5, "−", row.colour, 14, "end")
        if not digits:
            drawing.text(start + 2, y + 14, "0", row.colour, 13)
        if row.note and not narrow:
            end = start + len(digits) * cell + 8
            drawing.text(end, y + 14, row.note, SOFT, 12)
        y += line - (17 if narrow else 0)
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
    """A curve, its colour, and its name, which stands at its end or at a place in the chart."""

    def __init__(
        self,
        name: str,
        points: Sequence[tuple[float, float]],
        colour: str,
        dash: str = "",
        stairs: bool = False,
        shift: float = 0.0,
        width: float = 2.0,
        at: tuple[float, float] | None = None,
    ) -> None:
        self.name, self.points, self.colour = name, points, colour
        self.dash, self.stairs, self.shift, self.width = dash, stairs, shift, width
        self.at = at


DRAWN = (
    "<style>@media (prefers-reduced-motion:no-preference)"
    "{.drawn{animation:draw 20s linear both}}"
    "@keyframes draw{from{clip-path:inset(-9px 100% -9px 0)}to{clip-path:inset(-9px 0 -9px 0)}}"
    "</style>"
)


def chart(
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    xlabel: str,
    ylabel: str,
    right: float = 150.0,
    drawn: bool = False,
) -> Drawings:
    """Curves with their names beside them, on a phone below them; `drawn` from left to right in 20
    seconds, unless the reader's system asks for less motion."""
    wide, narrow = (
        _chart(x, y, lines, xlabel, ylabel, margin, width, drawn)
        for margin, width in ((right, WIDE), (14.0, NARROW))
    )
    return wide, narrow


def _chart(
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    xlabel: str,
    ylabel: str,
    right: float,
    width: float,
    drawn: bool,
) -> str:
    narrow = width < WIDE
    height, left, top, bottom = 330.0, 50.0 if narrow else 62.0, 30.0, 46.0
    names = _rows([line.name for line in lines], width - 12) if narrow else []
    drawing = Drawing(width, height + 20 * len(names))
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
    if drawn:
        drawing.parts.append(f'{DRAWN}<g class="drawn">')
    for line in lines:
        points = [(x(a, x0, x1), y(b, y0, y1)) for a, b in line.points]
        if line.stairs:
            points = [q for p, n in itertools.pairwise(points) for q in (p, (n[0], p[1]))]
        drawing.line(points, line.colour, line.width, line.dash)
    if drawn:
        drawing.parts.append("</g>")
    for line in lines:
        end = y(line.points[-1][1], y0, y1) + 4 + line.shift
        if line.at:
            place, end = x(line.at[0], x0, x1), y(line.at[1], y0, y1)
            if not narrow:
                drawing.text(place, end, line.name, line.colour, 13)
        elif not narrow:
            drawing.text(x1 + 8, end, line.name, line.colour, 12.5)
    for row, places in enumerate(names):
        middle = height + 8 + 20 * row
        for place, number in places:
            line = lines[number]
            key = [(place, middle), (place + 20, middle)]
            drawing.line(key, line.colour, line.width, line.dash)
            drawing.text(place + 26, middle + 4, line.name, line.colour, 12.5)
    return drawing.svg()


def _rows(names: Sequence[str], width: float) -> list[list[tuple[float, int]]]:
    """Where names and their keys stand below a chart, in as many rows as they need."""
    rows: list[list[tuple[float, int]]] = []
    place = width
    for number, name in enumerate(names):
        size = 44 + 6.8 * len(name)
        if place + size > width:
            rows.append([])
            place = 12.0
        rows[-1].append((place, number))
        place += size
    return rows
