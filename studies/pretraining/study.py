"""The answers of `edq_study.py`: figures of the meter by run and by layer, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

import mcftensor as mcf
from pretraining.report import (
    LEADING,
    LINES,
    curve,
    decimal,
    draw_readings,
    dress,
    explain_leading,
    limit_ratios,
    percent,
)
from pretraining.run import Result, Run, last_quarter, mean
from pretraining.strategies import WITHOUT_TAILS

FIGURES = ("ratio", "lost", "ratio_leading", "lost_leading", "update_norm")
Row = dict[str, Any]


@dataclass
class Measured:
    """One run, what it came to, and what each parameter lost in it."""

    run: Run
    result: Result = field(default_factory=Result)
    parameters: list[Mapping[str, Mapping[str, Any]]] = field(default_factory=list)  # by sample

    def watch(self, meter: mcf.EDQ) -> None:
        """Keep the readings of each parameter."""
        self.parameters.append(meter.per_parameter)

    def summary(self) -> Row:
        """The run in one row; figures of the meter are means over the last quarter."""
        return {
            "strategy": self.run.strategy,
            "lr": self.run.lr,
            "beta2": self.run.beta2,
            "final_nats": self.result.final,
            **{name: self.result.late(name) for name in FIGURES},
        }

    def record(self) -> Row:
        """The run for the JSON file."""
        return {
            **asdict(self.run),
            "validation": self.result.validation,
            "bytes_per_parameter": self.result.bytes_per_parameter,
            "seconds_per_step": self.result.seconds_per_step,
            "edq": self.result.edq,
            "parameters": {
                name: self.of_parameters([name]) for name in (self.parameters or [{}])[-1]
            },
        }

    def of_parameters(self, names: Iterable[str]) -> Row:
        """Figures of some parameters together, means over the last quarter."""
        names = list(names)
        samples = [
            combined([sample[name] for name in names]) for sample in last_quarter(self.parameters)
        ]
        return {
            name: samples[-1][name] if name == "numel" else mean(s[name] for s in samples)
            for name in (*FIGURES, "numel")
        }


def combined(readings: Iterable[Mapping[str, Any]]) -> Row:
    """One reading of several parameters.

    The ratio is that of their joint update. Shares of lost elements are means over all elements,
    as nearly all of them are meant to move.
    """
    readings = list(readings)
    squares = [r["update_norm"] ** 2 for r in readings]
    sizes = [r["numel"] for r in readings]
    return {
        "ratio": weighted([r["ratio"] for r in readings], squares),
        "lost": weighted([r["lost"] for r in readings], sizes),
        "ratio_leading": weighted([r["ratio_leading"] for r in readings], squares),
        "lost_leading": weighted([r["lost_leading"] for r in readings], sizes),
        "update_norm": math.sqrt(math.fsum(squares)),
        "numel": sum(sizes),
    }


def weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The mean of those values that are numbers, or None."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    total = math.fsum(w for _, w in pairs)
    return math.fsum(v * w for v, w in pairs) / total if total else None


# ------------------------------------------------------------------------------------------ layers

# What the parts of a parameter's name say about its kind. Gains start at 1.0 and biases at 0.0,
# and so they lose quite different shares of their updates.
KINDS = {
    "norm gains": lambda name: "norm" in name and name.endswith("weight"),
    "norm biases": lambda name: "norm" in name and name.endswith("bias"),
    "embeddings": lambda name: name.startswith(("tokens.", "positions.")),
    "attention": lambda name: ".qkv." in name or ".attention_out." in name,
    "MLP": lambda name: ".up." in name or ".down." in name,
}


def by_kind(runs: Sequence[Measured]) -> list[Row]:
    """What each kind of layer lost in each run."""
    rows = []
    for kind, belongs in KINDS.items():
        for one in runs:
            names = [name for name in one.parameters[-1] if belongs(name)]
            rows.append({"kind": kind, "strategy": one.run.strategy, **one.of_parameters(names)})
    return rows


def by_parameter(runs: Sequence[Measured]) -> list[Row]:
    """What each run lost of each parameter, those of which the first run loses most first.

    Between equal shares the lower ratio comes first.
    """
    rows = [
        {
            "parameter": name,
            "numel": runs[0].parameters[-1][name]["numel"],
            **{one.run.strategy: one.of_parameters([name]) for one in runs},
        }
        for name in runs[0].parameters[-1]
    ]
    first = runs[0].run.strategy
    rows.sort(key=lambda row: (-(row[first]["lost"] or 0), row[first]["ratio"] or 0))
    return rows


# ------------------------------------------------------------------------------------------ tables

CAPTION = (
    "Means over the last quarter of the samples. Leading: of leading terms alone. Lost: elements "
    "that were to move and did not. ‖Δ‖: length of the intended update."
)


def screen(title: str, columns: Sequence[str], caption: str = CAPTION) -> Table:
    """An empty table whose columns, the first aside, hold numbers."""
    table = Table(title=title, caption=caption)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Ratios and lost shares, of whole weights and of leading terms."""
    return (
        decimal(row["ratio"], 5),
        percent(row["lost"]),
        decimal(row["ratio_leading"]),
        percent(row["lost_leading"]),
    )


