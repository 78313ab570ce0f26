"""The loss of trainings against the bytes that a parameter takes, for two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean

from drawing import FAINT, FIRST, INK, NARROW, SECOND, SOFT, WIDE, Drawing, Drawings
from tables import bert, training

BYTES = (4.0, 17.0)
LETTER, LINE = 6.5, 12.0  # Of names: width and height.
# Where names may be, beside their point; to the right rather than to the left.
NEAR = sorted(
    product(range(-130, 131, 5), range(-90, 91, 3)),
    key=lambda d: math.hypot(d[0] - 1, d[1]),
)
Box = tuple[float, float, float, float]  # left, top, right, bottom
REFERENCE, SAME = "master", "exact"  # What differs by chance alone from the reference.
# Optimizers over plain tensors, and what they are called.
OTHERS = {
    "bf16": "plain bf16",
    "kahan": "optimi Kahan",
    "fp16": "fp16 autocast",
    "flash24": "FlashAdamW 24",
    "flash32": "FlashAdamW 32",
    "heavyball8": "heavyball 8",
    "torchao": "torchao bf16",
    "torchao8": "torchao 8-bit",
    "torchaofp8": "torchao fp8",
    "torchao4": "torchao 4-bit",
    "bnb32": "bitsandbytes 32-bit",
    "bnb8": "bitsandbytes 8-bit",
    REFERENCE: "float32 masters",
}


@dataclass(frozen=True)
class Point:
    """A strategy: its bytes, and the loss of each seed less that of master weights."""

    name: str
    size: float
    gaps: list[float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.gaps)

    @property
    def colour(self) -> str:
        """This library, or another one."""
        return SECOND if self.name in OTHERS else FIRST

    @property
    def label(self) -> str:
        """As it stands beside the point."""
        return OTHERS.get(self.name, self.name)


def draw() -> Drawings:
    """A panel for each model."""
    panels = [
        ("GPT of 1.3 M parameters", "nats a byte", small()),
        ("BERT of 4.4 M parameters", "nats a token", masked()),
    ]
    return picture(panels, WIDE), picture(panels, NARROW)


def small() -> list[Point]:
    """The trainings of the main job, by this library and by others."""
    found = training.in_main_job("pretrain-peers") | training.in_main_job()
    return [
        Point(
            name,
            training.bytes_of(runs),
            [run["final"]["difference_to_master"] for run in runs],
        )
        for name, runs in found.items()
    ]


def masked() -> list[Point]:
    """The trainings of `bert.py` at a beta2 of 0.999."""
    return [
        Point(name, row[0].bytes, [run.gap for run in row if run.gap is not None])
        for name, row in bert.at_beta2(0.999).items()
    ]


def picture(panels: list[tuple[str, str, list[Point]]], width: float) -> str:
    """All panels, one below the other."""
    high = 380.0
    drawing = Drawing(width, high * len(panels))
    for i, (title, unit, points) in enumerate(panels):
        Panel(drawing, points, high * i, high).draw(title, unit)
    return drawing.svg()


class Panel:
    """Loss over bytes: linear up to a unit on both sides of zero, and logarithmic beyond."""

    def __init__(self, drawing: Drawing, points: list[Point], top: float, high: float) -> None:
        self.drawing, self.points = drawing, points
        self.left, self.right = 48.0, drawing.width - 12
        self.top, self.bottom = top + 62, top + high - 48
        self.chance = max(abs(gap) for p in points if p.name == SAME for gap in p.gaps)
        self.unit = 10.0 ** math.ceil(math.log10(self.chance))
        ends = [self.place(gap) for point in points for gap in point.gaps]
        self.ends = min(-1.0, *ends) - 0.8, max(ends) + 0.2
        self.taken: list[Box] = []

    def place(self, value: float) -> float:
        """A loss on the scale."""
        size = abs(value) / self.unit
        return math.copysign(size if size <= 1 else 1 + math.log10(size), value)

    def x(self, size: float) -> float:
        """Where bytes are."""
        return self.left + (size - BYTES[0]) / (BYTES[1] - BYTES[0]) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Where a loss is."""
        low, high = self.ends
        return self.bottom - (self.place(value) - low) / (high - low) * (self.bottom - self.top)

    def draw(self, title: str, unit: str) -> None:
        """A mark for each strategy at its mean, a small dot for each seed, and the front."""
        drawing, right, bottom = self.drawing, self.right, self.bottom
        drawing.text(8, self.top - 44, title, INK, 14)
        drawing.text(8, self.top - 26, f"{unit} above float32 masters", INK, 12)
        self.key()
        band = self.y(self.chance), self.y(-self.chance)
        drawing.rectangle(self.left, band[0], right - self.left, band[1] - band[0], SOFT, 0.18)
        drawing.text(self.x(9), band[0] + 12, "chance", SOFT, 11, "middle")
        self.taken.append(box(self.x(9), band[0] + 12, "chance", "middle"))
        for value in (-10 * self.unit, -self.unit, 0.0, self.unit, 10 * self.unit, 100 * self.unit):
            if self.ends[0] <= self.place(value) <= self.ends[1]:
                level = self.y(value)
                drawing.line([(self.left, level), (right, level)], FAINT)
                label = f"{value:g}".replace("-", "−")
                drawing.text(self.left - 5, level + 4, label, SOFT, 11, "end")
        for n in range(4, 18, 2):
            drawing.line([(self.x(n), bottom), (self.x(n), bottom + 4)], SOFT)
            drawing.text(self.x(n), bottom + 17, f"{n}", SOFT, 11, "middle")
        drawing.line([(self.left, bottom), (right, bottom)], SOFT)
        middle = (self.left + right) / 2
        drawing.text(middle, bottom + 35, "bytes a parameter, with gradients", INK, 12, "middle")
        self.front()
        for point in self.points:
            for gap in point.gaps:
                x, y = self.x(point.size), self.y(gap)
                drawing.dot(x, y, point.colour, 1.8)
                self.taken.append((x - 2, y - 2, x + 2, y + 2))
            self.mark(self.x(point.size), self.y(point.mean), point.colour)
        for point in sorted(self.points, key=lambda point: -self.y(point.mean)):
            self.name(point)

    def key(self) -> None:
        """What marks and lines are."""
        words = (("this library", FIRST), ("others", SECOND))
        for level, (word, colour) in zip((self.top - 44, self.top - 26), words, strict=True):
            self.drawing.text(self.right - 78, level, word, colour, 12)
            self.mark(self.right - 90, level - 4, colour)

    def mark(self, x: float, y: float, colour: str) -> None:
        """A circle for this library, a square for others; nothing may stand on it."""
        if colour == FIRST:
            self.drawing.dot(x, y, colour, 5)
        else:
            self.drawing.rectangle(x - 4.5, y - 4.5, 9, 9, colour)
        self.taken.append((x - 6, y - 6, x + 6, y + 6))

    def front(self) -> None:
        """The line below which is nothing."""
        found = [(self.x(p.size), self.y(p.mean)) for p in self.best()]
        line = [(found[0][0], self.top - 8)]
        for x, y in found:
            line += [(x, line[-1][1]), (x, y)]
        line.append((self.right, line[-1][1]))
        self.drawing.line(line, INK, 1.4, "5 4")
        for (a, b), (c, d) in pairwise(line):
            self.taken.append((min(a, c) - 2, min(b, d) - 2, max(a, c) + 2, max(b, d) + 2))
        self.drawing.text(self.right, line[-1][1] - 5, "Pareto front", INK, 11, "end")
        self.taken.append(box(self.right, line[-1][1] - 5, "Pareto front", "end"))

    def best(self) -> list[Point]:
        """Strategies with a lower loss than all with fewer bytes, by more than chance."""
        front: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.size, p.mean)):
            if not front or point.mean < front[-1].mean - self.chance:
                front.append(point)
        return front

    def name(self, point: Point) -> None:
        """The name of a point where there is room, as near as can be."""
        x, y = self.x(point.size), self.y(point.mean)
        for dx, dy in NEAR:
            anchor = "middle" if abs(dx) < 8 else "start" if dx > 0 else "end"
            place = box(x + dx, y + dy + 4, point.label, anchor)
            if self.is_free(place):
                break
        self.taken.append(place)
        if math.hypot(dx, dy) > 18:
            end = min(max(x, place[0]), place[2]), min(max(y, place[1]), place[3])
            self.drawing.line([(x, y), end], point.colour, 0.8)
        self.drawing.text(x + dx, y + dy + 4, point.label, point.colour, 11, anchor)

    def is_free(self, place: Box) -> bool:
        """Whether nothing is there."""
        left, top, right, bottom = place
        inside = left > self.left + 2 and right < self.right + 8
        return (
            inside
            and top > self.top - 8
            and bottom < self.bottom
            and not any(
                a < right and left < c and b < bottom and top < d for a, b, c, d in self.taken
            )
        )


def box(x: float, y: float, text: str, anchor: str) -> Box:
    """The place of a name on the base line y."""
    width = LETTER * len(text)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return left, y - LINE + 3, left + width, y + 3
