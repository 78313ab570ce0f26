"""QD's eight checks of its arithmetic: the same mathematics, with the tolerances of its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from mpmath import mp
from torch import Tensor

import mcftensor as mcf

FORMATS = ("fp32x2", "fp32x3", "fp64x2")
TOLERANCE = re.compile(r"return \(\S+ < ([\d.]+) \* T::_eps\);")


def tolerances(folder: Path) -> list[float]:
    """In units of eps, of each check in turn."""
    text = (folder / "tests/qd_test.cpp").read_text().replace("to_double(y)", "y")
    found = [float(x) for x in TOLERANCE.findall(text)]
    if len(found) != len(CHECKS):
        raise ValueError(f"{folder}: {len(found)} checks in qd_test.cpp, not {len(CHECKS)}")
    return found


class Arithmetic:
    """Numbers of a format, its eps, and exact constants."""

    def __init__(self, format: mcf.Format) -> None:
        self.format = format
        self.eps = 2.0 ** (2 - format.precision)  # QD's: 2^-104 of 106 bits

    def __call__(self, x: float | Fraction) -> Tensor:
        """A number."""
        return mcf.exact.from_exact(x, self.format)

    def distance(self, x: Tensor, exact: Callable[[], Any]) -> float:
        """How far a number is from an exact one, in units of eps."""
        with mp.workprec(600):
            q = mcf.exact.to_fraction(x)
            return float(abs(mp.mpf(q.numerator) / q.denominator - exact()) / self.eps)

    def small(self, x: Tensor, units: float = 1) -> bool:
        """Whether a number is below so many eps."""
        return abs(float(x)) <= units * self.eps


def polynomial(n: Arithmetic) -> float:
    """A root of 1 + 2x + ... + 8x^7 by Newton's method, and the polynomial there."""

    def value(x: Tensor) -> Tensor:
        y = n(8)
        for c in range(7, 0, -1):
            y = y * x + c
        return y

    def slope(x: Tensor) -> Tensor:
        y = n(8 * 7)
        for c in range(7, 1, -1):
            y = y * x + c * (c - 1)
        return y

    x = n(0)
    for _ in range(60):
        step = value(x) / slope(x)
        x = x - step
        if n.small(step):
            break
    return n.distance(value(x), lambda: 0)


def machin(n: Arithmetic) -> float:
    """pi = 16 arctan(1/5) - 4 arctan(1/239), by series."""

    def arctan(inverse: int) -> Tensor:
        power, total, k = 1 / n(inverse), n(0), 0
        square = power * power
        while not n.small(power):
            term = power / (2 * k + 1)
            total = total - term if k % 2 else total + term
            power, k = power * square, k + 1
        return total

    return n.distance(4 * (4 * arctan(5) - arctan(239)), lambda: mp.pi)


def salamin_brent(n: Arithmetic) -> float:
    """pi by arithmetic and geometric means."""
    a, b, s, m = n(1), torch.sqrt(n(0.5)), n(0.5), 1.0
    p = 2 * a * a / s
    for _ in range(20):
        m *= 2
        mean, product = (a + b) * 0.5, a * b
        s = s - m * (mean * mean - product)
        a, b, before = mean, torch.sqrt(product), p
        p = 2 * a * a / s
        if n.small(p - before, 64):
            break
    return n.distance(p, lambda: mp.pi)


def borwein(n: Arithmetic) -> float:
    """pi by J. and P. Borwein's quartic iteration."""
    root = torch.sqrt(n(2))
    a, y, m = 6 - 4 * root, root - 1, 2.0
    p = 1 / a
    for _ in range(20):
        m *= 4
        r = torch.sqrt(torch.sqrt(1 - (y * y) * (y * y)))
        y = (1 - r) / (1 + r)
        square = (1 + y) * (1 + y)
        a, before = a * (square * square) - m * y * (1 + y + y * y), p
        p = 1 / a
        if n.small(p - before, 16):
            break
    return n.distance(p, lambda: mp.pi)


def series_of_e(n: Arithmetic) -> float:
    """e by its series."""
    total, term, k = n(2), n(1), 1
    while not n.small(term):
        k += 1
        term = term / k
        total = total + term
    return n.distance(total, lambda: mp.e)


def series_of_log_2(n: Arithmetic) -> float:
    """log 2 by the series of -log(1 - x) at 1/2."""
    total, term, k = n(0.5), n(0.5), 1
    while not n.small(term):
        k += 1
        term = term * 0.5
        total = total + term / k
    return n.distance(total, lambda: mp.log(2))


def exponentials(n: Arithmetic) -> float:
    """e^2 as a product of exponentials of quarters."""
    product = n(1)
    for i in range(8):
        product = product * torch.exp(n(i - 3.25))
    return max(
        n.distance(product - torch.exp(n(2)), lambda: 0),
        n.distance(product, lambda: mp.e**2),
    )


def sines(n: Arithmetic) -> float:
    """sin and cos of pi / 3 by those of 5/7 and 2/7 of it."""
    with mp.workprec(600):
        pi = +mp.pi
    x = n(Fraction(int(pi.man)) * Fraction(2) ** int(pi.exp)) / 3
    a, b = 5 * x / 7, 2 * x / 7
    sine = torch.sin(a) * torch.cos(b) + torch.cos(a) * torch.sin(b)
    cosine = torch.cos(a) * torch.cos(b) - torch.sin(a) * torch.sin(b)
    return max(
        n.distance(sine, lambda: mp.sqrt(3) / 2),
        n.distance(cosine, lambda: mp.mpf(1) / 2),
    )


CHECKS = (
    polynomial,
    machin,
    salamin_brent,
    borwein,
    series_of_e,
    series_of_log_2,
    exponentials,
    sines,
)


def run(folder: Path) -> list[dict[str, Any]]:
    """The error of each check in each format, in eps, beside the tolerance."""
    return [
        {
            "check": check.__name__.replace("_", " "),
            "tolerance": tolerance,
            "eps": {
                name: round(check(Arithmetic(mcf.Format.from_name(name))), 3) for name in FORMATS
            },
        }
        for check, tolerance in zip(CHECKS, tolerances(folder), strict=True)
    ]
