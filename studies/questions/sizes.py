"""Does the gap to master weights grow or close with the size of the model?

The learning rate of each size is the best of master weights, and a third of it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pretraining.model import Shape
from pretraining.report import LINES
from questions.beta2 import MECHANISM
from questions.intervals import mean_of
from questions.settings import Outcomes, Row, Settings, dress, gap
from questions.trial import Trial, count_parameters

REFERENCE = "master"
STRATEGIES = (REFERENCE, "bf16", "light", "plus", "full", "exact", "compact")
SHAPES = (
    Shape(context=64, layers=2, width=64, heads=2),  # 0.1 million parameters
    Shape(context=64, layers=3, width=104, heads=4),  # 0.4
    Shape(context=128, layers=4, width=160, heads=5),  # 1.3
    Shape(context=128, layers=6, width=256, heads=8),  # 5
    Shape(context=128, layers=8, width=448, heads=7),  # 20
)
SEEDS = (3, 3, 3, 1, 1)  # At most: one training of the largest takes a quarter of an hour.
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SHARES = (1.0, 1 / 3)  # of the best rate
BETA2 = 0.999
BETA2S = (0.95, 0.99, 0.9999)  # beside it, at the best rate
OF_BETA2 = (REFERENCE, "bf16", "plus")
FIGURES = (*MECHANISM, "ratio_leading")
SIDE = 1.06  # In the picture, from one strategy to the next.


def answer(settings: Settings) -> dict[str, Any]:
    """The best rate of each size, then every strategy at both rates, then other values of beta2.

    One size after the other, the smallest first; `settings.sizes` says how many.
    """
    rows: list[Row] = []
    beta2s: list[Row] = []
    for shape, most in list(zip(SHAPES, SEEDS, strict=True))[: settings.sizes]:
        seeds = settings.seeds[:most]
        million = count_parameters(shape) / 1e6
        first = Trial(REFERENCE, 0.0, BETA2, seeds[0], "adamw", settings.steps, shape)
        sweep = settings.outcomes([replace(first, lr=lr) for lr in RATES], f"{million:.1f} M: rate")
        best = min(sweep, key=lambda trial: loss(sweep, trial)).lr
        wanted = [
            replace(first, strategy=strategy, lr=share * best, seed=seed)
            for seed, share, strategy in product(seeds, SHARES, STRATEGIES)
        ]
        outcomes = settings.outcomes(wanted, f"{million:.1f} M")
        for share, strategy in product(SHARES, STRATEGIES):
            own = [t for t in wanted if (t.strategy, t.lr) == (strategy, share * best)]
            rows.append(row_of(outcomes, own) | {"million": million, "share": share})
        others = [
            replace(first, strategy=strategy, lr=best, seed=seed, beta2=beta2)
            for seed, beta2, strategy in product(seeds, BETA2S, OF_BETA2)
        ]
        outcomes |= settings.outcomes(others, f"{million:.1f} M: beta2")
        for strategy, beta2 in product(OF_BETA2, sorted((*BETA2S, BETA2))):
            own = [t for t in outcomes if (t.strategy, t.lr, t.beta2) == (strategy, best, beta2)]
            beta2s.append(row_of(outcomes, own) | {"million": million})
    return {"rows": rows, "beta2s": beta2s}


def loss(outcomes: Outcomes, trial: Trial) -> float:
    """The loss after the last step."""
    return outcomes[trial]["validation"] or 0.0


def row_of(outcomes: Outcomes, own: list[Trial]) -> Row:
    """Means over the seeds of one size, strategy, rate and beta2."""
    row: Row = {"strategy": own[0].strategy, "lr": own[0].lr, "beta2": own[0].beta2}
    row["validation"], row["validation_half"] = mean_of([loss(outcomes, t) for t in own])
    row["gap"], row["gap_half"] = mean_of([gap(outcomes, t, REFERENCE) for t in own])
    for figure in FIGURES:
        row[figure] = mean_of([outcomes[t][figure] or 0.0 for t in own])[0]
    return row


def draw(found: dict[str, Any], path: Path) -> None:
    """The gap, the EDQ ratio and the lost share by size, at the best rate and a third of it."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    panels = figure.subplots(len(SHARES), 3, squeeze=False)
    titles = {"gap": "loss less that of master weights", "ratio": "EDQ ratio", "lost": "lost"}
    millions = [count_parameters(shape) / 1e6 for shape in SHAPES]
    for row, share, of_share in zip(
        panels, SHARES, ("the best rate", "a third of it"), strict=True
    ):
        for axes, (name, title) in zip(row, titles.items(), strict=True):
            for i, strategy in enumerate(STRATEGIES[1:]):
                own = [r for r in found["rows"] if (r["strategy"], r["share"]) == (strategy, share)]
                bars = [r["gap_half"] or 0.0 for r in own] if name == "gap" else None
                axes.errorbar(
                    # Side by side: most of them are at the same height.
                    [r["million"] * SIDE ** (i - len(STRATEGIES) / 2 + 1) for r in own],
                    [r[name] for r in own],
                    bars,
                    label=strategy,
                    **LINES[strategy] | {"capsize": 3, "markersize": 6, "linewidth": 1},
                )
            axes.axhline(float(name == "ratio"), color="#BBBBBB", zorder=0)
            dress(axes, f"{title}, {of_share}", "million parameters")
            axes.set_xscale("log")
            axes.set_xticks(millions, [f"{x:.2g}" for x in millions])
            axes.set_xticks([], minor=True)
            axes.set_xlim(millions[0] / 1.6, millions[-1] * 1.6)
        row[0].yaxis.set_major_formatter("{x:g}")
        row[1].set_ylim(0, 1.1)
        row[2].set_ylim(-0.03, 1.03)
        row[2].yaxis.set_major_formatter(PercentFormatter(1.0))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)
