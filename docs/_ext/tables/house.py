"""Tables of the project's own files: folders of the package, commands, and folders of tests."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from tables.sources import table

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "mcftensor"


def folders() -> list[str]:
    """The folders of the package."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def imports(folder: str) -> set[str]:
    """The other folders from which the modules of a folder import when they are imported."""
    found = set()
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    parts = {name.split(".")[1] for name in found if name.startswith("mcftensor.")}
    return parts & set(folders()) - {folder}


def groups() -> list[list[str]]:
    """Folders in the order of imports, lowest first; folders that import each other together."""
    direct = {folder: imports(folder) for folder in folders()}
    reached = {folder: {folder} for folder in direct}
    for _ in direct:
        reached = {f: x.union(*(direct[y] for y in x)) for f, x in reached.items()}
    together = {f: frozenset(g for g in x if f in reached[g]) for f, x in reached.items()}
    below = {x: {together[g] for f in x for g in direct[f]} - {x} for x in together.values()}
    return [sorted(group) for group in TopologicalSorter(below).static_order()]


def layers() -> str:
    """The folders in the order of imports, with the first sentence of their pages."""
    rows = []
    for folder in (folder for group in groups() for folder in group):
        text = (PACKAGE / folder / "README.md").read_text().split("\n\n")[1].replace("\n", " ")
        sentence = re.split(r"(?<=[a-z`)])\. ", text, maxsplit=1)[0].removesuffix(".")
        rows.append((f"`{folder}/`", sentence))
    mutual = [" and ".join(f"`{x}`" for x in group) for group in groups() if len(group) > 1]
    note = f"These import each other: {'; '.join(mutual)}."
    return f"{table(('folder', 'contents'), rows)}\n\n{note}"


def commands() -> str:
    """The targets of the Makefile, with its own help."""
    lines = re.findall(r"^([a-z0-9-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return table(("command", "does"), [(f"`make {name}`", text) for name, text in lines])


def subjects() -> str:
    """The folders of tests."""
    found = sorted({path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")})
    return ", ".join(f"`{name}`" for name in found)
