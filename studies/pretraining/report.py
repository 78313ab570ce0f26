"""What a run leaves behind: a table on the screen, `results.json` and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.table import Table

from pretraining.run import Result
from pretraining.strategies import WITHOUT_TAILS

REFERENCE = "master"
COLUMNS = 4

# Okabe and Ito's colours, which stay apart for colour-blind readers. Lines become narrower from
# one to the next, so that those that coincide are all seen; the reference is a wide grey band.
LINES: dict[str, dict[str, Any]] = {
    "master": {"color": "#BBBBBB", "linewidth": 6},
    "bf16": {"color": "#D55E00", "marker": "o", "markersize": 4},
    "light": {"color": "#56B4E9", "marker": "s", "markersize": 6, "linewidth": 3},
    "plus": {"color": "#009E73", "marker": "^", "markersize": 4},
    "full": {"color": "#000000", "marker": ".", "markersize": 3, "linestyle": "--", "linewidth": 1},
    "exact": {"color": "#E69F00", "marker": "x", "markersize": 7, "linestyle": ""},
    "tail8": {"color": "#CC79A7", "marker": "v", "markersize": 4, "linewidth": 1},
    "round": {"color": "#0072B2", "marker": "D", "markersize": 3, "linewidth": 1},
    "compact": {"color": "#8C564B", "marker": "P", "markersize": 4, "linewidth": 1},
    "compact4": {"color": "#44AA99", "marker": "p", "markersize": 4, "linewidth": 1},
    "released": {"color": "#F0E442", "marker": "*", "markersize": 4, "linewidth": 1},
    "half16": {"color": "#7F3C8D", "marker": "<", "markersize": 4, "linewidth": 1},
    "half8": {"color": "#117733", "marker": ">", "markersize": 4, "linewidth": 1},
}

# How leading terms alone are drawn, over what the strategy has otherwise.
LEADING: dict[str, Any] = {"marker": "", "linestyle": ":"}

# What the witness in float64 finds, and digits of it.
WITNESSED = {
    "error of displacement, matrices": ("displacement_matrices", 6),
    "error of displacement, vectors": ("displacement_vectors", 6),
    "second moment over exact": ("second_moment", 4),
    "largest update over rate": ("largest_run", 3),
    "    exact": ("largest_exact", 3),
}

Results = dict[str, Result]


def difference(results: Results, strategy: str) -> float | None:
    """Final loss less that of the master weights, or None where they were not trained."""
    reference = results.get(REFERENCE)
    return None if reference is None else results[strategy].final - reference.final


def in_one_line(results: Results, seconds: float) -> str:
    """What came out, and how long all of it took."""
    took = f"{len(results)} trainings took {seconds / 60:.1f} minutes"
    others = {name: difference(results, name) for name in results if name != REFERENCE}
    off = {name: x for name, x in others.items() if x is not None}
    if not off:
        best = min(results, key=lambda name: results[name].final)
        return f"Lowest validation loss: {results[best].final:.4f}, {best}; {took}"
    parts = [f"bf16 {off.pop('bf16'):+.4f}"] if "bf16" in off else []
    if off:
        low, high = min(off.values()), max(off.values())
        parts.append(f"{', '.join(off)} {low:+.4f} to {high:+.4f}")
    return (
        f"Validation loss, less the {results[REFERENCE].final:.4f} of master weights: "
        f"{'; '.join(parts)}. {took}"
    )


def tables(results: Results, title: str) -> list[Table]:
    """The final numbers, in tables that a screen of 80 columns holds."""
    names = list(results)
    found = [table(results, title, names[i : i + COLUMNS]) for i in range(0, len(names), COLUMNS)]
    found[-1].caption = (
        "EDQ ratio: the share of the intended updates that weights took. Lost: elements "
        "that were to move and did not. Both are means over the last quarter of the samples. "
        "Leading terms: the 16-bit weights that the model computes with. Bytes: measured, with "
        "gradients, on one process."
    )
    return found


def table(results: Results, title: str, names: Sequence[str] | None = None) -> Table:
    """The final numbers of some strategies, or all, one a column."""
    names = list(names or results)
    screen = Table(title=title)
    screen.add_column()
    for strategy in names:
        screen.add_column(strategy, justify="right")

    def row(name: str, cell: Callable[[str], str]) -> None:
        screen.add_row(name, *map(cell, names))

    def witnessed(figure: str, digits: int, strategy: str) -> str:
        return decimal(results[strategy].witness.get(figure), digits)

    def gap(strategy: str) -> str:
        value = difference(results, strategy)
        return "—" if value is None or strategy == REFERENCE else f"{value:+.4f}"

    row("validation, nats per byte", lambda s: f"{results[s].final:.4f}")
    row("validation, bits per byte", lambda s: f"{results[s].final / math.log(2):.4f}")
    row("difference to master, nats", gap)
    screen.add_section()
    row("EDQ ratio", lambda s: decimal(results[s].late("ratio")))
    row("    of leading terms", lambda s: decimal(results[s].late("ratio_leading")))
    row("updates lost", lambda s: percent(results[s].late("lost")))
    row("    by leading terms", lambda s: percent(results[s].late("lost_leading")))
    if any(results[s].witness for s in results):
        screen.add_section()
        for name, (figure, digits) in WITNESSED.items():
            row(name, partial(witnessed, figure, digits))
    screen.add_section()
    row("bytes per parameter", lambda s: f"{results[s].bytes_per_parameter:.2f}")
    row("seconds per step", lambda s: f"{results[s].seconds_per_step:.3f}")
    return screen


def decimal(value: float | None, digits: int = 4) -> str:
    """A ratio as text."""
    return "—" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as text: 27.3 %, 0.041 %, or < 0.001 %."""
    if value is None:
        return "—"
    if 0 < value < 1e-5:
        return "< 0.001 %"
    return f"{100 * value:.1f} %" if value >= 1e-3 or value == 0 else f"{100 * value:.3f} %"


