"""What a run leaves behind: a table on the screen, `results.json` and a picture."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

REFERENCE = "master"

# Okabe and Ito's colours, which stay apart for colour-blind readers. The reference is a wide grey
# band, so that what coincides with it does not hide it.
LINES: dict[str, dict[str, Any]] = {
    "master": {"color": "#BBBBBB", "linewidth": 5},
    "bf16": {"color": "#D55E00", "marker": "o", "markersize": 4},
    "light": {"color": "#56B4E9", "marker": "s", "markersize": 4},
    "plus": {"color": "#009E73", "marker": "^", "markersize": 4},
    "full": {"color": "#000000", "marker": ".", "linestyle": "--", "linewidth": 1},
}


@dataclass
class Result:
    """What one strategy came to; losses are in nats per byte."""

    training: list[float] = field(default_factory=list)  # one loss a step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    bytes_per_parameter: float = math.nan
    seconds_per_step: float = math.nan

    @property
    def final(self) -> float:
        """The validation loss after the last step."""
        return self.validation[-1][1]


Results = dict[str, Result]


class FolderError(Exception):
    """The results cannot be written; the message is one line for the user."""


def make_folder(path: Path) -> None:
    """Create the folder for the results, before the time goes into what it cannot hold."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"cannot write to {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise FolderError(f"cannot write to {path}")


def difference(results: Results, strategy: str) -> float | None:
    """Final loss less that of the master weights, or None where they were not trained."""
    reference = results.get(REFERENCE)
    return None if reference is None else results[strategy].final - reference.final


def table(results: Results, title: str) -> Table:
    """The final numbers, one strategy a row."""
    screen = Table(title=title, caption="bytes per parameter: measured, gradients included")
    screen.add_column("strategy")
    for column in (
        "validation\nnats",
        "\nbits per byte",
        "difference\nto master",
        "bytes per\nparameter",
        "seconds\nper step",
    ):
        screen.add_column(column, justify="right")
    for strategy, result in results.items():
        gap = difference(results, strategy)
        screen.add_row(
            strategy,
            f"{result.final:.4f}",
            f"{result.final / math.log(2):.4f}",
            "—" if gap is None or strategy == REFERENCE else f"{gap:+.4f}",
            f"{result.bytes_per_parameter:.2f}",
            f"{result.seconds_per_step:.3f}",
        )
    return screen


def write_json(path: Path, results: Results, **context: Any) -> None:
    """Write the results and their `context` (settings, machine); what is not finite is null."""
    strategies = {
        name: asdict(result)
        | {
            "final": {
                "nats": result.final,
                "bits_per_byte": result.final / math.log(2),
                "difference_to_master": difference(results, name),
            }
        }
        for name, result in results.items()
    }
    record = finite(context | {"strategies": strategies})
    text = json.dumps(record, indent=2, allow_nan=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: Path, results: Results, title: str) -> None:
    """Draw the validation losses and, beside them, their differences to the master weights."""
    panels: dict[str, dict[int, float]] = {"Validation loss": {}}  # What to subtract at each step.
    if REFERENCE in results:
        panels["Difference to master weights"] = dict(results[REFERENCE].validation)
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    figure.suptitle(title)
    subplots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (heading, baseline) in zip(subplots, panels.items(), strict=True):
        for strategy, result in results.items():
            # The loss before the first step is that of a guess, and would flatten the rest.
            points = [
                (step, loss - baseline.get(step, 0.0)) for step, loss in result.validation[1:]
            ]
            axes.plot(*zip(*points, strict=True), label=strategy, **LINES[strategy])
        axes.set(title=heading, xlabel="step", ylabel="nats per byte")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    subplots[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
