"""A Gaussian process whose kernel is too ill-conditioned for float64.

    python examples/gaussian_process.py [picture.png]

A smooth kernel over near points has tiny eigenvalues. In float64 its Cholesky factor fails, unless
a jitter is added to the diagonal, which limits what the process can learn. In fp64x2 it does not.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import mcftensor as mcf

COUNTS = (4, 6, 8, 10, 12, 14, 16, 18, 20)
LENGTH = 1.0
JITTERS = (1e-10, 1e-12, 1e-14, 0.0)


def target(x: Tensor) -> Tensor:
    """What is to be learnt from its values at some points."""
    return torch.sin(3 * x) + x * x


def kernel(x: Tensor, y: Tensor) -> Tensor:
    """exp(-d²/2) of distances, over the length squared."""
    d = (x.unsqueeze(1) - y.unsqueeze(0)) / LENGTH
    return torch.exp(-(d * d) / 2)


def error(count: int, jitter: float, format: mcf.Format | None) -> float:
    """The largest error of the posterior mean between points; NaN if there is no factor."""
    inner = torch.linspace(-1, 1, count, dtype=torch.float64)
    outer = torch.linspace(-0.97, 0.97, 41, dtype=torch.float64)
    x, z = (t if format is None else mcf.as_expansion(t, format) for t in (inner, outer))
    matrix = kernel(x, x) + jitter * torch.eye(count, dtype=torch.float64)
    try:
        factor = torch.linalg.cholesky(matrix)
    except RuntimeError:
        return float("nan")
    half = torch.linalg.solve_triangular(factor, target(x).unsqueeze(1), upper=False)
    weights = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    mean = (kernel(z, x) @ weights).squeeze(1)
    return float((mean - target(z)).abs().max())


def main(picture: str | None = None, counts: tuple[int, ...] = COUNTS) -> None:
    """Print and draw the error of the mean, by how many points it has."""
    torch.set_num_threads(1)
    ways: dict[str, tuple[float, mcf.Format | None]]
    ways = {f"float64, jitter {j:g}": (j, None) for j in JITTERS}
    ways["fp64x2, no jitter"] = 0.0, mcf.fp64x2
    print(f"{'points':<24}" + "".join(f"{n:>9}" for n in counts))
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, (jitter, format) in ways.items():
        begin = time.process_time()
        errors = [error(n, jitter, format) for n in counts]
        seconds = time.process_time() - begin
        print(f"{name:<24}" + "".join(f"{e:>9.0e}" for e in errors) + f"  {seconds:.1f} s")
        axis.semilogy(counts, errors, marker="o", markersize=4, label=name)
    axis.set(xlabel="points", ylabel="largest error of the mean")
    axis.set_title("A Gaussian process with a smooth kernel")
    axis.legend()
    if picture is not None:
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
