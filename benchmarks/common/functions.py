"""Elementwise functions of PyTorch beside mpmath's, on exact arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import torch
from torch import Tensor
from torch.nn import functional as F

import mcftensor as mcf

BITS = 256
"""In which mpmath computes."""

Exact = Callable[[Any], Any]


def _within(low: float, high: float, function: Exact) -> Exact:
    """A function on an open interval; None elsewhere."""
    return lambda x: function(x) if low < x < high else None


def _ndtr(x: Any) -> Any:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def _logistic(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def _by_tanh(x: Any) -> Any:
    return mp.sqrt(8 / mp.pi) * (x + mp.mpf("0.044715") * x**3)


def _softplus(x: Any) -> Any:
    return x if x > 20 else mp.log1p(mp.exp(x))


def _sinc(x: Any) -> Any:
    return mp.mpf(0) if x == mp.floor(x) else mp.sin(mp.pi * x) / (mp.pi * x)


def polygamma(n: int) -> Exact:
    """None at poles."""
    return lambda x: None if x <= 0 and x == mp.floor(x) else mp.psi(n, x)


INF = math.inf
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Exact]] = {
    "exp": (torch.exp, mp.exp),
    "exp2": (torch.exp2, lambda x: mp.mpf(2) ** x),
    "expm1": (torch.expm1, mp.expm1),
    "log": (torch.log, _within(0, INF, mp.log)),
    "log2": (torch.log2, _within(0, INF, lambda x: mp.log(x) / mp.log(2))),
    "log10": (torch.log10, _within(0, INF, mp.log10)),
    "log1p": (torch.log1p, _within(-1, INF, mp.log1p)),
    "sin": (torch.sin, mp.sin),
    "cos": (torch.cos, mp.cos),
    "tan": (torch.tan, mp.tan),
    "asin": (torch.asin, _within(-1, 1, mp.asin)),
    "acos": (torch.acos, _within(-1, 1, mp.acos)),
    "atan": (torch.atan, mp.atan),
    "sinh": (torch.sinh, mp.sinh),
    "cosh": (torch.cosh, mp.cosh),
    "tanh": (torch.tanh, mp.tanh),
    "asinh": (torch.asinh, mp.asinh),
    "acosh": (torch.acosh, _within(1, INF, mp.acosh)),
    "atanh": (torch.atanh, _within(-1, 1, mp.atanh)),
    "sigmoid": (torch.sigmoid, _logistic),
    "logit": (torch.logit, _within(0, 1, lambda x: mp.log(x) - mp.log1p(-x))),
    "erf": (torch.erf, mp.erf),
    "erfc": (torch.erfc, mp.erfc),
    "erfcx": (torch.special.erfcx, _within(-10, 1e3, lambda x: mp.exp(x * x) * mp.erfc(x))),
    "erfinv": (torch.erfinv, _within(-1, 1, mp.erfinv)),
    "ndtr": (torch.special.ndtr, _ndtr),
    "log_ndtr": (
        torch.special.log_ndtr,
        _within(-1e4, INF, lambda x: mp.log1p(-_ndtr(-x)) if x > 0 else mp.log(_ndtr(x))),
    ),
    "digamma": (torch.digamma, _within(0, INF, mp.digamma)),
    "lgamma": (torch.lgamma, _within(0, INF, mp.loggamma)),
    "polygamma 1": (lambda x: torch.polygamma(1, x), _within(-50, 1e6, polygamma(1))),
    "polygamma 2": (lambda x: torch.polygamma(2, x), _within(0, 1e4, polygamma(2))),
    "i0": (torch.special.i0, _within(-100, 100, lambda x: mp.besseli(0, x))),
    "i1": (torch.special.i1, _within(-100, 100, lambda x: mp.besseli(1, x))),
    "i0e": (torch.special.i0e, _within(-99, 99, lambda x: mp.besseli(0, x) * mp.exp(-abs(x)))),
    "i1e": (torch.special.i1e, _within(-99, 99, lambda x: mp.besseli(1, x) * mp.exp(-abs(x)))),
    "spherical_bessel_j0": (
        torch.special.spherical_bessel_j0,
        lambda x: mp.sin(x) / x,
    ),
    "sinc": (torch.sinc, _sinc),
    "entr": (torch.special.entr, _within(0, INF, lambda x: -x * mp.log(x))),
    "gelu": (F.gelu, lambda x: x * _ndtr(x)),
    "gelu tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * _logistic(_by_tanh(x)),
    ),
    "silu": (F.silu, lambda x: x * _logistic(x)),
    "mish": (F.mish, lambda x: x * mp.tanh(mp.log1p(mp.exp(x)))),
    "softplus": (F.softplus, _softplus),
    "logsigmoid": (F.logsigmoid, _within(-1e4, INF, lambda x: -mp.log1p(mp.exp(-x)))),
    "elu": (F.elu, lambda x: x if x > 0 else mp.expm1(x)),
    "celu": (lambda x: F.celu(x, 2.0), lambda x: x if x > 0 else 2 * mp.expm1(x / 2)),
    "tanhshrink": (F.tanhshrink, lambda x: x - mp.tanh(x)),
    "softsign": (F.softsign, lambda x: x / (1 + abs(x))),
    "rsqrt": (torch.rsqrt, _within(0, INF, lambda x: 1 / mp.sqrt(x))),
    "deg2rad": (torch.deg2rad, lambda x: x * mp.pi / 180),
}
"""By name: PyTorch's, and mpmath's, which is None outside of the range that is tried."""

_SPECIAL = (0.5, 1, 1.5, 2, 3, 6, 20, 100, 1.4616321449683622, math.pi / 2, math.pi, 1 / math.e)


def points(format: mcf.Format, many: bool) -> Tensor:
    """Arguments of either sign: spread by their logarithms over the range of a format, about 1,
    and ever nearer to where functions have zeros, poles, or another formula."""
    low, high = format.full_precision_min, 2.0**format.max_exponent
    count = 120 if many else 20
    logs = torch.linspace(math.log2(low), math.log2(high) - 1, count, dtype=torch.float64)
    near = torch.linspace(-8, 6, 3 * count, dtype=torch.float64)
    gaps = 2.0 ** -torch.arange(1, format.precision, 1 if many else 6, dtype=torch.float64)
    about = [torch.cat([c + c * gaps, c - c * gaps, gaps[:1] * 2 * c]) for c in _SPECIAL]
    x = torch.cat([2.0**logs, 2.0**near, *about])
    x = mcf.as_plain(mcf.as_expansion(torch.cat([x, -x]), format), torch.float64)
    return x[(x.abs() >= low) & (x.abs() < high)]


def units(found: Tensor, x: Tensor, exact: Exact, format: mcf.Format) -> tuple[float, float]:
    """The worst error of results in units of u^n, relative to the exact ones or to the smallest
    number of full precision, and the argument where it is."""
    worst, where = 0.0, math.nan
    with mp.workprec(BITS):
        for a, b in zip(x.tolist(), found.tolist(), strict=True):
            expected = exact(mp.mpf(a))
            if expected is None or abs(expected) >= 2.0**format.max_exponent:
                continue
            size = max(abs(expected), mp.mpf(format.full_precision_min))
            error = float(abs(mp.mpf(b) - expected) / size * mp.mpf(2) ** format.precision)
            if not error <= worst:
                worst, where = error, a
    return worst, where


def measure(name: str, format: mcf.Format, many: bool = False) -> tuple[float, float]:
    """The worst error of a function over a format, in units of u^n, and where it is."""
    function, exact = FUNCTIONS[name]
    x = points(format, many)
    found = mcf.as_plain(function(mcf.as_expansion(x, format)), torch.float64)
    return units(found, x, exact, format)
