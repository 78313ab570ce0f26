"""The loss of trainings that get tails for the last steps, by the share of these steps."""

from __future__ import annotations

from drawing import FAINT, FIRST, INK, NARROW, SECOND, SOFT, WIDE, Drawing, Drawings
from tables import late

PLACES = {"never": 0, "5%": 1, "10%": 2, "20%": 3, "meter": 4}
LABELS = ("none", "5 %", "10 %", "20 %", "by the meter", "all steps")
COLOURS = {"bf16": SECOND, "round": FIRST, "exact": INK}
NAMES = {"bf16": "to nearest", "round": "balanced"}
HIGH = 250.0


def draw() -> Drawings:
    """A panel for each model."""
    panels = [(f"{name} parameters", late.cases(size)) for size, name in late.sizes_run().items()]
    return picture(panels, WIDE), picture(panels, NARROW)


def picture(panels: list[tuple[str, list[late.Case]]], width: float) -> str:
    """All panels, one below the other."""
    drawing = Drawing(width, HIGH * len(panels) + 20)
    for i, (title, found) in enumerate(panels):
        panel(drawing, title, found, HIGH * i)
    drawing.text(width / 2, drawing.height - 4, "last steps with tails", SOFT, anchor="middle")
    return drawing.svg()


def panel(drawing: Drawing, title: str, found: list[late.Case], top: float) -> None:
    """A dot for each seed, and a line through the means."""
    left, right, high, bottom = 48.0, drawing.width - 30, top + 44, top + HIGH - 34
    (reference,) = (case for case in found if case.weights == "exact")
    by_case = {(case.weights, case.tails): late.gaps(case, reference) for case in found}
    gaps = {key: list(own.values()) for key, own in by_case.items() if own}
    values = [gap for own in gaps.values() for gap in own]
    low, span = min(values), max(values) - min(values) or 1.0

    def x(place: float) -> float:
        return left + 30 + place / (len(LABELS) - 1) * (right - left - 60)

    def y(value: float) -> float:
        return bottom - 10 - (value - low) / span * (bottom - high - 16)

    drawing.text(8, top + 16, f"{title}: nats from tails in all steps", INK)
    for value in (0.0, max(values)):
        drawing.line([(left, y(value)), (right, y(value))], FAINT)
        drawing.text(left - 5, y(value) + 4, f"{value:.3f}", SOFT, 11, "end")
    for place, label in enumerate(LABELS):
        short = "meter" if drawing.width < WIDE and place == PLACES["meter"] else label
        drawing.text(x(place), bottom + 18, short, SOFT, 11, "middle")
    for weights, colour in COLOURS.items():
        own = {t: gap for (w, t), gap in gaps.items() if w == weights}
        places = {t: len(LABELS) - 1 if weights == "exact" else PLACES[t] for t in own}
        means = [(x(places[t]), y(sum(gap) / len(gap))) for t, gap in own.items() if t != "meter"]
        drawing.line(means, colour, 1.6)
        for t, gap in own.items():
            for value in gap:
                drawing.dot(x(places[t]), y(value), colour)
        if weights in NAMES and own:
            drawing.text(means[-1][0] + 10, means[-1][1] - 8, NAMES[weights], colour, 12)
