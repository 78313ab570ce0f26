"""Tables of the pages "Where it breaks", "Long runs" and the measurements of fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables.findings import rate
from tables.sources import load, machine, percent, signed, table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def number(x: float | None) -> str:
    """Three digits, or a dash."""
    if x is None:
        return "–"
    return f"{x:.2g}" if 0 < abs(x) < 1e-2 or abs(x) >= 1e4 else f"{x:.3f}"


def told(row: Row) -> str:
    """The classes of warnings, with the meter's alarm on."""
    kinds = sorted({f"`{text.partition(':')[0]}`" for text in row["warnings"]})
    return ", ".join(kinds) or "none"


def of_state(state: str, figure: str, show: Callable[[float | None], str]) -> Callable[[Row], str]:
    """A figure of the meter of a state."""
    return lambda row: show(row.get(state, {}).get(figure))


ERROR: Column = ("error of the movement", lambda row: number(row["error"]))
MADE: Column = ("movement made", lambda row: number(row["made"]))
RATIO: Column = ("EDQ ratio", lambda row: number(row["ratio"]))
LOST: Column = ("lost", lambda row: percent(row["lost"]))
LARGEST: Column = ("largest movement, in learning rates", lambda row: number(row["largest"]))
ZERO: Column = ("zeros in v", of_state("exp_avg_sq", "zero", percent))
V_RATIO: Column = ("ratio of v", of_state("exp_avg_sq", "ratio", number))
V_LOST: Column = ("lost of v", of_state("exp_avg_sq", "lost", percent))
RAISED: Column = ("raised blocks", lambda row: f"{row['exp_avg_sq']['raised']:.0f}")
TOLD: Column = ("warning", told)


def of(condition: str, *columns: Column) -> str:
    """A row for each training of a condition."""
    rows = load("findings-breaks")["conditions"][condition]
    shown = (ERROR, MADE, RATIO, *columns, TOLD)
    return table(
        ("", *(name for name, _ in shown)),
        [(row["way"], *(show(row) for _, show in shown)) for row in rows],
    )


def breaks_moments() -> str:
    """Second moments below the range of float16."""
    return of("moments", ZERO, LARGEST)


def breaks_tails() -> str:
    """Tails that end at 2^-24."""
    return of("tails", LOST)


def breaks_beta2() -> str:
    """Second moments that cannot decay."""
    return of("beta2", V_RATIO, V_LOST)


def breaks_large() -> str:
    """A gain of 1e4, and what the meter says of it alone."""
    gain: Column = ("of the gain", lambda row: number(row["parameters"]["norm.weight"]["ratio"]))
    return of("large", gain, LOST)


def breaks_clipping() -> str:
    """Scaled gradients that are clipped first."""
    norm: Column = ("‖Δ‖, first step", lambda row: number(row["first_norm"]))
    return of("clipping", LOST, norm)


def breaks_sums() -> str:
    """Sums of gradients."""
    return of("sums", LOST)


def breaks_rate() -> str:
    """A learning rate that stays."""
    last: Column = ("lr, last step", lambda row: number(row["rates"][-1]))
    return of("rate", LOST, last)


def breaks_end() -> str:
    """The end of a schedule."""
    middle: Column = ("at step 101", lambda row: number(row["course"][10][1]))
    last: Column = ("at step 191", lambda row: number(row["course"][-1][1]))
    return of("end", middle, last)


def breaks_outlier() -> str:
    """One large gradient in a block."""
    return of("outlier", V_RATIO, RAISED)


def breaks_strides() -> str:
    """Updates in step with balanced rounding."""
    return of("strides", LOST) + "\n\n" + machine(load("findings-breaks"))


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
    return table(head, rows)


def _broken(name: str) -> int:
    return {"tails": 1, "large": 2}.get(name, 0)


# --------------------------------------------------------------------------------------- long runs


def long_runs() -> str:
    """Distances and losses at the end, by schedule and strategy."""
    result = load("findings-long")
    rows = []
    for row in result["rows"]:
        exact = row["strategy"] == "float64"
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
                number(row["average"]),
            )
        )
    head = (
        "", "from the twin", "from the run of float64", "nats, and from float64", "EDQ ratio",
        "v over exact", "error of the average",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


# ------------------------------------------------------------------------------------- fine-tuning


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
        if row["strategy"] != "master"
    ]
    head = (
        "", "weights too large for the rate", "EDQ ratio, first 20 steps", "movement made",
        "gain in loss",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)
