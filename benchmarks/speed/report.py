"""The figures of the steps as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

Record = dict[str, Any]

# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = {"PyTorch": "#999999", "mcftensor": "#009E73"}
PEER = "#56B4E9"


def table(name: str, workload: Record) -> Table:
    """One workload, a contender a row."""
    screen = Table(
        title=f"{name}: {workload['parameters']:,} parameters in {workload['tensors']:,} tensors; "
        f"memory moves {workload['bytes_a_second'] / 1e9:.1f} GB/s",
        caption="Milliseconds: median and quartiles. Ratio: median over rounds of the time over "
        "that of the master weights in the same round. Bytes for each parameter: moved is what a "
        "step must read and write, added what stays beside bf16 parameter and gradient, extra the "
        "peak of a step above what stays. Limit: the time in which memory moves these bytes, over "
        "the time taken (on a GPU, with a full queue).",
    )
    screen.add_column("contender")
    queued = any(row.get("seconds_queued") for row in workload["contenders"].values())
    columns = ["ms", "quartiles", *(["ms, queued"] if queued else []), "ratio", "limit"]
    for column in [*columns, "first, s", "moved", "added", "extra"]:
        screen.add_column(column, justify="right")
    for contender, row in workload["contenders"].items():
        if "failed" in row:
            screen.add_row(contender, "failed", style="dim")
            continue
        low, high = row["seconds_quartiles"]
        screen.add_row(
            contender,
            milliseconds(row["seconds"]),
            f"{milliseconds(low)}–{milliseconds(high)}",
            *([milliseconds(row["seconds_queued"])] if queued else []),
            "—" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{100 * row['share_of_limit']:.0f} %",
            f"{row['first_step_seconds']:.2f}",
            *(f"{row[key]:.2f}" for key in ("bytes_moved", "bytes_added", "extra_peak_bytes")),
        )
    return screen


def failures(workload: Record) -> list[str]:
    """What did not run and why, a line each."""
    rows = workload["contenders"].items()
    return [f"{name}: {row['failed']}" for name, row in rows if "failed" in row]


def milliseconds(seconds: float) -> str:
    """Three digits of a time."""
    value = 1e3 * seconds
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def write(path: Path, record: Record) -> None:
    """Write the record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def draw(path: Path, record: Record) -> None:
    """Draw the ratios, one panel a workload, with their quartiles."""
    workloads = record["workloads"]
    names = list(dict.fromkeys(name for w in workloads.values() for name in w["contenders"]))
    figure = Figure(figsize=(4 + 4 * len(workloads), 1.5 + 0.24 * len(names)), layout="constrained")
    machine = record["machine"]
    where = machine["device"] if machine["device"] != "cpu" else machine["cpu"]
    figure.suptitle(f"Time of a step over that of fused fp32 master weights; {where}")
    panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
    for axes, (title, workload) in zip(panels, workloads.items(), strict=True):
        for place, name in enumerate(names):
            row = workload["contenders"].get(name)
            if row is None or row.get("ratio") is None:
                axes.text(1.02, place, "did not run", va="center", fontsize=7, color="#999999")
                continue
            low, high = row["ratio_quartiles"]
            error = [[row["ratio"] - low], [high - row["ratio"]]]
            colour = COLOURS.get(row["family"], PEER)
            axes.barh(place, row["ratio"], xerr=error, color=colour, ecolor="#444444")
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=1)
        axes.set(title=f"{title}, {workload['parameters']:,}", xlabel="times")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
