"""A float32 solver whose residuals are fp32x2: 13 digits on a device that has no float64.

    python examples/refinement.py [picture.png]

A system is solved in float32, and the solution corrected by its residual, again and again (J. H.
Wilkinson, 1963). Within `mcf.without_float64()` no float64 tensor is made.
"""

from __future__ import annotations

import sys
import time
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import mcftensor as mcf

SIZE, SWEEPS = 200, 9


def system(size: int) -> tuple[Tensor, list[Fraction], Tensor]:
    """A discrete -u'' + 2u', its solution, and its right side, which is exact in fp32x2."""
    rows = torch.diag(torch.full((size,), 2.0))
    rows += torch.diag(torch.full((size - 1,), -1 - 2.0**-7), -1)
    rows += torch.diag(torch.full((size - 1,), -1 + 2.0**-7), 1)
    solution = [Fraction((37 * i * i + 11 * i) % 1009, 1024) for i in range(size)]
    right = [
        sum(Fraction(c) * x for c, x in zip(row, solution, strict=True) if c)
        for row in rows.tolist()
    ]
    return rows, solution, mcf.exact.from_exact(right, mcf.fp32x2)


@mcf.without_float64()
def refined(matrix: Tensor, right: Tensor, sweeps: int, in_terms: bool) -> list[Tensor]:
    """Solutions after each sweep, with residuals of two terms or of float32."""
    factors = torch.linalg.lu_factor(matrix)
    b = right if in_terms else mcf.as_plain(right)
    x = torch.zeros_like(b)
    a = mcf.as_expansion(matrix, mcf.fp32x2) if in_terms else matrix
    found = []
    for _ in range(sweeps):
        residual = mcf.as_plain(b - a @ x)
        x = x + torch.linalg.lu_solve(*factors, residual[:, None])[:, 0]
        found.append(x)
    return found


def errors(found: list[Tensor], solution: list[Fraction]) -> list[float]:
    """The largest errors, over the largest number."""
    largest = max(solution)
    return [
        float(
            max(abs(a - b) for a, b in zip(mcf.exact.to_fraction(x), solution, strict=True))
            / largest
        )
        for x in found
    ]


def main(picture: str | None = None, size: int = SIZE, sweeps: int = SWEEPS) -> None:
    """Print and draw the errors after each sweep."""
    torch.set_num_threads(1)
    matrix, solution, right = system(size)
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, in_terms in (("float32", False), ("fp32x2", True)):
        begin = time.process_time()
        found = refined(matrix, right, sweeps, in_terms)
        seconds = time.process_time() - begin
        wrong = errors(found, solution)
        print(f"{name:<8}" + "".join(f"{e:>9.0e}" for e in wrong) + f"  {seconds:.2f} s")
        axis.semilogy(range(1, sweeps + 1), wrong, marker="o", label=f"residuals in {name}")
    axis.set(xlabel="sweep", ylabel="largest relative error")
    axis.set_title(f"{size} equations, solved in float32")
    axis.legend()
    if picture is not None:
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
