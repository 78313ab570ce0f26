"""Tables of the trainings of `studies/gpt2.py`, from the runs that have a record."""

from __future__ import annotations

import json
import statistics
from typing import Any

from tables.runs import REFERENCE, Found, by_strategy, final, late, mean
from tables.sources import RESULTS, machine, percent, table

ORDER = ("bf16", "compact", "plus", "exact", REFERENCE)


def by_size() -> list[dict[str, list[Found]]]:
    """The runs of each size, the largest first."""
    sizes: dict[int, list[dict[str, Any]]] = {}
    for path in (RESULTS / "gpt2").glob("*.json"):
        record = json.loads(path.read_text())
        sizes.setdefault(record["parameters"], []).append(record)
    return [by_strategy(sizes[size], ORDER) for size in sorted(sizes, reverse=True)]


def gpt2_losses() -> str:
    """Of the largest: the loss over the steps, and what the meter says at the end."""
    return losses(by_size()[0])


def losses(rows: dict[str, list[Found]]) -> str:
    """Of one size. Losses of other strategies are differences to master weights."""
    reference = rows[REFERENCE]
    first = reference[0].record
    run, half = first["run"], len(first["result"]["validation"]) // 2

    def halfway(record: dict[str, Any]) -> float:
        return float(record["result"]["validation"][half][1])

    twins = {found.record["run"]["seed"]: halfway(found.record) for found in reference}

    def early(found: Found) -> float | None:
        twin = twins.get(found.record["run"]["seed"])
        return None if twin is None else halfway(found.record) - twin

    cells = []
    for name, runs in rows.items():
        if name == REFERENCE:
            ends = [final(found.record, "validation") for found in runs]
            own = [f"{statistics.fmean(part):.4f}" for part in (twins.values(), ends)]
        else:
            own = [mean(runs, early, 4), mean(runs, lambda found: found.gap, 4)]
        cells.append(
            (
                name,
                *own,
                f"{len(runs)}",
                f"{late(runs[0], 'ratio') or 0.0:.4f}",
                percent(late(runs[0], "lost") or 0.0, 2),
                f"{runs[0].bytes:.2f}",
            )
        )
    step = first["result"]["validation"][half][0]
    head = (
        f"{first['parameters'] / 1e6:.0f} M", f"loss, step {step}", f"loss, step {run['steps']}",
        "seeds", "EDQ ratio", "lost", "bytes",
    )  # fmt: skip
    said = (
        f"{run['steps']} steps of {run['batch_size']} × {run['length']} tokens, "
        f"lr {run['lr']:g}, beta2 {run['beta2']:g}; "
    )
    return table(head, cells) + "\n\n" + machine(first, said)
