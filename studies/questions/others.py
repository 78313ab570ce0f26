"""Do light and plus help other optimizers as they help AdamW?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pretraining.report import LINES
from questions.intervals import mean_of
from questions.settings import Row, Settings, brief, dress, gap
from questions.stock import RATES
from questions.trial import Trial

REFERENCE = "master"
BETA2 = 0.999
# Plus is tried where there is a second moment like the weights.
STRATEGIES = {
    "sgd": ("bf16", "light"),
    "lion": ("bf16", "light"),
    "muon": ("bf16", "light"),
    "schedulefree": ("bf16", "light", "plus"),
    "adafactor": ("bf16", "light"),
}
NAMES = {
    "sgd": "SGD, momentum",
    "lion": "Lion",
    "muon": "Muon",
    "schedulefree": "schedule-free AdamW",
    "adafactor": "Adafactor",
}
FIGURES = ("ratio", "lost", "displacement_matrices", "displacement_vectors", "first_ratio")


def trials(settings: Settings, optimizer: str) -> list[Trial]:
    """Of one optimizer, half as long as others: some of these take their time."""
    strategies = (REFERENCE, *STRATEGIES[optimizer])
    return settings.grid(
        strategies, RATES[optimizer], [BETA2], optimizer, max(1, settings.steps // 2)
    )


def answer(settings: Settings) -> dict[str, Any]:
    """Of each optimizer, strategy and learning rate: the loss beside master weights, and why."""
    rows = []
    for optimizer in STRATEGIES:
        wanted = trials(settings, optimizer)
        outcomes = settings.outcomes(wanted, optimizer)
        for strategy, lr in dict.fromkeys((t.strategy, t.lr) for t in wanted):
            own = [t for t in wanted if (t.strategy, t.lr) == (strategy, lr)]
            row: Row = {"optimizer": optimizer, "strategy": strategy, "lr": lr}
            row["validation"] = mean_of([outcomes[t]["validation"] or 0.0 for t in own])[0]
            gaps = [gap(outcomes, t, REFERENCE) for t in own]
            row["gap"], row["gap_half"] = mean_of(gaps)
            for name in FIGURES:
                values = [x for t in own if (x := outcomes[t].get(name)) is not None]
                row[name] = mean_of(values)[0] if values else None
            rows.append(row)
    return {"rows": rows}


def draw(found: dict[str, Any], path: Path) -> None:
    """A panel for each optimizer: the gap over its learning rates."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    figure.suptitle("Validation loss less that of master weights: means and intervals of 95 %")
    panels = figure.subplots(1, len(STRATEGIES), sharey=True)
    for axes, optimizer in zip(panels, STRATEGIES, strict=True):
        for strategy in STRATEGIES[optimizer]:
            own = [
                r for r in found["rows"] if (r["optimizer"], r["strategy"]) == (optimizer, strategy)
            ]
            axes.errorbar(
                [brief(r["lr"]) for r in own],
                [r["gap"] for r in own],
                [r["gap_half"] or 0.0 for r in own],
                label=strategy,
                capsize=3,
                **LINES[strategy],
            )
        axes.axhline(0, color="#BBBBBB", zorder=0)
        axes.set_yscale("symlog", linthresh=0.003)
        axes.margins(x=0.3)
        axes.set_ylim(-0.01, 1)
        dress(axes, NAMES[optimizer], "peak learning rate")
        axes.legend(frameon=False, fontsize="small", loc="center right")
    panels[0].set_ylabel("nats a byte")
    figure.savefig(path, dpi=120)
