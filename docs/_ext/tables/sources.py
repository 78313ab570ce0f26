"""What tables are made of: committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FIGURE = re.compile(r"(\*\*)?[+−\d–]")
RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def load(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, figures to the right."""
    rows = list(rows)
    rule = [
        "---:" if all(FIGURE.match(cell) for cell in column) else "---"
        for column in zip(*rows, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def machine(result: dict[str, Any], note: str = "") -> str:
    """One line about where figures come from."""
    m = result["machine"]
    if isinstance(m, str):
        return f"<small>{note}{m}</small>"
    cpu = m.get("cpu") or f"a {m['device'].upper()}"
    if "cpu_capability" in m:
        cpu += f", {m['cpu_capability'].replace('AVX512', 'AVX-512')}"
    threads = f", {m['threads']} thread{'s' * (m['threads'] > 1)}" if "threads" in m else ""
    return f"<small>{note}{cpu}{threads}, torch {m['torch']}, Python {m['python']}</small>"


def signed(x: float, half: float | None = None, digits: int = 4) -> str:
    """A difference, and half the length of its interval."""
    text = f"{x:+.{digits}f}".replace("-", "−")
    return text if half is None else f"{text} ± {half:.{digits}f}"


def percent(x: float | None, digits: int = 1, half: float | None = None) -> str:
    """A share, and half the length of its interval; a dash if it is not known."""
    if x is None:
        return "–"
    text = f"{100 * x:.{digits}f}".replace("-", "−")
    return f"{text} %" if half is None else f"{text} ± {100 * half:.{digits}f} %"
