"""Tables of what the studies found."""

from __future__ import annotations

from typing import Any

from questions import sizes
from tables.sources import load, machine, percent, signed, table


def rate(x: float) -> str:
    """A learning rate of one digit."""
    return f"{x:g}" if x >= 0.01 else f"{x:.0e}".replace("e-0", "e-")


def findings_stored() -> str:
    """What weights in 8-bit terms moved by, against float64."""
    result = load("findings-eight")
    head, *columns = (name for name in result["stored"][0] if not name.endswith(" half"))
    rows = [
        (f"`{row[head]}`", f"{row['bytes']}", *(f"{row[c]:.1e}" for c in columns[1:]))
        for row in result["stored"]
        if not row[head].endswith(("rn", "x4br", "x2s", "x3s"))
    ]
    names = (
        "weights",
        "bytes",
        *(f"lr {rate(float(c.split()[0]))}, {c.split()[1]}" for c in columns[1:]),
    )
    return table(names, rows) + "\n\n" + machine(result)


def findings_prediction() -> str:
    """Rank correlations of what meters say with what a run loses."""
    result = load("findings-prediction")
    hidden = (
        "group",
        "runs",
        "lost of v",
        "|1 − leading ratio|",
        "|1 − v/exact|",
        "|1 − ratio of v|",
    )
    predictors = [name for name in result["correlations"][0] if name not in hidden]

    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return "–"
        low, high = (f"{x:.2f}" for x in found["interval"])
        return f"{found['rho']:.2f} ({low} to {high})".replace("-", "−")

    rows = [
        (row["group"], str(row["runs"]), *(cell(row[name]) for name in predictors))
        for row in result["correlations"]
        if row["group"] in ("all", "without bf16", "bf16")
    ]
    head = ("runs of", "number", *(name.replace("|", "\\|") for name in predictors))
    return table(head, rows) + "\n\n" + machine(result)


def findings_growth() -> str:
    """The error of weights at the first check and the last, and how it grows."""
    result = load("findings-growth")
    found: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        cells = found.setdefault((row["strategy"], row["kind"]), [])
        cells += [f"{row['error'][0]:.1e}", f"{row['error'][-1]:.1e}"]
        if row["source"] == "real":
            cells.append(f"{row['second_moment'][-1]:.3f}")
    rows = [(f"{strategy}, {kind}", *cells) for (strategy, kind), cells in found.items()]
    left_out = ("full", "tail8")  # between plus and exact
    rows = [
        (name.partition(", ")[0], *cells)
        for name, *cells in rows
        if name.endswith("matrices") and not name.startswith(left_out)
    ]
    steps = result["rows"][0]["steps"]
    ends = [f"step {steps[0]}", f"step {steps[-1]:,}"]
    head = ("", *(f"{source}: {x}" for source in ("random", "real") for x in ends), "v over exact")
    return table(head, rows) + "\n\n" + machine(result)


def findings_others() -> str:
    """What light and plus do for other optimizers."""
    result = load("findings-others")

    def number(x: float | None, form: str) -> str:
        return "–" if x is None else format(x, form)

    rows = [
        (
            f"{row['optimizer']}, {row['strategy']}",
            rate(row["lr"]),
            signed(row["gap"], row["gap_half"]),
            number(row["ratio"], ".3f"),
            number(row["displacement_matrices"], ".1e"),
        )
        for row in result["rows"]
        if row["strategy"] != "master"
    ]
    head = ("", "lr", "nats from master weights", "EDQ ratio", "displacement")
    return table(head, rows) + "\n\n" + machine(result)


def findings_sizes() -> str:
    """The gap of plain bf16 and what its updates lose, by size, at each of both learning rates."""
    result = load("findings-sizes")
    found = {(row["share"], row["strategy"], row["million"]): row for row in result["rows"]}
    best, third = sizes.SHARES
    columns = [[found[share, "bf16", x] for x in _sizes(result)] for share in (best, third)]
    masters = [found[best, sizes.REFERENCE, x] for x in _sizes(result)]
    rows = [
        ("the best rate", *(rate(row["lr"]) for row in masters)),
        *(
            (f"nats above master weights, {at}", *(signed(x["gap"], x["gap_half"], 3) for x in xs))
            for at, xs in zip(("at it", "at a third of it"), columns, strict=True)
        ),
        ("updates lost, at it", *(percent(row["lost"], 0) for row in columns[0])),
    ]
    heads = [f"{x:.1f} M" if x < 10 else f"{x:.0f} M" for x in _sizes(result)]
    return table(("plain bf16", *heads), rows) + "\n\n" + machine(result)


def _sizes(result: dict[str, Any]) -> list[float]:
    return list(dict.fromkeys(row["million"] for row in result["rows"]))
