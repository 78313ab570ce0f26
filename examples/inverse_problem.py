"""A density from its moments: an inverse problem with the Hilbert matrix.

    python examples/inverse_problem.py [picture.png]

The moments of a polynomial on [0, 1] are H a, with the Hilbert matrix H and the coefficients a. The
condition of H of size 16 is 2e22, so that the moments must be known, and solved, to more bits than
float64 has.
"""

from __future__ import annotations

import sys
import time
from fractions import Fraction
from math import comb
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import mcftensor as mcf

SIZE = 16


def coefficients(size: int) -> list[Fraction]:
    """Of 30 x² (1 - x)² (1 + T), with the Chebyshev polynomial T of degree size - 5 on [0, 1]."""
    n = size - 5
    chebyshev = [
        Fraction((-1) ** (n - k) * n * comb(n + k, 2 * k) * 4**k, n + k) for k in range(n + 1)
    ]
    chebyshev[0] += 1
    found = [Fraction(0)] * size
    for i, c in enumerate(chebyshev):
        for j, b in ((2, 30), (3, -60), (4, 30)):
            found[i + j] += c * b
    return found


def solved(size: int, format: mcf.Format | None) -> list[Fraction]:
    """The coefficients, from moments that are rounded to a format, or to float64."""
    a = coefficients(size)
    hilbert = [[Fraction(1, i + j + 1) for j in range(size)] for i in range(size)]
    moments = [sum(h * x for h, x in zip(row, a, strict=True)) for row in hilbert]
    kind = format or mcf.fp64x2
    system: list[Tensor] = [mcf.exact.from_exact(z, kind) for z in (hilbert, moments)]
    if format is None:
        system = [mcf.as_plain(x, torch.float64) for x in system]
    return list(mcf.exact.to_fraction(torch.linalg.solve(*system)))


def values(a: list[Fraction], x: Tensor) -> list[float]:
    """The polynomial, exactly."""
    found = []
    for point in x.tolist():
        total = Fraction(0)
        for c in reversed(a):
            total = total * Fraction(point) + c
        found.append(float(total))
    return found


def main(picture: str | None = None, size: int = SIZE) -> None:
    """Print the error of each format, and draw the densities."""
    torch.set_num_threads(1)
    x = torch.linspace(0, 1, 201, dtype=torch.float64)
    exact = values(coefficients(size), x)
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axis.plot(x.numpy(), exact, color="0.7", linewidth=5, label="exact")
    for name, format in (("float64", None), ("fp64x2", mcf.fp64x2)):
        begin = time.process_time()
        found = values(solved(size, format), x)
        seconds = time.process_time() - begin
        worst = max(abs(a - b) for a, b in zip(found, exact, strict=True))
        print(f"{name:<8} largest error {worst:.0e}, {seconds:.1f} s")
        axis.plot(x.numpy(), found, linewidth=1.3, label=name)
    axis.set(xlabel="x", ylabel="density", ylim=(-3, 6))
    axis.set_title(f"A density from {size} moments")
    axis.legend()
    if picture is not None:
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
