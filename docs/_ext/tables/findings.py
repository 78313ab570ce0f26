"""Tables of what the studies found."""

from __future__ import annotations

from typing import Any

from questions import sizes
from questions.trial import count_parameters
from tables.sources import load, machine, percent, signed, table

STRATEGIES = ("master", "bf16", "light", "plus", "full", "compact", "exact", "round")


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


def findings_trained() -> str:
    """What trainings with such weights came to."""
    rows = [
        (
            f"`{row['format']}`",
            f"{row['ratio']:.3f}",
            percent(row["lost"]),
            f"{row['displacement_matrices']:.1e}",
            f"{row['validation']:.4f}"
            if not row["gap_half"]
            else signed(row["gap"], row["gap_half"]),
        )
        for row in load("findings-eight")["trained"]
    ]
    return table(("weights", "EDQ ratio", "lost", "displacement", "nats a byte"), rows)


def findings_beta2() -> str:
    """Losses of each strategy and learning rate by beta2, and how clear the best one is."""
    result = load("findings-beta2")
    rows = []
    middle = sorted({row["lr"] for row in result["best"]})[1]
    shown = [row for row in result["best"] if row["lr"] != middle]
    for row in (row for row in shown if row["strategy"] not in ("plus", "full")):
        losses = [
            f"**{loss:.4f}**" if beta2 == row["beta2"] else f"{loss:.4f}"
            for beta2, loss in zip(result["beta2s"], row["losses"], strict=True)
        ]
        second = f"{signed(row['worse'], row['half'])} ({row['second']:g})"
        rows.append((f"{row['strategy']}, lr {rate(row['lr'])}", *losses, second))
    head = ("", *(f"beta2 {x:g}" for x in result["beta2s"]), "second best, to the best")
    return table(head, rows)


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


def million(x: float) -> str:
    """Parameters in millions."""
    return f"{x:.1f} M" if x < 10 else f"{x:.0f} M"


def findings_sizes_run() -> str:
    """Which sizes have run, and how."""
    result = load("findings-sizes")
    settings = result["settings"]
    done = list(dict.fromkeys(million(row["million"]) for row in result["rows"]))
    every = [million(count_parameters(shape) / 1e6) for shape in sizes.SHAPES]
    missing = [size for size in every if size not in done]
    by_count: dict[int, list[str]] = {}
    for size, most in zip(every, sizes.SEEDS, strict=True):
        if size in done:
            by_count.setdefault(min(most, len(settings["seeds"])), []).append(size)
    seeds = "; ".join(f"{count} of {', '.join(found)}" for count, found in by_count.items())
    return (
        f"- Run: {', '.join(done)}; not run: {', '.join(missing) or 'none'}.\n"
        f"- {settings['steps']} steps of {settings['batch_size']} windows, "
        f"beta2 {sizes.BETA2:g}. Seeds: {seeds}."
    )


def findings_sizes() -> str:
    """By size and strategy, at each of both learning rates: the loss, and what updates lose."""
    result = load("findings-sizes")
    found: dict[str, list[str]] = {}
    for share in sizes.SHARES:
        for row in (row for row in result["rows"] if row["share"] == share):
            if row["strategy"] not in (sizes.REFERENCE, "bf16", "exact"):
                continue
            is_reference = row["strategy"] == sizes.REFERENCE
            nats = f"{row['validation']:.4f} (lr {rate(row['lr'])})"
            cells = found.setdefault(f"{row['strategy']}, {million(row['million'])}", [])
            cells.append(nats if is_reference else signed(row["gap"], row["gap_half"]))
            cells.append(percent(row["lost"]))
    head = ("", "nats, at the best rate", "lost", "nats, at a third of it", "lost")
    return table(head, [(name, *cells) for name, cells in found.items()]) + "\n\n" + machine(result)
