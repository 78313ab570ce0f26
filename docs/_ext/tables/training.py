"""Tables of trainings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tables.sources import load, machine, percent, signed, table

SEEDS = range(3)


def in_main_job(name: str = "pretrain") -> dict[str, list[dict[str, Any]]]:
    """By strategy, what each seed that ran came to."""
    runs = [load(f"{name}-seed{seed}")["strategies"] for seed in SEEDS]
    return {strategy: [run[strategy] for run in runs if strategy in run] for strategy in runs[0]}


def pretraining() -> str:
    """Validation loss of the small GPT, as the difference to master weights."""
    found = in_main_job()
    first = [runs[0]["final"] for runs in found.values()]
    record = load("pretrain-seed0")
    below = [machine(record)]
    if added := record.get("added"):
        below.append(machine(added, f"{' and '.join(added['strategies'])}: "))
    columns = {
        "EDQ ratio": [f"{final['edq_ratio']:.4f}" for final in first],
        "updates lost": [percent(final["lost"], 2) for final in first],
    }
    return "\n\n".join([main_job(found, columns), *below])


def pretraining_of_others() -> str:
    """The same with optimizers of other libraries, from the lowest memory on."""
    name = "pretrain-peers"
    found = sorted(in_main_job(name).items(), key=lambda item: bytes_of(item[1]))
    return main_job(dict(found), {}) + "\n\n" + machine(load(f"{name}-seed0"))


def bytes_of(runs: list[dict[str, Any]]) -> float:
    """Of a parameter, with its gradient."""
    size: float = runs[0]["bytes_per_parameter"]
    return size


def main_job(found: dict[str, list[dict[str, Any]]], columns: dict[str, list[str]]) -> str:
    """Losses of each seed, other columns, and bytes."""
    rows = []
    for name, *others in zip(found, *columns.values(), strict=True):
        final = [run["final"] for run in found[name]]
        cells = [
            f"{f['nats']:.4f}" if name == "master" else signed(f["difference_to_master"])
            for f in final
        ]
        cells += ["–"] * (len(SEEDS) - len(final))  # seeds that did not run
        rows.append((name, *cells, *others, f"{bytes_of(found[name]):.2f}"))
    head = ("", *(f"seed {seed}" for seed in SEEDS), *columns, "bytes a parameter")
    return table(head, rows)


# Name in the study: what is trained how, and in which types are parameters and states. Gradients
# and activations are float16 in all rows but the first.
SCALING = {
    "float32": ("float32", "float32", "float32"),
    "stochastic": ("`scalify(model)`", "float16, stochastic", "float16"),
    "scaled": ("the same, to nearest", "float16", "float16"),
    "scaled8": ("`tail=8`", "float16 and int8", "float16"),
    "pairs": ("`fp16x2`", "fp16x2", "fp16x2"),
    "weights": ("float32 states", "float16", "float32"),
    "weights8": ("the same, `tail=8`", "float16 and int8", "float32"),
    "masters": ("float32 masters", "float32, and float16 of it", "float32"),
    "fp8": ('`products="fp8"`', "float16, stochastic", "float16"),
    "fp8masters": (
        '`products="fp8"`, float32 masters', "float32, and float16 of it", "float32"
    ),
    "float16": ("unscaled", "float16", "float16"),
    "float16eps": ("unscaled, eps 1e-6", "float16", "float16"),
    "halfgrads": ("unscaled, float32 masters", "float32, and float16 of it", "float32"),
    "gradscaler": ("`torch.amp.GradScaler`", "float32, and float16 of it", "float32"),
}  # fmt: skip


def scaling() -> str:
    """Losses of the study of scaled training, as differences to float32 seed by seed."""
    result = load("scaling")
    base = {seed: run["validation"] for seed, run in result["runs"]["float32"].items()}
    earlier = result.get("earlier", {})
    rows = []
    for name, words in SCALING.items():
        runs = result["runs"][name]
        ends = {seed: run["validation"] for seed, run in runs.items()}
        if name == "float32":
            mean = f"{statistics.fmean(base.values()):.4f}"
        elif None in ends.values():
            steps = [run["steps"] + 1 for run in runs.values()]
            mean = f"NaN in step {min(steps)}" + (f" to {max(steps)}" * (len({*steps}) > 1))
        else:
            off = [end - base[seed] for seed, end in ends.items()]
            mark = "†" if earlier.get(name) else ""
            mean = f"{signed(statistics.fmean(off))} ({_range(off)}){mark}"
        zeros = [100 * run["zeros"] for run in runs.values()]
        share = sum(zeros) / len(zeros)
        rows.append((*words, mean, f"{share:.2g} %" if share else "0"))
    head = (
        "", "parameters", "states", "nats a byte, and from float32", "gradients that are zero",
    )  # fmt: skip
    note = ""
    if earlier:
        note = (
            "\n\n† Run while gradients of gains, biases and values still went by their size; on "
            f"seed 0 the rule changed losses by at most {_most_by_rule(result)}."
        )
    return table(head, rows) + note + "\n\n" + machine(result)


def _range(found: Sequence[float]) -> str:
    return f"{min(found):+.4f} to {max(found):+.4f}".replace("-", "−")


def _most_by_rule(result: dict[str, Any]) -> str:
    before = result["before_the_rule"]
    changes = {n: abs(result["runs"][n]["0"]["validation"] - x) for n, x in before.items()}
    eight = max(x for n, x in changes.items() if n.startswith("fp8"))
    others = max(x for n, x in changes.items() if not n.startswith("fp8"))
    return f"{others:.5f}, with 8-bit products {eight:.4f}"
