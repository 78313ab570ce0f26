"""The table of the page "Works with"."""

from __future__ import annotations

from tables.sources import load, table

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
    """Frameworks with the same cells in a row; what they say is below the table."""
    result = load("works-with")
    alike: dict[tuple[str, ...], list[str]] = {}
    said = []
    for name, row in result["rows"].items():
        versions = ", ".join(x for x in dict.fromkeys(row["versions"].values()) if x)
        found = [row["cells"].get(column, "–") for column in COLUMNS]
        alike.setdefault(tuple(map(short, found)), []).append(f"{name} {versions}".strip())
        reasons = [x.partition(": ")[2] for x in found if x != short(x)]
        reasons += filter(None, [row["cells"].get("messages")])
        said += [f"- {name}: {first_words(text)}" for text in dict.fromkeys(reasons)]
    rows = [("; ".join(names), *cells) for cells, names in alike.items()]
    machine = result["machine"]
    note = f"<small>torch {machine['torch']}, Python {machine['python']}, on a CPU.</small>"
    return "\n\n".join([table(("framework", *COLUMNS), rows), note, "\n".join(said)])