CELLS = ("EDQ\nratio", "\nlost", "leading\nratio", "leading\nlost")


def table(rows: Sequence[Row], title: str, key: str | None = None) -> Table:
    """Summaries of runs, in sections of one value of `key`."""
    keys = [key] if key else []
    filled = screen(title, ["strategy", *keys, *CELLS, "\n‖Δ‖", "final\nnats"])
    for i, row in enumerate(rows):
        if key and i and rows[i - 1][key] != row[key]:
            filled.add_section()
        norm = row["update_norm"]
        filled.add_row(
            row["strategy"],
            *(f"{row[name]:g}" for name in keys),
            *cells(row),
            "—" if norm is None else f"{norm:.3g}",
            f"{row['final_nats']:.4f}",
        )
    return filled


def kinds_table(rows: Sequence[Row]) -> Table:
    """What each kind of layer lost."""
    filled = screen("What kinds of layers lose", ["layers", "strategy", "elements", *CELLS])
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1]["kind"] != row["kind"]
        if first and i:
            filled.add_section()
        kind, numel = (row["kind"], f"{row['numel']:,}") if first else ("", "")
        filled.add_row(kind, row["strategy"], numel, *cells(row))
    return filled


def top_table(rows: Sequence[Row]) -> Table:
    """The parameters of which most is lost."""
    strategies = [name for name in rows[0] if name in LINES]
    plain = [name for name in strategies if name in WITHOUT_TAILS]
    expansions = [name for name in strategies if name not in WITHOUT_TAILS]
    filled = screen(
        f"The {len(rows)} parameters of which {strategies[0]} loses most",
        [
            "parameter",
            "elements",
            *(column for name in plain for column in (f"{name}\nratio", f"{name}\nlost")),
            *(f"{name},\nleading\nlost" for name in expansions),
        ],
    )
    for row in rows:
        filled.add_row(
            row["parameter"],
            f"{row['numel']:,}",
            *(t for s in plain for t in (decimal(row[s]["ratio"]), percent(row[s]["lost"]))),
            *(percent(row[s]["lost_leading"]) for s in expansions),
        )
    return filled


# ---------------------------------------------------------------------------------------- pictures


