"""Every operator of PyTorch's own database over values: what computes, how exactly, what raises.

Each runs on samples of PyTorch's making and is held against the same in float64; a promise that is
broken raises. Writes `benchmarks/results/operator-matrix.json`, which the page on operators shows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch

import mcftensor as mcf
from common import operators
from speed.machine import describe

ROOT = Path(__file__).parents[1]
FORMATS = (mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2)


def measure(task: tuple[str, int]) -> tuple[str, dict[str, Any]]:
    """What became of the samples of one operator, format by format."""
    name, samples = task
    torch.set_num_threads(1)
    outcomes = {f.name: operators.run(name, f, samples) for f in FORMATS}
    return name, {
        f: {"computed": o.computed, "refused": o.refused, "units": round(o.units, 3)}
        for f, o in outcomes.items()
    }


def main() -> None:
    """Run all, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4, help="of each operator")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/operator-matrix.json"
    )
    options = parser.parse_args()
    tasks = [(name, options.samples) for name in operators.OPERATORS]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        found = dict(pool.imap_unordered(measure, tasks, chunksize=8))
    results = {
        "machine": describe("cpu", packages=()),
        "samples": options.samples,
    }
    lines = [f"    {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    head = json.dumps(results, indent=2).removesuffix("\n}")
    options.out.write_text(head + ',\n  "operators": {\n' + ",\n".join(lines) + "\n  }\n}\n")


if __name__ == "__main__":
    main()
