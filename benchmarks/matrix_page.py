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


def matrix(results: dict[str, Any], package: str) -> str:
    """One row a class."""
    rows = []
    for name, entry in results["classes"].items():
        if split(name)[0] != package:
            continue
        paths = entry["paths"]
        first = paths["for-loop"]
        if isinstance(first, str):
            continue
        three = [x["bf16x3"] for x in paths.values() if isinstance(x, dict)]
        rows.append(
            [
                split(name)[1],
                *(number(first[way]) for way in ("bf16", "fp32", "bf16x2")),
                number(worst(three)),
                letters(entry),
            ]
        )
    return table(["class", "bf16", "fp32", "bf16x2", "bf16x3", "why"], rows)


def worst(figures: Iterable[Any]) -> Any:
    """The largest figure; what is none wins."""
    figures = list(figures)
    return next((x for x in figures if isinstance(x, str)), None) or max(figures)


def letters(entry: dict[str, Any]) -> str:
    """What the errors of a class come from."""
    found = {CAUSES[c[0]] if c else "?" for c in entry.get("causes", {}).values()}
    return " ".join(sorted(found))


def failures(results: dict[str, Any]) -> str:
    """Return the failing optimizers, and their messages."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, entry in results["classes"].items():
        compiled = {"compiled": results["compiled"].get(name, {})}
        for path, errors in (entry["paths"] | compiled).items():
            whys = {"all": errors} if isinstance(errors, str) else errors
            for way, why in whys.items():
                if isinstance(why, str):
                    text = why.replace("|", "/").replace("<", "&lt;")
                    found.setdefault((name, text), []).append(f"{path}: {way}")
    rows = [[name, ", ".join(places), why] for (name, why), places in found.items()]
    return table(["class", "path: weights", "what it says"], rows)


def configurations(results: dict[str, Any]) -> str:
    """torch's database: the worst of all configurations and paths of a class."""
    ways = ["fp32", "bf16x2", "bf16x2 full", "bf16x3", "bf16x3 full"]
    rows = []
    for name, found in results["configurations"].items():
        figures = [errors for paths in found.values() for errors in paths.values()]
        row = [number(worst(x[way] for x in figures)) for way in ways]
        rows.append([name, f"{len(found)}", *row])
    return table(["class", "configurations", *ways], rows)


def render(page: str, results: dict[str, Any]) -> str:
    """The page with its tables made anew."""
    tables = {package: matrix(results, package) for package in PACKAGES}
    tables |= {
        "failures": failures(results),
        "configurations": configurations(results),
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
