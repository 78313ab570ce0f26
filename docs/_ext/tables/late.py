"""Tables of the trainings of `studies/late.py`, from the runs that have a record."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from questions.intervals import mean_of
from tables.sources import RESULTS, machine, percent, signed, table

Record = dict[str, Any]
WEIGHTS = {"bf16": "to nearest", "round": "balanced", "exact": "`bf16i16`"}
TAILS = {"never": "none", "5%": "last 5 %", "10%": "last 10 %", "20%": "last 20 %"}
TAILS["meter"] = "by the meter"
SIZES = {"main": "1.3 M", "large": "4.8 M"}
SHARES = {"never": 0.0, "5%": 0.05, "10%": 0.1, "20%": 0.2}


@dataclass(frozen=True)
class Case:
    """The runs of one size, of one kind of weights, with tails at one time."""

    weights: str
    tails: str
    records: dict[int, Record]  # by seed

    @property
    def name(self) -> tuple[str, str]:
        """The first two cells of its row."""
        return WEIGHTS[self.weights], self.tails_name

    @property
    def tails_name(self) -> str:
        """When tails come."""
        return "all steps" if self.weights == "exact" else TAILS[self.tails]

    def mean(self, figure: Callable[[Record], float | None]) -> float | None:
        """The mean of a figure over the seeds that have it."""
        found = [x for record in self.records.values() if (x := figure(record)) is not None]
        return statistics.fmean(found) if found else None


def cases(size: str) -> list[Case]:
    """All cases with a record, those without tails first."""
    found: dict[tuple[str, str], dict[int, Record]] = {}
    for path in sorted((RESULTS / "late").glob(f"{size}-*.json")):
        record = json.loads(path.read_text())
        key = record["run"]["strategy"], record["tails"]
        found.setdefault(key, {})[record["run"]["seed"]] = record
    order = product(WEIGHTS, TAILS)
    return [Case(*key, found[key]) for key in order if key in found]


def final(record: Record) -> float:
    """The validation loss after the last step."""
    return float(record["result"]["validation"][-1][1])


def gaps(case: Case, reference: Case) -> dict[int, float]:
    """By seed, the loss less that of another case."""
    both = [seed for seed in case.records if seed in reference.records]
    return {seed: final(case.records[seed]) - final(reference.records[seed]) for seed in both}


def closed(case: Case, without: Case, reference: Case) -> list[float]:
    """What tails recover of the gap without them, of each seed that has all three."""
    gap = gaps(without, reference)
    return [-x / gap[seed] for seed, x in gaps(case, without).items() if gap.get(seed)]


def share(record: Record) -> float | None:
    """Of steps times parameters, those with tails; None if the record does not say."""
    if record["run"]["strategy"] == "exact":
        return 1.0
    if record["tails"] in SHARES:
        return SHARES[record["tails"]]
    changes = record["result"].get("changes")
    if not changes:
        return None
    steps = record["run"]["steps"]
    return sum(x["share"] * (steps - x["step"]) / steps for x in changes)


def size_of(record: Record) -> float:
    """Bytes a parameter, after the last step."""
    return float(record["result"]["bytes_per_parameter"])


def late_main() -> str:
    """The losses of the main job."""
    return losses("main")


def losses(size: str) -> str:
    """By case: cost, bytes, the loss less that of tails from the first step on, and why."""
    found = cases(size)
    by_name = {(case.weights, case.tails): case for case in found}
    reference = by_name["exact", "never"]
    rows = []
    for case in found:
        if case.tails == "5%":
            continue  # like none
        without = by_name[("exact" if case is reference else case.weights), "never"]
        before, after = without.mean(size_of), case.mean(size_of)
        assert before is not None
        assert after is not None
        cost = case.mean(share)
        own = [*gaps(case, reference).values()] or [math.nan]
        recovered = [*gaps(case, without).values()] or [math.nan]
        part = closed(case, without, reference) if case.weights == "bf16" else []
        part_mean, part_half = mean_of(part) if part else (None, None)
        is_late = case is not without
        rows.append(
            (
                *case.name,
                percent(cost),
                memory(before, after, cost),
                f"{case.mean(final):.4f}" if case is reference else signed(*mean_of(own)),
                signed(*mean_of(recovered)) if is_late else "–",
                percent(part_mean, half=part_half) if is_late and part else "–",
                number(case.mean(witnessed("displacement_matrices")), ".1e"),
                f"{len(case.records)}",
            )
        )
    head = (
        "bf16 weights", "tails", "steps × parameters with tails", "bytes (mean)",
        "nats, and from tails in all steps", "nats from none", "gap closed",
        "displacement, matrices", "seeds",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(next(iter(reference.records.values())))


def memory(before: float, after: float, cost: float | None) -> str:
    """Bytes a parameter, before tails come and after, and their mean over the steps."""
    if after == before:
        return f"{after:.0f}"
    mean = "" if cost is None else f" ({before + cost * (after - before):.1f})"
    return f"{before:.0f} → {after:.0f}{mean}"


def sizes_run() -> dict[str, str]:
    """The sizes with records, and their names."""
    return {size: name for size, name in SIZES.items() if cases(size)}


def number(x: float | None, form: str) -> str:
    """A number, or a dash."""
    return "–" if x is None else f"{x:{form}}"


def witnessed(figure: str) -> Callable[[Record], float | None]:
    """A figure of the comparison with float64."""
    return lambda record: record["result"]["witness"].get(figure)
