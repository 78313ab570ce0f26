"""What optimizer steps lose: plain bf16 and fp32 against expansions, all against float64.

Prints the tables and writes them as JSON. `--count` weights for each of the two kinds, normal ones
with deviation 0.02 and ones.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mcftensor as mcf
from common.probes import PATHS, Strategy, decay, displacement, frozen_weight, second_moment

EXPANSIONS = [
    *(Strategy(mcf.bf16x2, path, mode) for mode in ("light", "plus", "full") for path in PATHS),
    *(Strategy(mcf.bf16x3, path, "full") for path in PATHS),
    *(
        Strategy(mcf.Format(torch.bfloat16, 2, "stochastic"), path, "full")
        for path in ("for-loop", "fused")
    ),
]
PLAIN = [Strategy(torch.bfloat16), Strategy(torch.float32, "for-loop")]
SETTINGS = [(1e-4, 0.999), (1e-5, 0.95)]


def measure(count: int) -> dict[str, Any]:
    """Every probe for every strategy."""
    everything = [*PLAIN, *EXPANSIONS]
    results: dict[str, Any] = {
        "frozen weight": {s.name: frozen_weight(s) for s in track(everything, "frozen weight")},
        "decay": {
            s.name: {kind: decay(s, kind) for kind in ("ones", "small")}
            for s in track(everything, "decay")
        },
        "second moment": {
            s.name: {beta2: second_moment(s, beta2) for beta2 in (0.95, 0.99, 0.999)}
            for s in track(
                [Strategy(torch.bfloat16), Strategy(mcf.bf16x2, "fused", "plus")], "second moment"
            )
        },
        "displacement": {},
    }
    for lr, beta2 in SETTINGS:
        for kind in ("small", "ones"):
            errors = {}
            for s in track(everything, f"displacement, lr {lr:g}, {kind}"):
                errors |= displacement([s], kind, lr, beta2, count)
            results["displacement"][f"lr {lr:g}, beta2 {beta2:g}, {kind}"] = errors
    return results


def show(results: dict[str, Any], console: Console) -> None:
    """The results as tables."""
    table = Table("strategy", title="Error of the displacement after 1000 steps, decay 0.1")
    columns = results["displacement"]
    for name in columns:
        table.add_column(name, justify="right")
    for strategy in next(iter(columns.values())):
        table.add_row(strategy, *(f"{errors[strategy]:.1e}" for errors in columns.values()))
    console.print(table)

    table = Table(
        "strategy",
        "weight of 1, moved",
        "decay of ones",
        "moved",
        "decay of small",
        "moved",
        title="100 steps of constant gradient; 1000 steps of pure decay (exact ratio 0.99005)",
    )
    for strategy, moved in results["frozen weight"].items():
        decayed = results["decay"][strategy]
        numbers = [moved, *decayed["ones"], *decayed["small"]]
        table.add_row(strategy, *(f"{x:.5f}" for x in numbers))
    console.print(table)

    table = Table("strategy", "0.95", "0.99", "0.999", title="Second moment over the exact one")
    for strategy, ratios in results["second moment"].items():
        table.add_row(strategy, *(f"{x:.4f}" for x in ratios.values()))
    console.print(table)


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=32768, help="weights of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/accuracy.json"))
    options = parser.parse_args()
    torch.manual_seed(0)  # of stochastic rounding
    results = {
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "count": options.count,
        **measure(options.count),
    }
    show(results, Console(width=160))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
