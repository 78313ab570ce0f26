"""A Kepler orbit over a million periods, in float32, fp32x2, float64 and fp64x2.

    python examples/kepler.py [picture.png]

In the coordinates of T. Levi-Civita (1920) the orbit is a rotation at a constant rate: a step is a
matrix, and 2^k steps are its power, by k squarings. The step has no error of its own, and the
rounding error grows in proportion to the number of steps.
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

ECCENTRICITY = "0.6"
STEP = 1 / 16
"""Half the eccentric anomaly of a step, in radians: 50 steps are a period."""

DOUBLINGS = 26
LONGEST = mcf.Format(torch.float64, 4)
"""In which the exact positions are computed."""

Kind = torch.dtype | mcf.Format


def entered(x: Tensor, kind: Kind) -> Tensor:
    """A number of the longest format, rounded once."""
    return mcf.as_expansion(x, kind) if isinstance(kind, mcf.Format) else mcf.as_plain(x, kind)


def position(c: Tensor, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Of half the eccentric anomaly, by its cosine and sine, in units of the larger half-axis."""
    return (1 - e) * c * c - (1 + e) * s * s, 2 * torch.sqrt(1 - e * e) * c * s


def distances(kind: Kind, doublings: int) -> list[float]:
    """How far the planet is from its place, after 1, 2, 4, ... steps."""
    e, angle = mcf.exact.from_exact([ECCENTRICITY, STEP], LONGEST)
    mine = entered(e, kind)
    c, s = (entered(f(angle), kind) for f in (torch.cos, torch.sin))
    found = []
    for _ in range(doublings + 1):
        exact = position(torch.cos(angle), torch.sin(angle), e)
        here = (mcf.as_expansion(x, LONGEST) for x in position(c, s, mine))
        x, y = (float(a - b) for a, b in zip(here, exact, strict=True))
        found.append((x * x + y * y) ** 0.5)
        c, s = c * c - s * s, 2 * c * s
        angle = angle * 2
    return found


def main(picture: str | None = None, doublings: int = DOUBLINGS) -> None:
    """Print and draw how far each format is off."""
    torch.set_num_threads(1)
    periods = [STEP * 2**k / torch.pi for k in range(doublings + 1)]
    kinds: dict[str, Kind] = {
        "float32": torch.float32,
        "fp32x2": mcf.fp32x2,
        "float64": torch.float64,
        "fp64x2": mcf.fp64x2,
    }
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    print(f"After {periods[-1]:,.0f} periods, in units of the larger half-axis:")
    for name, kind in kinds.items():
        begin = time.process_time()
        found = distances(kind, doublings)
        seconds = time.process_time() - begin
        print(f"{name:<8} off by {found[-1]:.0e}, {seconds:.1f} s")
        axis.loglog(periods, found, label=name)
    axis.set(xlabel="periods", ylabel="distance from the exact place")
    axis.set_title("A Kepler orbit of eccentricity 0.6")
    axis.legend()
    if picture is not None:
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
