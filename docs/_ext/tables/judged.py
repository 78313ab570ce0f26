"""Tables of what tests of other libraries find."""

from __future__ import annotations

import statistics
from typing import Any

from tables.sources import load, table

SUITES = {"herbie": "Herbie", "FPBench": "FPBench"}


def _suites() -> dict[str, Any]:
    suites: dict[str, Any] = load("judged")["suites"]
    return suites


def judged_formulas() -> str:
    """Bits that are right, by suite and kind of numbers."""
    rows = []
    for suite, shown in SUITES.items():
        if suite not in _suites():
            continue
        judged = [x["right"] for x in _suites()[suite]["found"] if "right" in x]
        for kind in ("float32", "float64", "bf16x2", "fp32x2", "fp64x2"):
            found = [right[kind] for right in judged if kind in right]
            means = [mean for mean, _, _ in found]
            full = max(means)
            rows.append(
                (
                    f"{shown}, `{kind}`",
                    str(len(found)),
                    f"{statistics.fmean(means):.1f} of {full:.0f}",
                    str(sum(full - mean < 1 for mean in means)),
                    str(sum(mean < full / 2 for mean in means)),
                )
            )
    head = (
        "", "formulas", "bits that are right", "formulas that lose less than one",
        "more than half",
    )  # fmt: skip
    return table(head, rows)
