"""Worst cases of expansion arithmetic: claimed bounds and the largest errors found.

Operands are made to be hard: all significands, tails at their limits and at ties, pairs that
cancel. Errors are exact, in integers. Writes `benchmarks/results/envelope.json`, which the page on
accuracy shows; fails if an error is above its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mcftensor as mcf
from common import oracle
from common.bounds import BOUNDS, MIDDLE, SIZE, magnitude, replace_zeros
from common.strategies import expansion, pair
from speed.machine import describe

ROOT = Path(__file__).parents[1]
OPERATIONS = ("add", "mul", "div", "sqrt")


def errors(operation: str, format: mcf.Format, seed: int) -> tuple[int, float]:
    """How many cases were tried, and the largest error, in units of u^n."""
    size, exponents = SIZE[format.base], MIDDLE[format.base]
    rng = np.random.default_rng([seed, OPERATIONS.index(operation)])
    if operation == "sqrt":
        x = magnitude(expansion(rng, format.base, format.terms, size, *exponents))
        return size, float(oracle.sqrt_error(mcf.expansion.sqrt(x), x).max())
    x, y = pair(rng, format.base, format.terms, size, *exponents)
    if operation == "div":
        y = replace_zeros(y)
        if format == mcf.fp16x2:  # a quotient below 1/4 has a tail among the subnormals
            x = tuple(t * 2.0**6 for t in x)
    result = getattr(mcf.expansion, operation)(x, y)
    return size, float(getattr(oracle, f"{operation}_error")(result, x, y).max())


def measure(format: mcf.Format, rounds: int) -> dict[str, Any]:
    """All operations of a format."""
    found = {}
    for operation in OPERATIONS:
        tried = [errors(operation, format, seed) for seed in range(rounds)]
        found[operation] = {
            "bound": round(BOUNDS[operation][format][0], 4),
            "worst": max(worst for _, worst in tried),
            "cases": sum(size for size, _ in tried),
        }
        print(f"{format.name} {operation}: {found[operation]}", flush=True)
    return found


def main() -> int:
    """Measure, write, and say whether all is within bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="sets of operands per operation")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/envelope.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "machine": describe("cpu", packages=()),
        "formats": {f.name: measure(f, options.rounds) for f in mcf.formats.FORMATS},
    }
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    entries = [e for operations in results["formats"].values() for e in operations.values()]
    return int(any(e["worst"] > e["bound"] for e in entries))


if __name__ == "__main__":
    sys.exit(main())
