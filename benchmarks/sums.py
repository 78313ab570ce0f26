"""Exact sums and other sums: time for each number of elements, type and number of threads.

The contenders take turns. With one thread, time is the processor time of the thread, so that other
work on the machine counts little; with more threads it is the time of the clock. Double-double
numbers are xprec's, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mcftensor as mcf
from speed.machine import describe

BASE = "torch.sum"
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

# Elements up to which contenders that take nanoseconds for each are timed.
MOST_OF_SLOW = 10**5

Call = Callable[[], object]


def contenders(x: Tensor) -> dict[str, Call]:
    """The sums of one tensor."""
    found: dict[str, Call] = {
        BASE: lambda: torch.sum(x),
        "torch.sum, float64": lambda: torch.sum(x, dtype=torch.float64),
        "mcf.exact.sum": lambda: mcf.exact.sum(x),
        "mcf.exact.mean": lambda: mcf.exact.mean(x),
        "mcf.exact.norm": lambda: mcf.exact.norm(x),
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(x),
    }
    if x.dtype != torch.bfloat16:
        array = x.numpy()
        found["numpy.sum"] = lambda: np.sum(array)
    if x.numel() <= MOST_OF_SLOW:
        numbers = x.tolist()
        found["math.fsum, of a list"] = lambda: math.fsum(numbers)
        found["mcf.exact.cumsum"] = lambda: mcf.exact.cumsum(x, 0)
        found["torch.cumsum"] = lambda: torch.cumsum(x, 0)
        if find_spec("xprec"):
            import xprec  # noqa: PLC0415  # few have it

            doubles = x.double().numpy().astype(xprec.ddouble)
            found["xprec, double-double"] = lambda: np.sum(doubles)
    return found


def measured(x: Tensor, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each contender, and the ratio to torch.sum in the same round: medians."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    calls = contenders(x)
    times: dict[str, list[float]] = {name: [] for name in calls}
    repetitions = max(1, min(100, 10**6 // x.numel()))
    for turn in range(-1, rounds):
        for name, call in calls.items():
            begin = clock()
            for _ in range(repetitions):
                call()
            if turn >= 0:
                times[name].append((clock() - begin) / repetitions)
    return {
        name: {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(a / b for a, b in zip(seconds, times[BASE], strict=True)),
        }
        for name, seconds in times.items()
    }


def terms(dtype: torch.dtype, size: int, name: str) -> Tensor:
    """Normal numbers; or those whose exponents are spread over the range of the type."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator)
    if name == "wide":
        x = torch.ldexp(x, torch.randint(-120, 120, (size,), generator=generator))
    return x.to(dtype)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--most", type=int, default=8, help="10 to this power elements")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sums.json"))
    options = parser.parse_args()
    mcf.exact.sum(torch.zeros(1 << 21))  # compiles
    results: list[dict[str, Any]] = []
    machine = describe("cpu", ("numpy", "xprec"))
    del machine["threads"]
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, dtype in DTYPES.items():
            for size in (10**k for k in range(3, options.most + 1)):
                for kind in ("normal", "wide") if size == 10**7 else ("normal",):
                    found = measured(terms(dtype, size, kind), threads, options.rounds)
                    what = {"type": name, "size": size, "threads": threads, "terms": kind}
                    results.append(what | {"contenders": found})
                    show(results[-1])
        text = json.dumps({"machine": machine, "sums": results}, indent=1)
        options.out.write_text(text + "\n")


def show(result: dict[str, Any]) -> None:
    """Print what was measured."""
    title = f"{result['size']:.0e} {result['type']} {result['terms']}, {result['threads']} threads"
    table = Table("", "µs", "ratio", title=title)
    for name, x in result["contenders"].items():
        table.add_row(name, f"{1e6 * x['seconds']:.1f}", f"{x['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
