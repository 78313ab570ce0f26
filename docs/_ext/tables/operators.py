"""Tables of PyTorch's own: its operators, and what is taken hold of in it."""

from __future__ import annotations

from typing import Any

from mcftensor.patches.table import FIRST, TABLE, Patch
from tables.sources import load, machine, table


def patches() -> str:
    """What is changed in PyTorch and peft, by the occasion; names changed alike stand together."""
    occasions: dict[str, dict[tuple[str, ...], list[str]]] = {}
    # In an order that does not depend on which part of the library was imported first.
    for row in sorted(TABLE, key=lambda row: (row.when != FIRST, row.when, row.name)):
        alike = occasions.setdefault(row.when, {})
        alike.setdefault((row.why, row.releases), []).append(f"`{row.name}`")
    lines = []
    for when, groups in occasions.items():
        lines.append(f"- With {when if when == FIRST else f'`{when}`'}:")
        for (_, releases), names in groups.items():
            package = names[0].strip("`").partition(".")[0]
            seen = "" if releases == Patch.releases else f" ({package} {releases})"
            lines.append(f"    - {', '.join(names)}{seen}")
    return "\n".join(lines)


def outcome(entry: dict[str, Any]) -> str:
    """What became of the samples of one operator in one format."""
    if not entry["computed"]:
        return "raises" if entry["refused"] else "–"
    units = f"{entry['units']:.2f}".rstrip("0").rstrip(".") if entry["units"] else "0"
    return f"{units}, some raise" if entry["refused"] else units


def operator_summary() -> str:
    """How many compute, in each format."""
    result = load("operator-matrix")
    rows = []
    for name in next(iter(result["operators"].values())):
        entries = [formats[name] for formats in result["operators"].values()]
        computed = [e for e in entries if e["computed"]]
        refused = sum(1 for e in entries if e["refused"] and not e["computed"])
        rows.append(
            (
                f"`{name}`",
                str(len(computed)),
                str(refused),
                str(len(entries) - len(computed) - refused),
                f"{max(e['units'] for e in computed):.1f}",
            )
        )
    head = ("format", "compute", "raise", "take no floats", "worst error")
    return table(head, rows) + "\n\n" + machine(result)


def operators() -> str:
    """By module: a row for each operator that errs by more than two units in some format, and the
    names of those that raise."""
    result = load("operator-matrix")["operators"]
    groups: dict[str, list[str]] = {}
    for name in result:
        module, dot, _ = name.rpartition(".")
        known = module in ("fft", "linalg", "masked", "nn.functional", "signal.windows", "special")
        groups.setdefault(module if known and dot else "torch", []).append(name)
    parts = []
    for module in sorted(groups, key=lambda m: (m != "torch", m)):
        names = groups[module]
        entries = {name: [*result[name].values()] for name in names}
        rows = [
            (f"`{name}`", *map(outcome, found))
            for name, found in entries.items()
            if any(x["computed"] and (x["refused"] or x["units"] > 2) for x in found)
        ]
        refused = [
            f"`{name}`"
            for name, found in entries.items()
            if any(x["refused"] for x in found) and not any(x["computed"] for x in found)
        ]
        texts = [table(("operator", *next(iter(result.values()))), rows)] if rows else []
        texts += [f"Raise: {', '.join(refused)}."] if refused else []
        if texts:
            parts.append("\n\n".join((f"### {module}", *texts)))
    return "\n\n".join(parts)
