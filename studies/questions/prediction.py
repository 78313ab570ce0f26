"""Does EDQ predict the final loss? Rank correlations of what meters say with the gap of a run: its
loss less that of master weights of the same learning rate, beta2 and seed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pretraining.report import LINES
from questions import beta2
from questions.intervals import bootstrap, mean_of, spearman
from questions.settings import Row, Settings, brief, dress, gap
from questions.stock import RATES
from questions.trial import Trial

OTHERS = ("exact", "round")  # whose states are float32
BETA2S = (0.999,)
CONTROL = "exact"  # master weights by another name: its gap is noise


def deficit(name: str) -> Any:
    """|1 − ratio| of a meter; 0 of what is not there, as in float32."""
    return lambda x: 0.0 if x[name] is None else abs(1 - x[name])


# What might predict; of each 0 is nothing lost.
PREDICTORS: dict[str, Any] = {
    "|1 − EDQ ratio|": deficit("ratio"),
    "lost": lambda x: x["lost"] or 0.0,
    "|1 − ratio of v|": deficit("second_ratio"),
    "lost of v": lambda x: x["second_lost"] or 0.0,
    "|1 − leading ratio|": deficit("ratio_leading"),
    "|1 − v/exact|": deficit("second_moment"),
    "displacement": lambda x: x["displacement_matrices"],
}


def trials(settings: Settings) -> list[Trial]:
    """Those of the question of beta2, and strategies that have no other states than float32."""
    return [*beta2.trials(settings), *settings.grid(OTHERS, RATES["adamw"], BETA2S)]


def answer(settings: Settings) -> dict[str, Any]:
    """Correlations over all runs and parts of them, and every run in short."""
    wanted = trials(settings)
    outcomes = settings.outcomes(wanted, "prediction")
    runs: list[Row] = [
        {
            "strategy": t.strategy,
            "lr": t.lr,
            "beta2": t.beta2,
            "seed": t.seed,
            "gap": gap(outcomes, t, beta2.REFERENCE),
            **{name: float(predict(outcomes[t])) for name, predict in PREDICTORS.items()},
        }
        for t in wanted
        if t.strategy != beta2.REFERENCE
    ]
    groups = {"all": runs, "without bf16": [r for r in runs if r["strategy"] != "bf16"]}
    for strategy in dict.fromkeys(r["strategy"] for r in runs):
        groups[strategy] = [r for r in runs if r["strategy"] == strategy]
    for lr in RATES["adamw"]:
        own = [r for r in runs if r["lr"] == lr]
        groups[f"lr {brief(lr)}"] = own
        groups[f"bf16, lr {brief(lr)}"] = [r for r in own if r["strategy"] == "bf16"]
    control = [abs(r["gap"]) for r in runs if r["strategy"] == CONTROL]
    return {
        "count": len(wanted),
        "noise": {"mean": mean_of(control[:10])[0], "largest": max(control)} if control else None,
        "correlations": [
            {"group": name, "runs": len(own), **correlations(own)} for name, own in groups.items()
        ],
        "runs": runs,
    }


def correlations(runs: list[Row]) -> Row:
    """Of each predictor with the gap, with intervals over the cells that share master weights."""
    gaps = [r["gap"] for r in runs]
    cells = [(r["lr"], r["beta2"], r["seed"]) for r in runs]
    found: Row = {}
    for name in PREDICTORS:
        values = [r[name] for r in runs]
        rho = spearman(values, gaps)
        if math.isnan(rho):
            found[name] = None
        else:
            found[name] = {"rho": rho, "interval": bootstrap(values, gaps, cells)}
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """A point for each run: what a meter says, and the gap."""
    names = list(PREDICTORS)[:4]
    figure = Figure(figsize=(13, 9), layout="constrained")
    figure.suptitle("What meters say at the end of a run, and its loss less that of master weights")
    for axes, name in zip(figure.subplots(2, 2).flat, names, strict=True):
        for strategy in dict.fromkeys(r["strategy"] for r in found["runs"]):
            own = [r for r in found["runs"] if r["strategy"] == strategy]
            axes.plot(
                [max(r[name], 1e-7) for r in own],
                [r["gap"] for r in own],
                linestyle="",
                marker=LINES[strategy].get("marker", "o"),
                color=LINES[strategy]["color"],
                markersize=5,
                alpha=0.8,
                label=strategy,
            )
        rho = found["correlations"][0][name]
        text = f": rank correlation {rho['rho']:.2f}" if rho else ""
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=0.003)
        axes.axhline(0, color="#BBBBBB", zorder=0)
        dress(axes, name + text, "")
        axes.set_ylabel("nats a byte more than master weights")
        # Its own margins are of a linear scale.
        axes.set_ylim(top=2 * max(0.003, *(r["gap"] for r in found["runs"])))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)
