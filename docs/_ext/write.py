"""Write the figures and the tables of the pages anew, by `make pages`. They are committed, so that
pages can be read as plain Markdown too; a test keeps them true, by --check, which only looks."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/figures"
sys.path[:0] = [str(path) for path in (FIGURES, ROOT, ROOT / "benchmarks")]
sys.path.append(str(ROOT / "studies"))  # after the figures: order.py is in both

import tables

MARK = re.compile(r"^<!-- table: ([\w ]+) -->$", re.MULTILINE)
TABLE = re.compile(MARK.pattern + r"(?:(?!^<!-- ).)*^<!-- end -->$", re.MULTILINE | re.DOTALL)


def written(text: str) -> str:
    """A page, its tables anew."""
    if missing := len(MARK.findall(text)) - len(TABLE.findall(text)):
        raise ValueError(f"{missing} tables have no <!-- end --> below them")
    return TABLE.sub(
        lambda m: f"<!-- table: {m[1]} -->\n\n{tables.made(m[1])}\n\n<!-- end -->", text
    )


def pages() -> list[Path]:
    """Those with tables."""
    found = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if MARK.search(page.read_text())]


def names() -> list[str]:
    """Of the figures."""
    return sorted(path.stem for path in FIGURES.glob("*.py") if path.stem != "drawing")


def drawings(name: str) -> dict[Path, str]:
    """The files of a figure: for a page, and for a phone."""
    wide, narrow = importlib.import_module(name).draw()
    return {FIGURES / f"{name}.svg": f"{wide}\n", FIGURES / f"{name}-narrow.svg": f"{narrow}\n"}


def alike(old: str, new: str) -> bool:
    """The same; in drawings up to two pixels, since sums differ in the last bits by machine."""
    if not new.startswith("<svg"):
        return old == new
    parts = [re.split(r"(-?\d+\.\d+)", text) for text in (old, new)]
    same = [len(part) for part in parts], [part[::2] for part in parts]
    if any(a != b for a, b in same):
        return False
    return all(abs(float(a) - float(b)) < 2 for a, b in zip(*(p[1::2] for p in parts), strict=True))


def main() -> int:
    """Write what has changed, and say what that is; 1 if something has."""
    made = {page: written(page.read_text()) for page in pages()}
    for name in names():
        made |= drawings(name)
    changed = [x for x, text in made.items() if not x.exists() or not alike(x.read_text(), text)]
    for path in changed:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(made[path])
    return int(bool(changed) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
