"""The table of the page "Works with"."""

from __future__ import annotations

from tables.sources import load

MOST = 130
COLUMNS = ("train", "save", "resume to the bit", "load elsewhere", "merge or export", "EDQ")


def short(cell: str) -> str:
    """A cell without its reason, which is below the table."""
    verdict, colon, _ = cell.partition(": ")
    return verdict if colon and verdict in ("cannot", "refuses") else cell


def first_words(text: str) -> str:
    """The first sentence, of some twenty words."""
    sentence = text.partition(". ")[0]
    return f"{sentence}." if len(sentence) < MOST else f"{sentence[:MOST].rpartition(' ')[0]} …"


def works_with() -> str:
    """A framework a row; what it says is below the table."""
    result = load("works-with")
    lines = [f"| framework | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    said = []
    for name, row in result["rows"].items():
        versions = ", ".join(x for x in dict.fromkeys(row["versions"].values()) if x)
        cells = row["cells"]
        found = [cells.get(column, "–") for column in COLUMNS]
        lines.append(f"| {name} {versions} | {' | '.join(map(short, found))} |")
        reasons = [x.partition(": ")[2] for x in found if x != short(x)]
        reasons += filter(None, [cells.get("messages")])
        said += [f"- {name}: {first_words(text)}" for text in dict.fromkeys(reasons)]
    machine = result["machine"]
    note = f"<small>torch {machine['torch']}, Python {machine['python']}, on a CPU.</small>"
    return "\n".join([*lines, "", note, "", *said])