def draw_strategies(path: Path, runs: Sequence[Measured], title: str) -> None:
    """EDQ of every strategy over the steps, with logarithmic scales at the right."""
    results = {one.run.strategy: one.result for one in runs}
    figure, ((ratio, distance), (lost, lost_log)) = grid(title)
    draw_readings(ratio, results, "ratio")
    dress(ratio, "EDQ ratio: 1 where weights move as intended", "")
    limit_ratios(ratio)
    for strategy, result in results.items():
        steps, ratios = curve(result, "ratio")
        distance.plot(steps, [abs(1 - r) for r in ratios], label=strategy, **LINES[strategy])
        # Nothing lost is a gap: it has no place on a logarithmic scale.
        values = [value or math.nan for value in curve(result, "lost")[1]]
        lost_log.plot(steps, values, **LINES[strategy])
    dress(distance, "How far the ratio is from 1", "|1 − ratio|")
    draw_readings(lost, results, "lost")
    dress(lost, "Elements whose update is lost", "")
    shares(lost)
    dress(lost_log, "Elements whose update is lost, logarithmic", "")
    for axes in (distance, lost_log):
        axes.set_yscale("log")
    distance.plot([], [], color="black", label="leading terms alone", **LEADING)
    handles, labels = distance.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)


def draw_beta2(path: Path, rows: Sequence[Row], title: str) -> None:
    """Loss and EDQ over beta2."""
    figure, ((loss, distance), (leading, norm)) = grid(title)
    # Ranges wide enough that differences of no importance look like it.
    for axes, value, heading, span in (
        (loss, lambda row: row["final_nats"], "Final validation loss, nats per byte", 0.02),
        (distance, lambda row: distance_from_1(row["ratio"]), "How far the EDQ ratio is from 1", 0),
        (leading, lambda row: row["ratio_leading"], "EDQ ratio of leading terms alone", 0.2),
        (norm, lambda row: row["update_norm"], "Length of the intended update, ‖Δ‖", 0),
    ):
        for strategy, chosen in by_strategy(rows).items():
            points = [f"{row['beta2']:g}" for row in chosen]
            axes.plot(points, numbers(map(value, chosen)), label=strategy, **LINES[strategy])
        dress_plain(axes, heading, "beta2")
        axes.ticklabel_format(axis="y", useOffset=False)
        low, high = axes.get_ylim()
        spare = max(0, span - (high - low)) / 2
        axes.set_ylim(low - spare, high + spare)
    norm.set_ylim(0, 1.15 * norm.get_ylim()[1])
    distance.set_yscale("log")
    distance.set_ylim(1e-7, 1)
    loss.legend(frameon=False)
    figure.savefig(path, dpi=150)


def draw_rates(path: Path, rows: Sequence[Row], title: str) -> None:
    """Loss and EDQ over the peak learning rate."""
    figure, ((ratio, lost), (loss, gap)) = grid(title)
    best = {row["lr"]: row["final_nats"] for row in rows if row["strategy"] == "plus"}
    for strategy, chosen in by_strategy(rows).items():
        rates = [row["lr"] for row in chosen]
        for axes, name in ((ratio, "ratio"), (lost, "lost")):
            values = numbers(row[name] for row in chosen)
            axes.plot(rates, values, **LINES[strategy])
            if strategy not in WITHOUT_TAILS:
                values = numbers(row[f"{name}_leading"] for row in chosen)
                axes.plot(rates, values, **LINES[strategy] | LEADING)
        finals = [row["final_nats"] for row in chosen]
        gaps = [row["final_nats"] - best[row["lr"]] for row in chosen]
        loss.plot(rates, finals, label=strategy, **LINES[strategy])
        gap.plot(rates, gaps, **LINES[strategy])
    for axes, heading in (
        (ratio, "EDQ ratio: 1 where weights move as intended"),
        (lost, "Elements whose update is lost"),
        (loss, "Final validation loss, nats per byte"),
        (gap, "Difference of the final loss to plus"),
    ):
        axes.set_xscale("log")
        dress_plain(axes, heading, "peak learning rate")
    limit_ratios(ratio)
    shares(lost)
    loss.legend(frameon=False)
    explain_leading(lost)
    figure.savefig(path, dpi=150)


