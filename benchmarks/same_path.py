"""Steps of AdamW over expansions, relative to PyTorch's float32 step in the same path.

All contenders take turns in one process. Times are processor time, so that other programs on the
machine disturb them less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

import mcftensor as mcf
from speed.machine import describe

SHAPES = {"300 matrices of 64 x 64": (300, 64), "40 matrices of 512 x 512": (40, 512)}
PATHS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x,
    "plus": lambda x: mcf.as_expansion(x.bfloat16(), mcf.bf16x2),
    "exact": lambda x: mcf.as_expansion(x, mcf.bf16i16),
    "compact": lambda x: mcf.as_expansion(x, mcf.bf16i8),
}
FIRST = 5  # steps that make states and kernels


def made(kind: str, count: int, width: int, path: dict[str, bool]) -> Optimizer:
    """An optimizer whose parameters have gradients."""
    torch.manual_seed(0)
    parameters = []
    for _ in range(count):
        p = Parameter(KINDS[kind](0.02 * torch.randn(width, width)))
        p.grad = (1e-3 * torch.randn(width, width)).to(p.dtype)
        parameters.append(p)
    optimizer = AdamW(parameters, lr=1e-4, **path)
    return mcf.collage(optimizer, kind) if kind in ("plus", "compact") else optimizer


def ratios(count: int, width: int, path: dict[str, bool], steps: int) -> dict[str, float]:
    """Return median times of a step over the time of float32, and the latter in seconds."""
    optimizers = {kind: made(kind, count, width, path) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in range(FIRST + steps):
        for kind, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            if step >= FIRST:
                times[kind].append(time.process_time() - start)
    medians = {kind: statistics.median(x) for kind, x in times.items()}
    return {kind: x / medians["float32"] for kind, x in medians.items() if kind != "float32"} | {
        "seconds of float32": medians["float32"]
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=21, help="that are timed (default: 21)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/same-path.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console, found = Console(), {}
    table = Table("", "plus", "exact", "compact", title="times PyTorch's float32")
    for shape, (count, width) in SHAPES.items():
        for path, how in PATHS.items():
            with console.status(f"{shape}, {path}"):
                one = found[f"{shape}, {path}"] = ratios(count, width, how, options.steps)
            table.add_row(f"{shape}, {path}", *(f"{one[kind]:.2f}" for kind in list(KINDS)[1:]))
    console.print(table)
    record: dict[str, Any] = {"machine": describe("cpu"), "steps": options.steps, "ratios": found}
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
