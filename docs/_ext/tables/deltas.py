"""Tables of what deltas cost, and how long they are."""

from __future__ import annotations

from tables.sources import load, table


def delta_bytes() -> str:
    """By learning rate: elements that changed, bytes over those of the model, and EDQ."""
    found = load("delta_cost")["size"]
    rates = list(next(iter(found.values())))
    rows = []
    for rate in rates:
        row = [f"{float(rate):.0e}"]
        for name in ("bf16", "bf16x2"):
            x = found[name][rate]
            row += [f"{x['changed']:.1%}", f"{x['bytes']:.1%}", f"{x['edq']:.2f}"]
        rows.append(tuple(row))
    heads = ("elements changed", "bytes", "EDQ")
    return table(("lr", *(f"{x}: {y}" for x in ("plain bf16", "`bf16x2`") for y in heads)), rows)


def delta_cost() -> str:
    """CPU time of a step, of its marks, and of taking a delta."""
    found = load("delta_cost")["cost"]
    rows = [
        (
            f"`{name}`",
            f"{x['milliseconds']['step']:.2f} ms",
            f"{x['marks']:.1%}",
            f"{x['take']:.1f}",
        )
        for name, x in found.items()
    ]
    return table(("format", "fused AdamW step", "marks add", "take, in steps"), rows)