def draw_layers(
    path: Path,
    runs: Sequence[Measured],
    kinds: Sequence[Row],
    parameters: Sequence[Row],
    title: str,
) -> None:
    """Bars for each kind of layer, and dots for each matrix."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    figure.suptitle(title)
    # Apart, so that long names below do not narrow what is above.
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[4, 5])[:, 0]
    left, right = upper.subplots(1, 2)
    below = lower.subplots()
    series = [
        (one.run.strategy, suffix)
        for suffix in ("", "_leading")
        for one in runs
        if not (suffix and one.run.strategy in WITHOUT_TAILS)
    ]
    series.sort(key=lambda pair: [one.run.strategy for one in runs].index(pair[0]))
    for axes, name in ((left, "lost"), (right, "ratio")):
        for i, (strategy, suffix) in enumerate(series):
            values = [
                row[name + suffix]
                for kind in KINDS
                for row in kinds
                if row["kind"] == kind and row["strategy"] == strategy
            ]
            places = [k + (i - (len(series) - 1) / 2) * 0.16 for k in range(len(KINDS))]
            axes.bar(places, numbers(values), width=0.15, **bar(strategy, suffix))
        axes.set_xticks(range(len(KINDS)), [kind.replace(" ", "\n") for kind in KINDS])
    dress_plain(left, "Elements whose update is lost", "")
    dress_plain(right, "EDQ ratio: 1 where weights move as intended", "")
    shares(left)
    left.set_ylim(bottom=0)
    right.axhline(1, color="#BBBBBB", zorder=0)
    for axes in (left, right):
        axes.grid(visible=False, axis="x")
    handles, labels = left.get_legend_handles_labels()
    upper.legend(handles, labels, loc="outside lower center", ncols=len(series), frameon=False)
    # All norm gains are alike, and so would be the parameters at the top.
    matrices = [row for row in parameters if "norm" not in row["parameter"]]
    for strategy, suffix in series:
        values = numbers(row[strategy]["lost" + suffix] for row in matrices)
        below.plot(values, range(len(matrices)), **dot(strategy, suffix))
    names = [f"{row['parameter']} ({row['numel']:,})" for row in matrices]
    below.set_yticks(range(len(matrices)), names)
    below.invert_yaxis()
    dress_plain(below, "Elements lost of each matrix; hollow: by leading terms", "")
    below.xaxis.set_major_formatter(PercentFormatter(1.0))
    below.set_xlim(-0.03, 1.03)
    figure.savefig(path, dpi=150)


def grid(title: str) -> tuple[Figure, Any]:
    """A figure of two by two panels."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(2, 2)


def bar(strategy: str, suffix: str) -> dict[str, Any]:
    """How bars of a strategy look: hatched for leading terms alone."""
    colour = LINES[strategy]["color"]
    if suffix:
        label = f"{strategy}, leading terms"
        return {"label": label, "color": "white", "edgecolor": colour, "hatch": "////"}
    return {"label": strategy, "color": colour, "edgecolor": colour}


def dot(strategy: str, suffix: str) -> dict[str, Any]:
    """How dots of a strategy look: hollow for leading terms alone."""
    style = {name: LINES[strategy][name] for name in ("color", "marker")}
    hollow = {"markerfacecolor": "none"} if suffix else {}
    return style | hollow | {"linestyle": "", "markersize": 8}


def by_strategy(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each strategy, in the order of the rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["strategy"], []).append(row)
    return found


def distance_from_1(ratio: float | None) -> float | None:
    """|1 − ratio|, or None where there is no ratio."""
    return None if ratio is None else abs(1 - ratio)


def numbers(values: Iterable[float | None]) -> list[float]:
    """Coordinates: what is no number is drawn as a gap."""
    return [math.nan if value is None else value for value in values]


def shares(axes: Axes) -> None:
    """A y-axis from 0 to 100 %."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(-0.03, 1.03)


def dress_plain(axes: Axes, heading: str, label: str) -> None:
    """What panels not over the steps have in common."""
    axes.set(title=heading, xlabel=label)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
