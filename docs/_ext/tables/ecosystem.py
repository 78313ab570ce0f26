"""The table of the page "Works with"."""

from __future__ import annotations

from tables.sources import load

COLUMNS = ("train", "save", "resume to the bit", "load elsewhere", "merge or export", "EDQ")


def works_with() -> str:
    """A framework a row; what it says is below the table."""
    result = load("works-with")
    lines = [f"| framework | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    said = []
    for name, row in result["rows"].items():
        versions = ", ".join(x for x in dict.fromkeys(row["versions"].values()) if x)
        cells = row["cells"]
        found = [cells.get(column, "–") for column in COLUMNS]
        lines.append(f"| {name} {versions} | {' | '.join(found)} |")
        if "messages" in cells:
            said.append(f"- {name}: {cells['messages']}")
    machine = result["machine"]
    note = f"<small>torch {machine['torch']}, Python {machine['python']}, on a CPU.</small>"
    return "\n".join([*lines, "", note, "", "Messages:", "", *said])
