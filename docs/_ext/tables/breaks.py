"""Tables of the pages "Where it breaks", "Long runs" and the measurements of fine-tuning."""

from __future__ import annotations

from typing import Any

from tables.findings import rate
from tables.sources import load, machine, percent, signed, table

Row = dict[str, Any]


def number(x: float | None) -> str:
    """Three digits, or a dash."""
    if x is None:
        return "–"
    return f"{x:.2g}" if 0 < abs(x) < 1e-2 or abs(x) >= 1e4 else f"{x:.3f}"


def told(row: Row) -> str:
    """The classes of warnings, with the meter's alarm on."""
    kinds = sorted({f"`{text.partition(':')[0]}`" for text in row["warnings"]})
    return ", ".join(kinds) or "none"


NAMES = {
    "moments": ("second moments in float16", "zeros in v; movements of 100 learning rates", 2),
    "tails": ("tails of float16", "lost updates", 3),
    "beta2": ("1 − beta2 below the format", "ratio and lost share of v", 1),
    "large": ("weights of 1e4, updates of 1e-6", "lost updates of that parameter", 3),
    "clipping": ("clipping before unscaling", "‖Δ‖ is 0; the ratio is None, or 1", 2),
    "sums": ("gradients summed in bf16", "none: the loss is before the step", 1),
    "rate": ("a learning rate in bf16", "none: ‖Δ‖ does not shrink", 1),
    "end": ("the end of a schedule", "ratio of the last samples", 1),
    "outlier": ("one gradient of 1e9 in a block", "raised blocks", 2),
    "strides": ("balanced rounding, periodic updates", "none", 3),
}
"""What the page calls a condition, its signature, and the place of the cure among its rows."""


def breaks_summary() -> str:
    """A row for each condition: how far off, who says so, and how far off with the cure."""
    conditions = load("findings-breaks")["conditions"]
    rows = []
    for name, (called, signature, cure) in NAMES.items():
        broken, cured = conditions[name][_broken(name)], conditions[name][cure]
        rows.append(
            (
                called,
                signature,
                told(broken),
                number(broken["error"]),
                f"{number(cured['error'])}: {cured['way']}",
            )
        )
    head = (
        "condition",
        "signature in the meter",
        "warning",
        "error of the movement",
        "with a cure",
    )
    return table(head, rows) + "\n\n" + machine(load("findings-breaks"))


def _broken(name: str) -> int:
    return {"tails": 1, "large": 2}.get(name, 0)


# --------------------------------------------------------------------------------------- long runs


def long_runs() -> str:
    """Distances and losses at the end, by schedule and strategy."""
    result = load("findings-long")
    rows = []
    for row in result["rows"]:
        exact = row["strategy"] == "float64"
        if row["strategy"] in ("disturbed", "float32", "full", "tail8"):
            continue
        twin = row.get("twin")
        moment = row.get("second_moment")
        rows.append(
            (
                f"{row['schedule']}, {row['strategy']}",
                number(twin[-1]) if twin else "–",
                "–" if exact else number(row["own"][-1]),
                f"{row['validation'][-1]:.4f}" if exact else signed(row["gap"]),
                number(row.get("ratio")),
                number(moment[-1]) if moment else "–",
            )
        )
    head = (
        "", "from the twin", "from the run of float64", "nats, and from float64", "EDQ ratio",
        "v over exact",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


# ------------------------------------------------------------------------------------- fine-tuning


MIDDLE = 6e-6
"""The rate between the others, whose rows are like theirs."""


def tuning() -> str:
    """What was said beforehand, and what came of it."""
    result = load("findings-tuning")
    rows = [
        (
            f"{row['way']}, {row['strategy']}, lr {rate(row['lr'])}",
            percent(row["small"]) if row["strategy"] == "bf16" else "–",
            number(row["ratio_first"]),
            number(row["made"]),
            percent(row["gain"]),
        )
        for row in result["rows"]
        if row["strategy"] != "master" and row["lr"] != MIDDLE
    ]
    head = (
        "", "weights too large for the rate", "EDQ ratio, first 20 steps", "movement made",
        "gain in loss",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)
