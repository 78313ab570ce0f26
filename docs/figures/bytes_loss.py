"""The loss of trainings against the bytes that a parameter takes, for two models."""

from __future__ import annotations

from collections import defaultdict

from drawing import FAINT, FIRST, INK, NARROW, SOFT, THIRD, WIDE, Drawing, Drawings
from tables import bert
from tables.sources import load

BYTES = (4.0, 17.5)
Points = dict[str, tuple[float, list[float]]]
NEAR = 0.35  # Bytes between names that share a line.


def draw() -> Drawings:
    """A panel for each model."""
    panels = [
        ("GPT of 1.3 M parameters: nats a byte, less those of master weights", small()),
        ("BERT of 4.4 M parameters: nats a token, less those of master weights", masked()),
    ]
    return picture(panels, WIDE), picture(panels, NARROW)


def small() -> Points:
    """The trainings of `make train`: bytes, and a loss for each seed."""
    runs = [load(f"pretrain-seed{seed}")["strategies"] for seed in range(3)]
    return {
        name: (
            found["bytes_per_parameter"],
            [r[name]["final"]["nats"] - r["master"]["final"]["nats"] for r in runs if name in r],
        )
        for name, found in runs[0].items()
    }


def masked() -> Points:
    """The trainings of `bert.py` at a beta2 of 0.999."""
    return {
        name: (row[0].bytes, [run.gap for run in row if run.gap is not None])
        for name, row in bert.at_beta2(0.999).items()
    }


def picture(panels: list[tuple[str, Points]], width: float) -> str:
    """All panels, one below the other."""
    high = 220.0
    drawing = Drawing(width, high * len(panels) + 22)
    for i, (title, points) in enumerate(panels):
        panel(drawing, title, points, high * i, high)
    drawing.text(width / 2, drawing.height - 4, "bytes a parameter", SOFT, anchor="middle")
    return drawing.svg()


def panel(drawing: Drawing, title: str, points: Points, top: float, high: float) -> None:
    """A dot for each seed, and the names of strategies with as many bytes together."""
    left, right, bottom = 44.0, drawing.width - 14, top + high - 42
    gaps = [gap for _, own in points.values() for gap in own]
    low, span = min(0.0, *gaps), max(gaps) - min(0.0, *gaps) or 1.0

    def x(value: float) -> float:
        return left + (value - BYTES[0]) / (BYTES[1] - BYTES[0]) * (right - left)

    def y(value: float) -> float:
        return bottom - 50 - (value - low) / span * (high - 132)

    narrow = drawing.width < WIDE
    drawing.text(8, top + 18, title if not narrow else title.partition(":")[0], INK, 12.5)
    for n in range(4, 18, 2):
        drawing.line([(x(n), bottom), (x(n), bottom + 4)], SOFT)
        drawing.text(x(n), bottom + 17, f"{n}", SOFT, 11, "middle")
    drawing.line([(left, bottom), (right, bottom)], SOFT)
    for value in (0.0, max(gaps)):
        drawing.line([(left, y(value)), (right, y(value))], FAINT)
        drawing.text(left - 5, y(value) + 4, f"{value:.2f}", SOFT, 11, "end")
    for name, (size, own) in points.items():
        for gap in own:
            drawing.dot(x(size), y(gap), THIRD if name == "bf16" else FIRST)
    end, taken = 0.0, 0  # of the names to the left: where they end, and their lines
    for size, names in together(points):
        level = max(y(gap) for name in names for gap in points[name][1])
        half = 3.2 * max(map(len, names))
        first = taken if x(size) - half < end else 0
        for j, name in enumerate(names, first):
            drawing.text(x(size), level + 18 + 13 * j, name, INK, 11, "middle")
        end, taken = x(size) + half, first + len(names) if first == 0 else 0


def together(points: Points) -> list[tuple[float, list[str]]]:
    """Names by bytes, those that are near to each other in one place."""
    places: dict[float, list[str]] = defaultdict(list)
    for name, (size, _) in sorted(points.items(), key=lambda item: item[1][0]):
        place = next((other for other in places if abs(other - size) < NEAR), size)
        places[place].append(name)
    return list(places.items())
