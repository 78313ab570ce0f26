"""The tables of the page on optimizers, from the results of the measurement."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

CAUSES = {"gradients": "G", "leading terms": "L", "states": "S", "casts": "R"}
PACKAGES = ("torch.optim", "pytorch_optimizer", "schedulefree", "prodigyopt")


def number(x: Any) -> str:
    """Return a figure in the format of the tables."""
    if isinstance(x, (int, float)):
        return f"{x:.1e}"
    return "–" if x is None else "no"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def split(name: str) -> tuple[str, str]:
    """Package and class."""
    package, _, cls = name.rpartition(".")
    return package, cls


LARGE = 20
"""Classes of a package of which the page shows some."""

NOTABLE = 3e-3
"""Errors over two terms that are larger than those of most optimizers."""


def matrix(results: dict[str, Any], package: str) -> str:
    """One row a class; of a large package, classes that differ from the others, and their names."""
    rows, others = [], []
    entries = {x: e for x, e in results["classes"].items() if split(x)[0] == package}
    for name, entry in entries.items():
        paths = entry["paths"]
        first = paths["for-loop"]
        if isinstance(first, str):
            continue
        three = worst(x["bf16x3"] for x in paths.values() if isinstance(x, dict))
        figures = [*(first[way] for way in ("bf16", "fp32", "bf16x2")), three]
        causes, plain = letters(entry), not any(isinstance(x, str) for x in figures)
        if len(entries) > LARGE and plain and not causes and figures[2] < NOTABLE:
            others.append(split(name)[1])
        else:
            rows.append([split(name)[1], *map(number, figures), causes])
    text = table(["class", "bf16", "fp32", "bf16x2", "bf16x3", "why"], rows)
    return f"{text}\n\nThe others: {', '.join(others)}." if others else text


def worst(figures: Iterable[Any]) -> Any:
    """The largest figure; what is none wins."""
    figures = list(figures)
    return next((x for x in figures if isinstance(x, str)), None) or max(figures)


def letters(entry: dict[str, Any]) -> str:
    """What the errors of a class come from."""
    found = {CAUSES[c[0]] if c else "?" for c in entry.get("causes", {}).values()}
    return " ".join(sorted(found))


def failures(results: dict[str, Any]) -> str:
    """Return the optimizers that fail over expansions, and their messages."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, entry in results["classes"].items():
        compiled = {"compiled": results["compiled"].get(name, {})}
        for path, errors in (entry["paths"] | compiled).items():
            whys = {"all": errors} if isinstance(errors, str) else errors
            for way, why in whys.items():
                if isinstance(why, str) and way not in ("bf16", "fp32"):
                    text = why.replace("|", "/").replace("<", "&lt;")
                    found.setdefault((name, text), []).append(f"{path}: {way}")
    rows = [
        [name, ", ".join(places), why if len(why) < 80 else f"{why[:77]}..."]
        for (name, why), places in found.items()
    ]
    return table(["class", "path: weights", "what it says"], rows)


def render(page: str, results: dict[str, Any]) -> str:
    """The page with its tables made anew."""
    tables = {package: matrix(results, package) for package in PACKAGES}
    tables |= {
        "failures": failures(results),
        "versions": ", ".join(f"{name} {v}" for name, v in results["versions"].items()) + ".",
    }
    for name, text in tables.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(
                f"the page has no place for {name!r}: <!-- {name} --> ... <!-- end -->"
            )
        page = pattern.sub(lambda m, text=text: f"{m[1]}\n{text}\n\n{m[2]}", page, count=1)
    return page
