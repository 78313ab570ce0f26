"""Tables of what deltas cost, and how long they are."""

from __future__ import annotations

from tables.sources import load, percent, table


def delta_bytes() -> str:
    """By learning rate: elements that changed, bytes over those of the model, and EDQ."""
    said = load("delta_cost")
    found = said["size"]
    rates = list(next(iter(found.values())))
    rows = []
    for rate in rates[::2]:
        row = [f"{float(rate):.0e}"]
        for name in ("bf16", "bf16x2"):
            x = found[name][rate]
            row += [percent(x["changed"]), percent(x["bytes"]), f"{x['edq']:.2f}"]
        rows.append(tuple(row))
    heads = ("elements changed", "bytes", "EDQ")
    names = (f"{x}: {y}" for x in ("plain bf16", "`bf16x2`") for y in heads)
    return table(("lr", *names), rows)


def delta_cost() -> str:
    """CPU time of a step, and of taking and applying a delta."""
    found = load("delta_cost")["cost"]
    rows = [
        (
            f"`{name}`",
            f"{x['milliseconds']['step']:.2f} ms",
            f"{x['take']:.1f}",
            f"{x['apply']:.1f}",
        )
        for name, x in found.items()
    ]
    heads = ("fused AdamW step", "take, in steps", "apply, in steps")
    return table(("format", *heads), rows)
