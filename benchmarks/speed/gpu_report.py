"""The page that `make gpu` writes: what was right, what was fast, and what was not as predicted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]

OFF = 1 / 3
"""Difference of measured and predicted time, over the predicted one, from which on a kernel is
flagged."""


def page(record: Record) -> str:
    """All of it, in Markdown."""
    device, about = record["device"], record["machine"]
    size = f"{device['memory'] / 2**30:.0f} GiB" if device["memory"] else ""
    what = ", ".join(filter(None, (device["capability"], size, device["runtime"])))
    parts = [
        f"# mcftensor {about['mcftensor']} on {device['name']}",
        f"{what}, torch {about['torch']}, Python {about['python']}"
        + (f". Measured by {record['by']}." if record["by"] else "."),
        table(("stage", "minutes", "result"), [_stage(*x) for x in record["stages"].items()]),
    ]
    sections = {"kernels": kernels, "steps": steps, "training": training}
    for name, section in sections.items():
        figures = record["stages"].get(name, {}).get("figures")
        if figures:
            parts += [f"## {name.capitalize()}", section(figures)]
    for name, found in record["stages"].items():
        if found["status"] != 0 or name == "selfcheck":
            words = "\n".join(found["text"])
            parts += [f"## {name.capitalize()}: its words", f"```text\n{words}\n```"]
    return "\n\n".join([*parts, WHAT_TO_DO]) + "\n"


WHAT_TO_DO = """\
## What to do with this

Put `results.json` into `benchmarks/results/gpu/` under the name of the device, run `make pages`,
and open a pull request. Or open an issue, choose "Results of a device", and paste this page.
Results that fail or are slow are as welcome as others."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, the first column to the left."""
    rule = ["---", *["---" if x == "result" else "---:" for x in head[1:]]]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _stage(name: str, found: Record) -> tuple[str, str, str]:
    status, last = found["status"], found["text"][-1] if found["text"] else ""
    if name == "tests":
        said = [
            re.sub(r"^=+ | =+$", "", x) for x in found["text"] if re.search(r"passed|failed", x)
        ]
        last = said[-1] if said else last
    good = {"selfcheck": last, "tests": last}.get(name, "done")
    result = good if status == 0 else f"failed: {status}" if isinstance(status, int) else status
    return name, f"{found['seconds'] / 60:.1f}", result.replace("|", "/")


def kernels(figures: Record) -> str:
    """Predicted and measured times, and which are off by more than a third."""
    found = figures["at hand"]
    rows = []
    for name, x in found["kernels"].items():
        flag = " ←" if abs(x["ratio"] - 1) > OFF else ""
        times = [f"{x[key]:.2f}" for key in ("memory", "computing", "measured")]
        rows.append((name, *times, f"{x['ratio']:.2f}{flag}"))
    head = ("picoseconds an element", "memory", "computing", "measured", "over predicted")
    slow, fast = flagged(figures)
    notes = [f"Memory copies {found['bandwidth'] / 1e9:,.0f} GB/s."]
    for names, word in ((slow, "slower"), (fast, "faster")):
        if names:
            notes.append(f"More than a third {word} than predicted: {', '.join(names)}.")
    if not (slow or fast):
        notes.append("No kernel is off its prediction by more than a third.")
    return f"{table(head, rows)}\n\n{' '.join(notes)}"


def flagged(figures: Record) -> tuple[list[str], list[str]]:
    """The kernels that are slower than predicted by more than a third, and those faster."""
    rows = figures["at hand"]["kernels"].items()
    slow = [name for name, x in rows if x["ratio"] - 1 > OFF]
    return slow, [name for name, x in rows if 1 - x["ratio"] > OFF]


def steps(figures: Record) -> str:
    """Milliseconds, ratios to master weights, and shares of the copy bandwidth."""
    parts = []
    for name, found in figures["workloads"].items():
        rows = []
        for contender, x in found["contenders"].items():
            if "failed" in x:
                rows.append((contender, "–", "–", "–", "–"))
                continue
            ratio = "–" if x["ratio"] is None else f"{x['ratio']:.2f}"
            share = f"{100 * x['share_of_limit']:.0f} %"
            milliseconds = f"{1000 * x['seconds']:.2f}"
            rows.append((contender, f"{x['bytes_held']:.4g}", milliseconds, ratio, share))
        head = (name, "bytes a parameter", "ms", "ratio to master weights", "of copy bandwidth")
        failed = [f"{c}: {x['failed']}" for c, x in found["contenders"].items() if "failed" in x]
        parts += [table(head, rows), *(["Did not run: " + "; ".join(failed)] if failed else [])]
    return "\n\n".join(parts)


def training(figures: Record) -> str:
    """Speed, memory and loss by strategy."""
    rows = []
    for name, x in figures["strategies"].items():
        if "failed" in x:
            rows.append((name, x["failed"], "–", "–"))
            continue
        tokens, peak = f"{x['tokens_a_second']:,.0f}", f"{x['peak_bytes'] / 1e9:.2f}"
        rows.append((name, tokens, peak, f"{x['loss']:.4f}"))
    head = (f"GPT-2 {figures['model']}", "tokens a second", "peak, GB", "loss of the last step")
    return table(head, rows)
