"""Tables of the trainings of `studies/bert.py`, from the runs that have a record."""

from __future__ import annotations

import json
import statistics
from typing import Any

from tables.runs import REFERENCE, Found, by_strategy, late, mean, witnessed
from tables.sources import RESULTS, machine, percent, table

BETA2S = (0.999, 0.98)
ORDER = (
    "bf16", "compact4", "kahan", "light", "compact", "released", "plus", "full", "exact", "fp16",
    REFERENCE,
)  # fmt: skip


def at_beta2(beta2: float) -> dict[str, list[Found]]:
    """The runs at one beta2, those without tails first."""
    paths = (RESULTS / "bert").glob(f"*-{beta2:g}-*.json")
    return by_strategy([json.loads(path.read_text()) for path in paths], ORDER)


def at_end_of(record: dict[str, Any], phase: int) -> float:
    """The loss at the end of a phase."""
    steps = sum(p["steps"] for p in record["run"]["phases"][: phase + 1])
    return float(dict(map(tuple, record["result"]["validation"]))[steps])


def bert_runs() -> str:
    """What has run."""
    lines = []
    for beta2 in BETA2S:
        rows = at_beta2(beta2)
        if not rows:
            lines.append(f"- beta2 {beta2:g}: no run yet.")
            continue
        seeds = max(len(runs) for runs in rows.values())
        few = [name for name, runs in rows.items() if len(runs) < seeds]
        rest = f", fewer for {', '.join(few)}" if few else ""
        missing = [name for name in ORDER if name not in rows]
        none = f"; not run: {', '.join(missing)}" if missing else ""
        number = f"{seeds} seed{'s' * (seeds > 1)}"
        lines.append(f"- beta2 {beta2:g}: {number}{rest}{none}.")
    run = next(iter(at_beta2(BETA2S[0]).values()))[0].record["run"]
    first, second = run["phases"]
    lines.append(
        f"- {first['steps']:,} steps of {first['batch_size']} windows of {first['length']} tokens, "
        f"then {second['steps']:,} of {second['batch_size']} windows of {second['length']}; "
        f"lr {run['lr']:g}."
    )
    return "\n".join(lines)


def bert_losses() -> str:
    """The loss and the accuracy at a beta2 of 0.999."""
    return losses(BETA2S[0])


def losses(beta2: float) -> str:
    """Losses by phase, as differences to master weights."""
    rows = at_beta2(beta2)
    reference = rows[REFERENCE]
    cells = []
    for name, runs in rows.items():
        if name == REFERENCE:
            ends = [[at_end_of(run.record, phase) for run in runs] for phase in (0, 1)]
            own = [f"{statistics.fmean(end):.4f}" for end in ends]
        else:
            twins = {run.record["run"]["seed"]: run.record for run in reference}

            def first(run: Found, twins: dict[int, Any] = twins) -> float | None:
                other = twins.get(run.record["run"]["seed"])
                return at_end_of(run.record, 0) - at_end_of(other, 0) if other else None

            own = [mean(runs, first, 4), mean(runs, lambda run: run.gap, 4)]
        cells.append(
            (
                name,
                *own,
                f"{runs[0].bytes:.2f}",
            )
        )
    head = ("", "loss, 128 tokens", "loss, 512 tokens", "bytes")
    return table(head, cells) + "\n\n" + machine(reference[0].record)


def bert_errors() -> str:
    """What meters and the witness say, of the first seed."""
    cells = []
    for name, runs in at_beta2(BETA2S[0]).items():
        if name not in ("released", "fp16"):  # as compact, and as master weights
            run = runs[0]
            lost = late(run, "lost") or 0.0
            cells.append(
                (
                    name,
                    f"{late(run, 'ratio') or 0.0:.4f}",
                    percent(lost, 2),
                    witnessed("second_moment", ".3f")(run),
                    witnessed("displacement_matrices", ".1e")(run),
                    witnessed("displacement_vectors", ".1e")(run),
                )
            )
    head = (
        "beta2 0.999", "EDQ ratio", "lost", "v over exact",
        "displacement, matrices", "displacement, vectors",
    )  # fmt: skip
    return table(head, cells)
