"""Where does it break? Small trainings that reach each condition, and trainings with the cure: what
the meter says, which warnings the library gives, and how far the weights went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from questions.conditions import CONDITIONS
from questions.settings import Settings, dress
from questions.watched import observe


def answer(settings: Settings) -> dict[str, Any]:
    """The figures of each training of each condition."""
    ways = {name: make() for name, make in CONDITIONS.items()}
    keys: list[dict[str, Any]] = [
        {"breaks": name, "way": i, "called": way.name, "steps": way.steps}
        for name, own in ways.items()
        for i, way in enumerate(own)
    ]
    found = settings.ledger.measure_all(
        keys,
        lambda key: observe(ways[key["breaks"]][key["way"]], settings.training),
        "breaks",
    )
    rows: dict[str, list[Any]] = {name: [] for name in ways}
    for key, row in zip(keys, found, strict=True):
        rows[key["breaks"]].append(row)
    return {"conditions": rows}


def draw(found: dict[str, Any], path: Path) -> None:
    """A point for each training: the ratio of the meter, and the error of the way."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name, rows in found["conditions"].items():
        seen = [row for row in rows if row["ratio"] is not None]
        axes.plot(
            [abs(1 - row["ratio"]) for row in seen],
            [row["error"] for row in seen],
            linestyle="",
            marker="o",
            label=name,
        )
    axes.set_xscale("symlog", linthresh=1e-6)
    axes.set_yscale("log")
    dress(axes, "What the meter says, and what the weights did", "|1 - EDQ ratio|")
    axes.set_ylabel("error of the way, against float64")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
