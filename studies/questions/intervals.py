"""Means, rank correlations, and how far each is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

# Of Student's distribution, the quantile of 97.5 % by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Interval = tuple[float, float]


def mean_of(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of 1 to 10 values, and half the length of its interval of 95 %; of one value None.

    It is Student's, for values that are normal: with three, four times their standard error.
    """
    mean = statistics.fmean(values)
    n = len(values)
    if n < 2:
        return mean, None
    return mean, STUDENT[n - 2] * statistics.stdev(values) / math.sqrt(n)


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Places in order of size, from 1 on; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks; NaN where all of one side are equal."""
    a, b = ranks(x) - (len(x) + 1) / 2, ranks(y) - (len(y) + 1) / 2
    length = math.sqrt((a @ a) * (b @ b))
    return float(a @ b) / length if length else math.nan


def bootstrap(
    x: Sequence[float],
    y: Sequence[float],
    clusters: Sequence[Hashable],
    figure: Callable[[Sequence[float], Sequence[float]], float] = spearman,
    draws: int = 2000,
) -> Interval:
    """The interval of 95 % of a figure of pairs, by drawing whole clusters with replacement.

    Pairs of one cluster have something in common, such as a reference, and do not count as many.
    """
    rng = np.random.default_rng(0)
    names = list(dict.fromkeys(clusters))
    members = [np.array([i for i, c in enumerate(clusters) if c == name]) for name in names]
    left, right = np.asarray(x), np.asarray(y)
    found = []
    for _ in range(draws):
        chosen = np.concatenate([members[i] for i in rng.integers(len(names), size=len(names))])
        value = figure(left[chosen], right[chosen])
        if not math.isnan(value):
            found.append(value)
    low, high = np.quantile(found, [0.025, 0.975]) if found else (math.nan, math.nan)
    return float(low), float(high)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """That of the line nearest to points in squares."""
    return float(np.polyfit(x, y, 1)[0])
