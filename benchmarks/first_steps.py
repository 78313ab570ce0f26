"""The time of the first step of an optimizer, with and without cached kernels.

The parameters are 300 matrices of 64 x 64. Every figure is measured in separate processes: one with
an empty folder for compiled code, and then others that find the compiled code there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from speed.contenders import KNOWN
from speed.machine import describe
from speed.workloads import make_workload

CHOSEN = (
    "torch bf16, fused",
    *(f"mcf {mode}, fused" for mode in ("light", "plus", "full", "exact", "compact")),
    "mcf plus, foreach",
    "mcf plus, for-loop",
)
LATER = 20  # steps


def step_times(name: str) -> list[float]:
    """Seconds of the first step, and of those after it."""
    running = KNOWN[name].build(make_workload("matrices", "cpu"))
    times = []
    for _ in range(1 + LATER):
        running.prepare()
        start = time.perf_counter()
        running.step()
        times.append(time.perf_counter() - start)
    return times


def in_new_process(name: str, cache: Path, threads: int) -> list[float]:
    """The same, by a process that keeps compiled code in a folder."""
    environment = {**os.environ, "MCFTENSOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--of", name]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return list(map(float, json.loads(done.stdout.splitlines()[-1])))


def figures_of(name: str, processes: int, threads: int) -> dict[str, float]:
    """Medians over processes: seconds of a first step without and with compiled code, and later."""
    cold, warm, later = [], [], []
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as cache:
            first, *_ = in_new_process(name, Path(cache), threads)
            cold.append(first)
            first, *others = in_new_process(name, Path(cache), threads)
            warm.append(first)
            later.append(statistics.median(others))
    found = {"cold": cold, "warm": warm, "later": later}
    return {kind: statistics.median(times) for kind, times in found.items()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--of", choices=list(KNOWN), help="print the times of one, in this process")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/first-steps.json"))
    options = parser.parse_args()
    if options.of:
        print(json.dumps(step_times(options.of)))
        return
    torch.set_num_threads(options.threads)
    console = Console()
    record: dict[str, Any] = {"machine": describe("cpu"), "processes": options.processes}
    record["contenders"] = found = {}
    table = Table("", "no compiled code", "compiled code at hand", "later steps", title="ms")
    for name in CHOSEN:
        with console.status(name):
            found[name] = figures_of(name, options.processes, options.threads)
        table.add_row(name, *(f"{1000 * x:.1f}" for x in found[name].values()))
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
