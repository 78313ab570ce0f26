"""What tables of long trainings share: runs beside master weights of the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tables.sources import signed

REFERENCE = "master"


@dataclass(frozen=True)
class Found:
    """One run, and its differences to master weights with the same seed, if these ran."""

    record: dict[str, Any]
    gap: float | None
    right: float | None

    @property
    def result(self) -> dict[str, Any]:
        """What the run came to."""
        found: dict[str, Any] = self.record["result"]
        return found

    @property
    def bytes(self) -> float:
        """Of a parameter."""
        size: float = self.result["bytes_per_parameter"]
        return size


def by_strategy(records: list[dict[str, Any]], order: Sequence[str]) -> dict[str, list[Found]]:
    """The runs of each strategy in this order, by seeds."""
    references = {r["run"]["seed"]: r for r in records if r["run"]["strategy"] == REFERENCE}
    rows: dict[str, list[Found]] = {name: [] for name in order}
    for record in sorted(records, key=lambda r: r["run"]["seed"]):
        other = references.get(record["run"]["seed"])
        differences = [
            final(record, figure) - final(other, figure)
            if other is not None and record["result"].get(figure)
            else None
            for figure in ("validation", "accuracy")
        ]
        rows[record["run"]["strategy"]].append(Found(record, *differences))
    return {name: runs for name, runs in rows.items() if runs}


def final(record: dict[str, Any], figure: str) -> float:
    """What a figure was after the last step."""
    value: float = record["result"][figure][-1][1]
    return value


def late(run: Found, figure: str) -> float | None:
    """A figure of the meter, the mean over the last quarter of its samples."""
    samples = run.result["edq"]
    values = [x[figure] for x in samples[3 * len(samples) // 4 :] if x[figure] is not None]
    return statistics.fmean(values) if values else None


def witnessed(figure: str, digits: str) -> Callable[[Found], str]:
    """A cell of what float64 says."""

    def cell(run: Found) -> str:
        value = run.result["witness"].get(figure)
        return "–" if value is None else f"{value:{digits}}"

    return cell


def mean(runs: list[Found], figure: Callable[[Found], float | None], digits: int) -> str:
    """The mean of a figure, and how far seeds are from each other."""
    values = [x for run in runs if (x := figure(run)) is not None]
    if not values:
        return "–"
    spread = f" ({min(values):+.{digits}f} to {max(values):+.{digits}f})".replace("-", "−")
    return signed(statistics.fmean(values), digits=digits) + (spread if len(values) > 1 else "")
