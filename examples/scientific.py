"""Numbers of 48 and 106 bits where float32 and float64 are too short, next to exact arithmetic.

    python examples/scientific.py

A dot product that cancels, a linear system by iterative refinement, and a chaotic orbit.
"""

from __future__ import annotations

import decimal
import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import mcftensor as mcf

Kind = torch.dtype | mcf.Format
KINDS: dict[str, Kind] = {
    "float32": torch.float32,
    "fp32x2": mcf.fp32x2,
    "float64": torch.float64,
    "fp64x2": mcf.fp64x2,
}


def numbers(values: Any, kind: Kind) -> Tensor:
    """Exact values, rounded once."""
    if isinstance(kind, mcf.Format):
        return mcf.exact.from_exact(values, kind)
    return mcf.as_plain(mcf.exact.from_exact(values, mcf.fp64x2), kind)


def dot_product(length: int = 100) -> None:
    """Integers that float32 holds, so that only the arithmetic differs."""
    draw = random.Random(0)

    def integers() -> list[int]:
        return [draw.randrange(2**24) << draw.randrange(16) for _ in range(length)]

    left, right = integers(), integers()
    pairs = [*zip(left, right, strict=True), *((a, -b) for a, b in zip(left, right, strict=True))]
    pairs.append((1, 1))
    draw.shuffle(pairs)
    left, right = ([*column] for column in zip(*pairs, strict=True))
    largest = max(abs(a * b) for a, b in pairs)
    print(f"x · y of {len(pairs)} products of up to {largest:.0e}, of which only a 1 is left")
    for name, kind in KINDS.items():
        total = (numbers(left, kind) * numbers(right, kind)).sum()
        print(f"  {name:<10} {float(total):.6g}")


def linear_system(size: int = 11, sweeps: int = 5) -> None:
    """Solve a system by iterative refinement (J. H. Wilkinson, 1963): solve, and correct by the
    residual.

    A residual is the remainder of a cancellation, and is as accurate as its precision.
    """
    scale = math.lcm(*range(1, 2 * size))  # All entries become integers, which float64 holds.
    matrix = [[scale // (i + j + 1) for j in range(size)] for i in range(size)]
    solution = [*range(1, size + 1)]
    right = [sum(a * x for a, x in zip(row, solution, strict=True)) for row in matrix]

    plain = numbers(matrix, torch.float64)
    factors = torch.linalg.lu_factor(plain)
    condition = torch.linalg.cond(plain).item()
    print(f"\nHilbert matrix of size {size}, condition {condition:.0e}: relative error of x")
    print(f"  {'residuals':<10} " + "".join(f"{f'sweep {i}':>9}" for i in range(sweeps + 1)))
    for name in ("float64", "fp64x2"):
        a, b = numbers(matrix, KINDS[name]), numbers(right, KINDS[name])
        x = torch.zeros_like(b)
        errors = []
        for _ in range(sweeps + 1):
            residual = mcf.as_plain(b - (a * x).sum(1))
            x = x + torch.linalg.lu_solve(*factors, residual[:, None])[:, 0]
            found = mcf.exact.to_fraction(mcf.as_expansion(x, mcf.fp64x2))
            pairs = zip(found, solution, strict=True)
            errors.append(float(max(abs(got / wanted - 1) for got, wanted in pairs)))
        print(f"  {name:<10} " + "".join(f"{error:>9.0e}" for error in errors))


def orbit(make: Callable[[str], Any], steps: int) -> Iterator[Any]:
    """The map of M. Hénon (1976), in numbers of any kind: x, y → 1 − 1.4x² + y, 0.3x."""
    a, b, one, x, y = (make(value) for value in ("1.4", "0.3", "1", "0", "0"))
    for _ in range(steps):
        x, y = one - a * x * x + y, b * x
        yield x


def chaos(steps: int = 220) -> None:
    """Iterate a map whose errors grow by half at every step, until no digit is right.

    The same orbit in decimals of 200 digits is the reference.
    """
    with decimal.localcontext(decimal.Context(prec=200)):
        reference = [float(x) for x in orbit(decimal.Decimal, steps)]
    print(f"\nOrbit of the Hénon map over {steps} steps: right to 0.01")
    for name, kind in KINDS.items():
        found = orbit(functools.partial(numbers, kind=kind), steps)
        wrong = (i for i, x in enumerate(found) if abs(float(x) - reference[i]) > 0.01)
        print(f"  {name:<10} for {next(wrong, steps):3} steps")


def main() -> None:
    """Run all three."""
    dot_product()
    linear_system()
    chaos()


if __name__ == "__main__":
    main()
