"""A deep zoom into the Mandelbrot set, where neighbouring pixels are one number in float64.

    python examples/mandelbrot.py [picture.png]

The same view in float64 and in fp64x2. It is 9e-16 wide: 220 columns share 9 float64 numbers.
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

CENTRE = "-0.743643887037158704752191506114774", "0.131825904205311970493132056385139"
WIDTH = 2.0**-50
PIXELS = 220
PASSES = 12_000
STRIDE = 20
"""Passes between two looks at which points have left."""


def points(format: mcf.Format | None, pixels: int) -> tuple[Tensor, Tensor]:
    """The centres of pixels, row by row; in float64 if there is no format."""
    steps = (torch.arange(pixels, dtype=torch.float64) - pixels // 2) * (WIDTH / pixels)
    x, y = (mcf.exact.from_exact(c, mcf.fp64x2) + steps for c in CENTRE)
    columns, rows = x.repeat(pixels), y.flip(0).repeat_interleave(pixels)
    if format is None:
        return mcf.as_plain(columns), mcf.as_plain(rows)
    return mcf.as_expansion(columns, format), mcf.as_expansion(rows, format)


def escape(a: Tensor, b: Tensor, passes: int) -> Tensor:
    """Passes of z → z² + c until |z| > 8, with a fraction; all passes where it stays."""
    found = torch.full(a.shape, float(passes), dtype=torch.float64)
    left = torch.arange(len(a))
    x, y = torch.zeros_like(a), torch.zeros_like(b)
    size = torch.zeros(len(a), dtype=torch.float64)
    done = torch.zeros(len(a), dtype=torch.bool)
    for i in range(passes):
        x, y = x * x - y * y + a, (x + x) * y + b
        size = mcf.as_plain(x) ** 2 + mcf.as_plain(y) ** 2
        gone = (size > 64) & ~done
        found[left[gone]] = i + 1 - torch.log2(torch.log2(size[gone]) / 6)
        done |= gone
        if i % STRIDE == 0 and bool(done.any()):
            stay = ~done
            left, x, y, a, b = (t[stay] for t in (left, x, y, a, b))
            done = done[stay]
            if not len(left):
                break
        x, y = (torch.where(done, torch.zeros_like(t), t) for t in (x, y))
    return found


def view(format: mcf.Format | None, pixels: int, passes: int) -> Tensor:
    """Passes of each pixel."""
    return escape(*points(format, pixels), passes).view(pixels, pixels)


def main(picture: str | None = None, pixels: int = PIXELS, passes: int = PASSES) -> None:
    """Compute both views, say how many different points each has, and draw them."""
    torch.set_num_threads(1)
    views = {}
    for name, format in (("float64", None), ("fp64x2", mcf.fp64x2)):
        begin = time.process_time()
        views[name] = view(format, pixels, passes)
        seconds = time.process_time() - begin
        different = len({tuple(row) for row in views[name].tolist()})
        print(f"{name:<8} {different:4} different rows of {pixels}, {seconds:.1f} s")
    if picture is not None:
        figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
        low = min(float(v.min()) for v in views.values())
        for axis, (name, found) in zip(axes, views.items(), strict=True):
            axis.imshow(
                (found - low).sqrt().numpy(), cmap="twilight_shifted", interpolation="nearest"
            )
            axis.set_title(name)
            axis.set_axis_off()
        figure.suptitle(f"The Mandelbrot set, {WIDTH:.0e} wide")
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
