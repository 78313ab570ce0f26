"""Tables of what tests of other libraries find."""

from __future__ import annotations

import statistics
from typing import Any

from tables.sources import load, machine, table

SUITES = {"herbie": "Herbie", "FPBench": "FPBench"}


def _suites() -> dict[str, Any]:
    suites: dict[str, Any] = load("judged")["suites"]
    return suites


def judged_commits() -> str:
    """Which clones were read."""
    rows = [(f"`{x['repository']}`", f"`{x['commit'][:12]}`") for x in _suites().values()]
    return table(("repository", "commit"), rows) + "\n\n" + machine(load("judged"))


def judged_formulas() -> str:
    """Bits that are right, by suite and kind of numbers."""
    rows = []
    for suite, shown in SUITES.items():
        if suite not in _suites():
            continue
        judged = [x["right"] for x in _suites()[suite]["found"] if "right" in x]
        for kind in load("judged")["kinds"]:
            found = [right[kind] for right in judged if kind in right]
            means = [mean for mean, _, _ in found]
            full = max(means)
            rows.append(
                (
                    f"{shown}, `{kind}`",
                    str(len(found)),
                    str(sum(count for _, _, count in found)),
                    f"{full:.0f}",
                    f"{statistics.fmean(means):.1f}",
                    f"{full - statistics.fmean(means):.1f}",
                    f"{statistics.fmean(full - worst for _, worst, _ in found):.1f}",
                    str(sum(full - mean < 1 for mean in means)),
                    str(sum(mean < full / 2 for mean in means)),
                )
            )
    head = (
        "", "formulas", "inputs", "bits", "right", "lost on average", "lost at the worst input",
        "formulas that lose less than one bit", "more than half",
    )  # fmt: skip
    return table(head, rows)


def judged_worse() -> str:
    """Formulas with an input at which more terms are worse."""
    rows = []
    for suite, shown in SUITES.items():
        for x in _suites().get(suite, {"found": []})["found"]:
            for pair, entry in x.get("worse", {}).items():
                more, less = pair.split(" than ")
                at = ", ".join(f"{v:.9g}" for v in entry["worst"]["at"])
                rows.append(
                    (
                        f"{shown}: {x['name']}",
                        f"`{more}` than `{less}`",
                        f"{entry['inputs worse']} of {entry['inputs']}",
                        f"{entry['mean']:+.2f}".replace("-", "−"),
                        at if len(at) < 80 else at[:77] + "...",
                        f"{entry['worst'][more]:.1f}, {entry['worst'][less]:.1f}",
                        f"`{entry['worst']['operation'][0]}`: {entry['worst']['operation'][1]:.3g}",
                    )
                )
    if not rows:
        return "No formula has such an input."
    head = (
        "formula",
        "worse",
        "at inputs",
        "mean difference, bits",
        "worst input",
        "right there",
        "largest error of an operation there, in units",
    )
    return table(head, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def judged_not() -> str:
    """Formulas that are not judged, or that an operation refuses, and why."""
    reasons: dict[str, list[str]] = {}
    for suite, shown in SUITES.items():
        for x in _suites().get(suite, {"found": []})["found"]:
            reason = x.get("not judged") or x.get("raised")
            if reason:
                reasons.setdefault(f"{shown}: {reason}", []).append(x["name"])
    lines = [f"- {reason} ({len(names)}): {', '.join(names)}." for reason, names in reasons.items()]
    return "\n".join(lines) or "All were judged."


def judged_qd() -> str:
    """QD's checks."""
    found = _suites()["QD"]["found"]
    formats = list(found[0]["eps"])
    rows = [
        (x["check"], *(f"{x['eps'][f]:.2f}" for f in formats), f"{x['tolerance']:g}") for x in found
    ]
    return table(("error, in eps", *(f"`{f}`" for f in formats), "tolerance"), rows)


def judged_accupy() -> str:
    """Relative errors of sums and dot products, by condition."""
    found = _suites()["accupy"]["found"]
    rows = [
        (name, *(f"{row['errors'][name]:.0e}" for row in found["rows"]))
        for name in found["rows"][0]["errors"]
    ]
    return table(("condition", *(f"{row['condition']:.0e}" for row in found["rows"])), rows)


def judged_invariants() -> str:
    """Numbers that break FlashOptim's invariants."""
    found = _suites()["flashoptim"]["found"]["rounding"]
    rows = []
    for name, first in found["nearest"].items():
        counts = [found[rounding][name] for rounding in ("nearest", "balanced")]
        exact = ", ".join(str(x.get("both exact", "–")) for x in counts[:1])
        rows.append(
            (
                f"`{name}`",
                *(f"{x['most']:,}" for x in counts),
                *(f"{x['in all']:,}" for x in counts),
                exact,
                f"{first['allowed by its tests']:,}",
            )
        )
    head = (
        "invariant", "most of an exponent, nearest", "balanced", "in all, nearest", "balanced",
        "of these, both exact", "allowed by its tests, of an exponent",
    )  # fmt: skip
    return table(head, rows)
