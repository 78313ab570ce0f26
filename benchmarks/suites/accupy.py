"""accupy's dot products and sums of large condition, with the conditions of its tests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mcftensor as mcf
from mcftensor.arithmetic.eft import two_prod

CONDITIONS = re.compile(r'parametrize\("cond", \[([^\]]*)\]\)')
LENGTH = re.compile(r"generate_ill_conditioned_dot_product\((\d+), cond")
TOLERANCE = re.compile(r"< ([\d.e-]+) \* abs\(ref\)")
FORMATS = ("fp64x2", "fp64x3")


def parameters(folder: Path) -> tuple[list[float], int, float]:
    """All conditions, the length, and the tolerance of the tests."""
    text = "".join((folder / f"test/test_{x}.py").read_text() for x in ("dot", "sums"))
    conditions = {float(x) for group in CONDITIONS.findall(text) for x in group.split(",")}
    return sorted(conditions), int(LENGTH.findall(text)[0]), float(TOLERANCE.findall(text)[0])


def dot_product(length: int, condition: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors whose product has nearly a condition (Ogita, Rump and Oishi 2005, Algorithm 6.1)."""
    rng = np.random.default_rng(seed)
    half, bits = length // 2, math.log2(condition)
    exponents = np.rint(rng.random(half) * bits / 2)
    exponents[0], exponents[-1] = round(bits / 2) + 1, 0
    x = [*((2 * rng.random(half) - 1) * 2**exponents)]
    y = [*((2 * rng.random(half) - 1) * 2**exponents)]
    total = sum((Fraction(a) * Fraction(b) for a, b in zip(x, y, strict=True)), Fraction(0))
    for e in np.rint(np.linspace(bits / 2, 0, length - half)):
        a = float((2 * rng.random() - 1) * 2**e)
        b = float((Fraction((2 * rng.random() - 1) * 2**e) - total) / Fraction(a))
        x.append(a)
        y.append(b)
        total += Fraction(a) * Fraction(b)
    order = rng.permutation(length)
    left, right = (torch.tensor(z, dtype=torch.float64)[order] for z in (x, y))
    return left, right


def _error(found: Tensor, exact: Fraction) -> float:
    return float(abs(mcf.exact.to_fraction(found) - exact) / abs(exact))


def run(folder: Path) -> dict[str, Any]:
    """Relative errors of each way to a dot product and to a sum, by condition."""
    conditions, length, tolerance = parameters(folder)
    rows = []
    for asked in conditions:
        x, y = dot_product(length, asked)
        products = [Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        exact = sum(products, Fraction(0))
        high, low = two_prod(x, y)
        summands = torch.cat([high, low])
        ways: dict[str, Callable[[], Tensor]] = {
            "dot, float64": partial(torch.dot, x, y),
            "dot, mcf.exact": partial(mcf.exact.dot, x, y),
            "sum, float64": summands.sum,
            "sum, mcf.exact": partial(mcf.exact.sum, summands),
        }
        for name in FORMATS:
            format = mcf.Format.from_name(name)
            a, b, c = (mcf.as_expansion(z, format) for z in (x, y, summands))
            ways[f"dot, {name}"] = partial(torch.dot, a, b)
            ways[f"sum, {name}"] = c.sum
        rows.append(
            {
                "condition": float(2 * sum(map(abs, products)) / abs(exact)),
                "asked": asked,
                "errors": {name: _error(way(), exact) for name, way in ways.items()},
            }
        )
    return {"length": length, "tolerance": tolerance, "rows": rows}
