"""Elementary functions of formats beyond 48 bits: largest errors found, and time.

Errors are measured against mpmath, on random bit patterns of all sizes. Time is the time of the
thread for an element of a large tensor; float64's own function runs on the same numbers, in turn.
Writes
`benchmarks/results/functions.json`, which the page on accuracy shows; fails if an error is above
its bound.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mcftensor as mcf
from common.elementary import FUNCTIONS, PAIRS, bound, largest_error
from speed.machine import describe

ROOT = Path(__file__).parents[1]
FORMATS = (mcf.fp64x2, mcf.fp32x3)
ELEMENTS = 1 << 20
ROUNDS = 5
OF_FLOAT64: dict[str, Callable[..., Any]] = {
    "sinpi": lambda x: torch.sin(math.pi * x),
    "cospi": lambda x: torch.cos(math.pi * x),
    "cbrt": lambda x: x.pow(1 / 3),
    "gamma": lambda x: x.lgamma().exp(),
}
"""PyTorch's own, of functions that it lacks."""


def _seconds(function: Callable[[], Any]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


def _arguments(name: str) -> list[torch.Tensor]:
    """Return numbers in the domain of the function."""
    torch.manual_seed(0)
    count = 2 if name in PAIRS else 1
    low, high = {"acosh": (1.0, 9.0), "pow": (0.1, 4.0)}.get(name, (0.01, 0.99))
    return [low + (high - low) * torch.rand(ELEMENTS, dtype=torch.float64) for _ in range(count)]


def times(name: str) -> dict[str, float]:
    """Nanoseconds of an element in float64 and in fp64x2; and their ratio in the median round."""
    function = (FUNCTIONS | PAIRS)[name][0]
    plain = _arguments(name)
    values = [mcf.as_expansion(x, mcf.fp64x2) for x in plain]
    of_float64 = OF_FLOAT64.get(name, function)
    of_float64(*plain), function(*values)  # which compiles
    rounds = [
        (_seconds(lambda: of_float64(*plain)), _seconds(lambda: function(*values)))
        for _ in range(ROUNDS)
    ]
    own, ours = (statistics.median(x) / ELEMENTS * 1e9 for x in zip(*rounds, strict=True))
    ratio = statistics.median(y / x for x, y in rounds)
    return {"float64": round(own, 2), "fp64x2": round(ours, 2), "ratio": round(ratio, 1)}


def main() -> int:
    """Measure, write, and say whether all is within bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="arguments of each range")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/functions.json")
    parser.add_argument("names", nargs="*", help="functions to measure anew; all if none is named")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if options.names:
        found = json.loads(options.out.read_text())["functions"]
    for name in options.names or FUNCTIONS | PAIRS:
        worst = {f.name: round(largest_error(name, f, options.count), 4) for f in FORMATS}
        found[name] = {"worst": worst, "time": times(name)}
        print(name, found[name], flush=True)
    results = {
        "machine": describe("cpu", packages=()),
        "bounds": {f.name: bound(f) for f in FORMATS},
        "functions": found,
    }
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(e["worst"][f.name] > bound(f) for e in found.values() for f in FORMATS))


if __name__ == "__main__":
    sys.exit(main())
