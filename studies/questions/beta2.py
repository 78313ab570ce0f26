"""The best beta2 of each strategy of AdamW, and what another one does to its second moments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pretraining.report import LINES
from questions.intervals import mean_of
from questions.settings import Outcomes, Row, Settings, brief, dress, gap
from questions.stock import RATES
from questions.trial import Trial

REFERENCE = "master"
STRATEGIES = (REFERENCE, "bf16", "light", "plus", "full", "compact")
BETA2S = (0.9, 0.99, 0.999, 0.9999)
MECHANISM = ("ratio", "lost", "second_ratio", "second_moment", "displacement_matrices")


def trials(settings: Settings) -> list[Trial]:
    """Every strategy at every beta2 and learning rate."""
    return settings.grid(STRATEGIES, RATES["adamw"], BETA2S)


def answer(settings: Settings) -> dict[str, Any]:
    """Losses of all cells, and the best of each strategy."""
    wanted = trials(settings)
    outcomes = settings.outcomes(wanted, "beta2")
    cells = [
        cell(outcomes, [t for t in wanted if (t.strategy, t.lr, t.beta2) == where])
        for where in dict.fromkeys((t.strategy, t.lr, t.beta2) for t in wanted)
    ]
    best = [best_of(outcomes, cells, name, lr) for lr in RATES["adamw"] for name in STRATEGIES]
    return {"beta2s": BETA2S, "cells": cells, "best": best}


def cell(outcomes: Outcomes, own: list[Trial]) -> Row:
    """Means over the seeds of one strategy, learning rate and beta2."""
    row: Row = {"strategy": own[0].strategy, "lr": own[0].lr, "beta2": own[0].beta2}
    row["validation"], row["validation_half"] = mean_of([_loss(outcomes, t) for t in own])
    row["gap"], row["gap_half"] = mean_of([gap(outcomes, t, REFERENCE) for t in own])
    for figure in MECHANISM:
        row[figure] = mean_of([outcomes[t][figure] or 0.0 for t in own])[0]
    # The largest of the run over the largest exact one, at the seed where that is most.
    row["largest"] = max(
        (outcomes[t]["largest_run"] or 0.0) / (outcomes[t]["largest_exact"] or 1.0) for t in own
    )
    return row


def best_of(outcomes: Outcomes, cells: list[Row], strategy: str, lr: float) -> Row:
    """Losses by beta2, the best, and how much worse the second best is, seed by seed."""
    own = [row for row in cells if (row["strategy"], row["lr"]) == (strategy, lr)]
    first, second = sorted(own, key=lambda row: row["validation"])[:2]
    mean, half = mean_of(
        [
            _loss(outcomes, t) - _loss(outcomes, replace(t, beta2=first["beta2"]))
            for t in outcomes
            if (t.strategy, t.lr, t.beta2) == (strategy, lr, second["beta2"])
        ]
    )
    return {
        "strategy": strategy,
        "lr": lr,
        "losses": [row["validation"] for row in own],
        "beta2": first["beta2"],
        "second": second["beta2"],
        "worse": mean,
        "half": half,
    }


def _loss(outcomes: Outcomes, trial: Trial) -> float:
    return outcomes[trial]["validation"] or 0.0


def draw(found: dict[str, Any], path: Path) -> None:
    """A column for each learning rate: the loss, what it is from master weights, and second
    moments."""
    figure = Figure(figsize=(13, 10), layout="constrained")
    figure.suptitle("AdamW by beta2: means of the seeds, bars are intervals of 95 %")
    panels = figure.subplots(3, len(RATES["adamw"]))
    points = [f"{x:g}" for x in BETA2S]
    for column, lr in zip(panels.T, RATES["adamw"], strict=True):
        for strategy in STRATEGIES:
            own = [
                next(r for r in found["cells"] if _is(r, strategy, lr, beta2)) for beta2 in BETA2S
            ]
            style = {name: x for name, x in LINES[strategy].items() if name != "linewidth"}
            wide = {"linewidth": LINES[strategy].get("linewidth", 1.5)}
            column[0].plot(points, [r["validation"] for r in own], label=strategy, **style, **wide)
            if strategy != REFERENCE:
                column[1].errorbar(
                    points,
                    [r["gap"] for r in own],
                    [r["gap_half"] or 0.0 for r in own],
                    capsize=3,
                    **style,
                    **wide,
                )
            column[2].plot(points, [r["second_moment"] for r in own], **style, **wide)
        dress(column[0], f"lr {brief(lr)}: validation loss, nats a byte", "")
        dress(column[1], "difference to master weights", "")
        column[1].set_yscale("symlog", linthresh=0.01)
        dress(column[2], "second moment, median over the exact one", "beta2")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def _is(row: Row, strategy: str, lr: float, beta2: float) -> bool:
    return (row["strategy"], row["lr"], row["beta2"]) == (strategy, lr, beta2)
