"""Products of square matrices of this and other libraries: time, and error against rationals.

The contenders take turns, on one thread. Time is the processor time of the thread, and ratios are
to float64's own product in the same round. Errors are the largest of some elements, over the
product of magnitudes. xprec, numpy-quaddtype and mpmath are timed if they are installed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
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

BASE = "float64"
FORMATS = ("fp64x2", "fp32x3", "fp32x2", "bf16x3")
OTHERS = ("xprec", "numpy_quaddtype", "mpmath")

# The largest matrices of contenders that take a microsecond for each product of elements, and more.
MOST_OF_SLOW = {"xprec": 1024, "numpy-quaddtype": 256, "mpmath": 64}

# Elements whose error is measured.
CHECKED = 24

Pair = tuple[list[Tensor], list[Tensor]]
Call = Callable[[], Any]


def matrices(size: int, terms: int = 2) -> Pair:
    """Normal numbers of two float64 terms."""
    generator = torch.Generator().manual_seed(size)
    shape = (2, terms, size, size)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    x, y = (list(z) for z in drawn)
    for z in (x, y):
        z[1:] = [t * z[0] * 2.0**-56 for t in z[1:]]
        z[:] = mcf.expansion.renormalize(z)
    return x, y


def contenders(x: list[Tensor], y: list[Tensor]) -> dict[str, tuple[Call, Pair]]:
    """The products of two matrices in each library's own numbers, and the terms of these."""
    size = len(x[0])
    found: dict[str, tuple[Call, Pair]] = {BASE: (lambda: x[0] @ y[0], (x[:1], y[:1]))}
    a, b = (mcf.MCFTensor(z, mcf.fp64x2) for z in (x, y))
    for name in FORMATS:
        format = mcf.Format.from_name(name)
        p, q = (mcf.as_expansion(z, format) for z in (a, b))
        terms = ([*p.components], [*q.components])
        found[name] = (lambda p=p, q=q: p @ q), terms
    if find_spec("xprec") and size <= MOST_OF_SLOW["xprec"]:
        import xprec  # noqa: PLC0415  # few have it

        p, q = (sum(t.numpy().astype(xprec.ddouble) for t in z) for z in (x, y))
        found["xprec"] = (lambda p=p, q=q: p @ q), (x, y)
    if find_spec("numpy_quaddtype") and size <= MOST_OF_SLOW["numpy-quaddtype"]:
        from numpy_quaddtype import QuadPrecDType  # noqa: PLC0415  # few have it

        p, q = (sum(t.numpy().astype(QuadPrecDType()) for t in z) for z in (x, y))
        found["numpy-quaddtype"] = (lambda p=p, q=q: np.matmul(p, q)), (x, y)
    if find_spec("mpmath") and size <= MOST_OF_SLOW["mpmath"]:
        import mpmath  # noqa: PLC0415

        mpmath.mp.prec = 106
        p, q = (
            sum((mpmath.matrix(t.tolist()) for t in z), mpmath.matrix(size, size)) for z in (x, y)
        )
        found["mpmath"] = (lambda p=p, q=q: p * q), (x, y)
    return found


def fraction(result: Any, name: str, i: int, j: int) -> Fraction:
    """An element of a product, exactly."""
    if isinstance(result, mcf.MCFTensor):
        return mcf.exact.to_fraction(result[i, j])
    if isinstance(result, Tensor):
        return Fraction(result[i, j].item())
    if name == "mpmath":
        sign, mantissa, exponent, _ = result[i, j]._mpf_
        return (-1) ** sign * Fraction(int(mantissa)) * Fraction(2) ** exponent
    parts, left = Fraction(0), result[i, j]
    for _ in range(4):  # what float64 holds of it, and of what remains
        part = float(left)
        parts, left = parts + Fraction(part), left - type(left)(part)
    return parts


def error(result: Any, name: str, x: Sequence[Tensor], y: Sequence[Tensor]) -> float | None:
    """Return the binary logarithm of the largest error of some elements, relative to |A||B|."""
    size = len(x[0])
    rng, worst = np.random.default_rng(0), Fraction(0)
    for i, j in rng.integers(0, size, (CHECKED, 2)).tolist():
        row = [sum(map(Fraction, t)) for t in zip(*(t[i].tolist() for t in x), strict=True)]
        column = [sum(map(Fraction, t)) for t in zip(*(t[:, j].tolist() for t in y), strict=True)]
        products = [p * q for p, q in zip(row, column, strict=True)]
        size_of = sum(map(abs, products))
        worst = max(worst, abs(fraction(result, name, i, j) - sum(products)) / size_of)
    return math.log2(worst) if worst else None


def measured(size: int, rounds: int) -> dict[str, dict[str, float | None]]:
    """Seconds of each contender, the ratio to float64 in the same round, and the error."""
    x, y = matrices(size)
    found = contenders(x, y)
    calls = {name: call for name, (call, _) in found.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    errors = {name: error(call(), name, *terms) for name, (call, terms) in found.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            slow = times[name] and min(times[name]) > 1
            if slow and len(times[name]) > 1:
                continue
            repetitions = max(1, min(100, 2**21 // size**3))
            begin = time.thread_time()
            for _ in range(repetitions):
                call()
            times[name].append((time.thread_time() - begin) / repetitions)
    return {
        name: {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(a / b for a, b in zip(seconds, times[BASE], strict=False)),
            "error": errors[name],
        }
        for name, seconds in times.items()
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/products.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe("cpu", ("numpy", *(x.replace("_", "-") for x in OTHERS)))
    results: list[dict[str, Any]] = []
    for size in options.sizes:
        results.append({"size": size, "contenders": measured(size, options.rounds)})
        show(results[-1])
    text = json.dumps({"machine": machine, "products": results}, indent=1)
    options.out.write_text(text + "\n")


def show(result: dict[str, Any]) -> None:
    """Print what was measured."""
    table = Table("", "ms", "ratio", "log2 error", title=f"{result['size']} x {result['size']}")
    for name, x in result["contenders"].items():
        bits = "exact" if x["error"] is None else f"{x['error']:.1f}"
        table.add_row(name, f"{1e3 * x['seconds']:.2f}", f"{x['ratio']:.1f}", bits)
    Console().print(table)


if __name__ == "__main__":
    main()
