"""A training run in words: what decides it, and what came of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

EVALUATIONS = 10


@dataclass(frozen=True)
class Run:
    """All that decides what one training comes to, the text aside."""

    strategy: str
    steps: int
    lr: float
    beta2: float
    batch_size: int
    device: str
    seed: int
    optimizer: str = "adamw"
    path: str = "fused"
    parallel: str = "ddp"
    evaluations: int = EVALUATIONS


@dataclass
class Result:
    """What one run came to; losses are in nats per byte."""

    training: list[float] = field(default_factory=list)  # one loss a step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    accuracy: list[tuple[int, float]] = field(default_factory=list)  # (step, share), if any
    edq: list[Mapping[str, Any]] = field(default_factory=list)  # readings of the whole model
    witness: Mapping[str, float] = field(default_factory=dict)  # against float64, if asked for
    changes: list[Mapping[str, Any]] = field(default_factory=list)  # of formats, by the steps
    bytes_per_parameter: float = math.nan
    seconds_per_step: float = math.nan

    @property
    def final(self) -> float:
        """The validation loss after the last step."""
        return self.validation[-1][1]

    def late(self, figure: str) -> float | None:
        """The mean of one figure of the meter over the last quarter of its samples."""
        return mean(reading[figure] for reading in last_quarter(self.edq))


def last_quarter(samples: list[Any]) -> list[Any]:
    """The last quarter of `samples`, and one at least."""
    return samples[3 * len(samples) // 4 :]


def mean(values: Iterator[float | None]) -> float | None:
    """The mean of those that are numbers, or None."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None