def write_json(path: Path, results: Results, **context: Any) -> None:
    """Write the results and their `context` (settings, machine)."""
    strategies = {
        name: asdict(result)
        | {
            "final": {
                "nats": result.final,
                "bits_per_byte": result.final / math.log(2),
                "difference_to_master": difference(results, name),
                "edq_ratio": result.late("ratio"),
                "edq_ratio_leading": result.late("ratio_leading"),
                "lost": result.late("lost"),
                "lost_leading": result.late("lost_leading"),
            }
        }
        for name, result in results.items()
    }
    write_record(path, context | {"strategies": strategies})


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON; what is not finite is null."""
    text = json.dumps(finite(record), indent=2, allow_nan=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: Path, results: Results, title: str) -> None:
    """Draw the validation losses, their differences to the master weights, and EDQ below."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    has_reference = REFERENCE in results
    panels = figure.subplot_mosaic(
        [["loss", "difference" if has_reference else "loss"], ["ratio", "lost"]]
    )
    draw_losses(panels["loss"], results, {})
    dress(panels["loss"], "Validation loss", "nats per byte")
    panels["loss"].legend(frameon=False)
    if has_reference:
        draw_losses(panels["difference"], results, dict(results[REFERENCE].validation))
        dress(panels["difference"], "Difference to master weights", "nats per byte")
    draw_readings(panels["ratio"], results, "ratio")
    dress(panels["ratio"], "EDQ ratio: 1 where weights move as intended", "")
    limit_ratios(panels["ratio"])
    draw_readings(panels["lost"], results, "lost")
    dress(panels["lost"], "Elements whose update is lost", "")
    panels["lost"].yaxis.set_major_formatter(PercentFormatter(1.0))
    panels["lost"].set_ylim(-0.03, 1.03)
    if any(strategy not in WITHOUT_TAILS for strategy in results):
        explain_leading(panels["lost"])
    figure.savefig(path, dpi=150)


def draw_losses(axes: Axes, results: Results, baseline: dict[int, float]) -> None:
    """Validation losses over the steps, less the `baseline` at each."""
    for strategy, result in results.items():
        # The loss before the first step is that of a guess, and would flatten the rest.
        points = [(step, loss - baseline.get(step, 0.0)) for step, loss in result.validation[1:]]
        axes.plot(*zip(*points, strict=True), label=strategy, **LINES.get(strategy, {}))


def draw_readings(axes: Axes, results: Results, figure: str) -> None:
    """One figure of the meter over the steps, for leading terms alone dotted."""
    for strategy, result in results.items():
        axes.plot(*curve(result, figure), **LINES.get(strategy, {}))
        if strategy not in WITHOUT_TAILS:
            axes.plot(*curve(result, f"{figure}_leading"), **LINES[strategy] | LEADING)


def curve(result: Result, figure: str) -> tuple[list[int], list[float]]:
    """One figure of the meter over the steps, as coordinates."""
    values = [math.nan if reading[figure] is None else reading[figure] for reading in result.edq]
    return [reading["step"] for reading in result.edq], values


def limit_ratios(axes: Axes) -> None:
    """Show 0 to 1 at least; the ratio of few leading terms that jump can be far outside."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(-0.03, max(low, -0.5)), max(1.1, min(high, 1.5)))


def explain_leading(axes: Axes) -> None:
    """Say in a legend what dotted lines are."""
    axes.plot([], [], color="black", label="leading terms alone", **LEADING)
    axes.legend(frameon=False)


def dress(axes: Axes, heading: str, unit: str) -> None:
    """What all panels over the steps have in common."""
    axes.set(title=heading, xlabel="step", ylabel=unit)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
