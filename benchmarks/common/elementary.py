"""Elementary functions compared with mpmath: hard arguments, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpmath import mp
from torch import Tensor
from torch.nn import functional as F

import mcftensor as mcf
from common.oracle import value
from mcftensor.arithmetic import networks

COUNT = 48
"""Arguments of a range, unless more are asked for."""

PRECISION, OF_SINES = 800, 3000
"""Bits of mpmath; and those in which sines of the largest arguments are right."""


def bound(format: mcf.Format) -> float:
    """In u^n: the terms are rounded once, and the evaluation adds little."""
    return 2.0 ** (1 - format.terms) + 1 / 64


def patterns(
    format: mcf.Format,
    low: float,
    high: float,
    seed: int = 0,
    signs: Sequence[int] = (1, -1),
    count: int = COUNT,
) -> mcf.MCFTensor:
    """Expansions of random bits in every term, with exponents between two numbers."""
    generator = torch.Generator().manual_seed(seed)

    def bits(bound: int) -> Tensor:
        return torch.randint(0, bound, (count,), generator=generator)

    exponents = torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low
    sign = torch.tensor(signs)[bits(len(signs))]
    terms = [(torch.exp2(exponents) * sign).to(format.dtype)]
    p = format.base_precision
    for _ in range(format.terms - 1):
        tail = terms[-1].double() * (bits(2**53).double() * 2.0**-53 - 0.5) * 2.0**-p
        terms.append((tail * 2.0 ** -bits(3).double()).to(format.dtype))
    return mcf.MCFTensor.of(networks.distill(terms, format.terms), format)


def number(x: Sequence[Tensor]) -> Any:
    """The number that terms of one element are, exactly."""
    q = value([t.reshape(-1)[:1] for t in x])
    return mp.mpf(q.numerator) / q.denominator


def numbers(x: mcf.MCFTensor) -> list[Any]:
    """All elements, exactly."""
    return [number([t.reshape(-1)[i : i + 1] for t in x.components]) for i in range(x.numel())]


def error(found: Any, expected: Any, format: mcf.Format) -> float:
    """In u^n relative to the result; a few of the smallest subnormals count as nothing."""
    least = mp.mpf(2) ** (format.min_exponent - format.base_precision + 3)
    if expected == 0:
        return 0.0 if abs(found) <= least else math.inf
    return float(max(abs(found - expected) - least, 0) / abs(expected) * 2**format.precision)


def worst(
    function: Callable[..., Any],
    exact: Callable[..., Any],
    format: mcf.Format,
    *operands: mcf.MCFTensor,
) -> float:
    """The largest error of finite results."""
    result = function(*operands)
    columns = zip(*map(numbers, operands), strict=True)
    found = []
    for y, row, leading in zip(_finite(result), columns, result.components[0], strict=True):
        if not math.isfinite(leading):  # beyond the largest number
            assert abs(exact(*row)) > mp.mpf(torch.finfo(format.dtype).max) * 0.99
        else:
            found.append(error(y, exact(*row), format))
    assert found
    return max(found)


def _finite(x: mcf.MCFTensor) -> list[Any]:
    safe = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    return numbers(safe)


def _logistic(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


TOP = "top"  # the largest exponents
ALL = [(-60, -8), (-8, 3), (3, 6)]
POSITIVE = (1,)
Function = tuple[Callable[..., Any], Callable[..., Any], list[tuple[Any, ...]], tuple[int, ...]]
# name: PyTorch's, mpmath's, exponents of arguments, their signs
FUNCTIONS: dict[str, Function] = {
    "exp": (torch.exp, mp.exp, [*ALL, (6, 9.4)], (1, -1)),
    "exp2": (torch.exp2, lambda x: mp.mpf(2) ** x, [*ALL, (6, 9.9)], (1, -1)),
    "expm1": (torch.expm1, mp.expm1, [*ALL, (6, 9.4)], (1, -1)),
    "log": (torch.log, mp.log, [(-0.1, 0.1), (-3, 3), (3, TOP)], POSITIVE),
    "log2": (torch.log2, lambda x: mp.log(x) / mp.log(2), [(-0.1, 0.1), (-60, 60)], POSITIVE),
    "log10": (torch.log10, mp.log10, [(-0.1, 0.1), (-60, 60)], POSITIVE),
    "log1p": (torch.log1p, mp.log1p, [(-60, -4), (-4, -0.01)], (1, -1)),
    "sinh": (torch.sinh, mp.sinh, [*ALL, (6, 9.4)], (1, -1)),
    "cosh": (torch.cosh, mp.cosh, [*ALL, (6, 9.4)], (1, -1)),
    "tanh": (torch.tanh, mp.tanh, ALL, (1, -1)),
    "asinh": (torch.asinh, mp.asinh, [(-60, -4), (-4, 4), (4, TOP)], (1, -1)),
    "acosh": (torch.acosh, mp.acosh, [(1e-6, 1), (1, 10), (10, TOP)], POSITIVE),
    "atanh": (torch.atanh, mp.atanh, [(-60, -4), (-4, -1e-6)], (1, -1)),
    "sin": (torch.sin, mp.sin, [(-60, -3), (-3, 3), (3, 60), (60, TOP)], (1, -1)),
    "cos": (torch.cos, mp.cos, [(-60, -3), (-3, 3), (3, 60), (60, TOP)], (1, -1)),
    "tan": (torch.tan, mp.tan, [(-60, -3), (-3, 3), (3, 60), (60, TOP)], (1, -1)),
    "asin": (torch.asin, mp.asin, [(-60, -4), (-4, -1e-6)], (1, -1)),
    "acos": (torch.acos, mp.acos, [(-60, -4), (-4, -1e-6)], (1, -1)),
    "atan": (torch.atan, mp.atan, [(-60, -4), (-4, 4), (4, 60)], (1, -1)),
    "sigmoid": (torch.sigmoid, _logistic, [*ALL, (6, 9)], (1, -1)),
    "silu": (F.silu, lambda x: x * _logistic(x), [*ALL, (6, 9)], (1, -1)),
    "erf": (torch.erf, mp.erf, [(-60, -3), (-3, 1), (1, 2)], (1, -1)),
    "erfc": (torch.erfc, mp.erfc, [(-60, -3), (-3, 1), (1, 3.2)], (1, -1)),
    "gelu": (F.gelu, lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2, [(-60, -3), (-3, 3.2)], (1, -1)),
    "gelu by tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * _logistic(mp.sqrt(8 / mp.pi) * (x + mp.mpf(44715) / 10**6 * x**3)),
        [(-60, -3), (-3, 2)],
        (1, -1),
    ),
    "gamma": (mcf.functional.gamma, mp.gamma, [(-60, -3), (-3, 1), (1, 5.1)], (1, -1)),
    "lgamma": (torch.lgamma, mp.loggamma, [(-60, -3), (-0.01, 0.01), (-1, 6), (6, 60)], POSITIVE),
    "digamma": (
        torch.digamma,
        mp.digamma,
        [(-60, -3), (-1, 6), (6, 60), (0.5475, 0.5476)],  # the last about the root
        POSITIVE,
    ),
    "ndtr": (
        torch.special.ndtr,
        lambda x: mp.erfc(-x / mp.sqrt(2)) / 2,
        [(-60, -3), (-3, 1), (1, 3.2)],
        (1, -1),
    ),
    "tanhshrink": (F.tanhshrink, lambda x: x - mp.tanh(x), [(-30, -3), (-3, 3), (3, 60)], (1, -1)),
    "mish": (F.mish, lambda x: x * mp.tanh(mp.log1p(mp.exp(x))), [*ALL], (1, -1)),
    "sinpi": (mcf.functional.sinpi, mp.sinpi, [(-60, -3), (-3, 3), (3, 60)], (1, -1)),
    "cospi": (mcf.functional.cospi, mp.cospi, [(-60, -3), (-3, 3), (3, 60)], (1, -1)),
    "cbrt": (
        mcf.functional.cbrt,
        lambda x: mp.sign(x) * mp.cbrt(abs(x)),
        [(-60, 60), (-1, 3), (60, TOP)],
        (1, -1),
    ),
    "softplus": (F.softplus, lambda x: mp.log1p(mp.exp(x)), [(-60, -3), (-3, 4)], (1, -1)),
}

PAIRS: dict[str, Function] = {
    "pow": (torch.pow, mp.power, [(-0.1, 0.1, 0, 6), (-3, 3, -3, 4), (-20, 20, -6, 1)], POSITIVE),
    "atan2": (torch.atan2, mp.atan2, [(-1, 1, -1, 1), (-30, 30, -30, 30)], (1, -1)),
    "hypot": (torch.hypot, mp.hypot, [(-1, 1, -1, 1), (-30, 30, -30, 30)], (1, -1)),
}


def largest_error(name: str, format: mcf.Format, count: int = COUNT) -> float:
    """The largest error of a function over its ranges, in u^n."""
    with mp.workprec(OF_SINES if name in ("sin", "cos", "tan") else PRECISION):
        return _largest_error(name, format, count)


def _largest_error(name: str, format: mcf.Format, count: int) -> float:
    found = []
    if name in FUNCTIONS:
        function, exact, ranges, signs = FUNCTIONS[name]
        for seed, (low, high) in enumerate(ranges):
            high = format.max_exponent if high == TOP else high
            x = patterns(format, low, high, seed, signs, count)
            found.append(worst(function, exact, format, x))
    else:
        function, exact, ranges, signs = PAIRS[name]
        for seed, (low, high, low_y, high_y) in enumerate(ranges):
            x = patterns(format, low, high, seed, signs, count)
            y = patterns(format, low_y, high_y, seed + 9, count=count)
            found.append(worst(function, exact, format, x, y))
    return max(found)
