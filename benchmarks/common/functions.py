"""Elementwise functions of PyTorch compared with mpmath, on exact arguments."""

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
_SELU = mp.mpf("1.0507009873554804934193349852946")
_SELU_ALPHA = mp.mpf("1.6732632423543772848170429916717")
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


# ------------------------------------------------------------------------------ of two arguments


def _power(x: Any, y: Any) -> Any:
    """None of negative numbers to others than whole ones, and where the power leaves float32."""
    if (x < 0 and y != mp.floor(y)) or abs(y * mp.log(abs(x))) > 99 or abs(y) >= 2**53:
        return None
    return x**y


def _log_sum(x: Any, y: Any) -> Any:
    larger, smaller = max(x, y), min(x, y)
    return larger + (mp.log1p(mp.exp(smaller - larger)) if smaller - larger > -999 else 0)


def _log2_sum(x: Any, y: Any) -> Any:
    larger, smaller = max(x, y), min(x, y)
    power = mp.mpf(2) ** (smaller - larger) if smaller - larger > -999 else mp.mpf(0)
    return larger + mp.log1p(power) / mp.log(2)


def _box(a: float, x: float, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of two positive numbers below bounds; None elsewhere."""
    return lambda p, q: function(p, q) if 0 < p < a and 0 < q < x else None


def _of_two(function: Callable[..., Tensor], *args: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The first of what a function makes of two tensors that are stacked."""
    return lambda x, y: function(torch.stack([x, y]), *args)[0]


Exact2 = Callable[[Any, Any], Any]
OF_TWO: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Exact2]] = {
    "add": (torch.add, lambda x, y: x + y),
    "sub": (torch.sub, lambda x, y: x - y),
    "rsub": (torch.rsub, lambda x, y: y - x),
    "mul": (torch.mul, lambda x, y: x * y),
    "div": (torch.div, lambda x, y: x / y),
    "floor_divide": (
        torch.floor_divide,
        lambda x, y: mp.floor(x / y) if abs(x / y) < 2**40 else None,
    ),
    "pow": (torch.pow, _power),
    "float_power": (torch.float_power, _power),
    "atan2": (torch.atan2, mp.atan2),
    "hypot": (torch.hypot, mp.hypot),
    "xlogy": (torch.xlogy, lambda x, y: x * mp.log(y) if y > 0 else None),
    "xlog1py": (torch.special.xlog1py, lambda x, y: x * mp.log1p(y) if y > -1 else None),
    "logaddexp": (torch.logaddexp, _log_sum),
    "logaddexp2": (torch.logaddexp2, _log2_sum),
    "gammainc": (
        torch.special.gammainc,
        _box(19, 999, lambda a, x: mp.gammainc(a, 0, x, regularized=True)),
    ),
    "gammaincc": (
        torch.special.gammaincc,
        _box(19, 999, lambda a, x: mp.gammainc(a, x, mp.inf, regularized=True)),
    ),
    "zeta": (torch.special.zeta, _box(60, 999, lambda s, x: mp.zeta(s, x) if s > 1 else None)),
    "copysign": (torch.copysign, lambda x, y: abs(x) * mp.sign(y)),
    "fmax": (torch.fmax, max),
    "fmin": (torch.fmin, min),
    "maximum": (torch.maximum, max),
    "minimum": (torch.minimum, min),
    "heaviside": (torch.heaviside, lambda x, y: mp.mpf(x > 0)),
    "prelu": (lambda x, y: torch.where(x > 0, x, x * y), lambda x, y: x if x > 0 else x * y),
    "norm": (lambda x, y: torch.stack([x, y]).norm(dim=0), mp.hypot),
    "logsumexp": (lambda x, y: torch.logsumexp(torch.stack([x, y]), 0), _log_sum),
    "softmax": (_of_two(torch.softmax, 0), lambda x, y: _logistic(x - y)),
    "log_softmax": (
        _of_two(torch.log_softmax, 0),
        lambda x, y: -_log_sum(mp.mpf(0), y - x),
    ),
    "cross_entropy": (
        lambda x, y: F.cross_entropy(
            torch.stack([x, y], -1), torch.zeros(len(x), dtype=torch.long), reduction="none"
        ),
        lambda x, y: _log_sum(mp.mpf(0), y - x),
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y * 0, reduction="none"),
        lambda x, y: _log_sum(mp.mpf(0), x),
    ),
    "soft_margin_loss": (
        lambda x, y: F.soft_margin_loss(x, torch.sign(y), reduction="none"),
        lambda x, y: _log_sum(mp.mpf(0), -x * mp.sign(y)),
    ),
}
"""By name, as `FUNCTIONS`."""

_NUMBERS = (-2.0, -0.5, 0.1, 0.5, 2.0, 3.0, 10.0)
WITH_NUMBER = {
    **{
        f"x ** {c}": ((lambda x, c=c: x**c), (lambda x, c=c: _power(x, mp.mpf(c))))
        for c in _NUMBERS
    },
    **{
        f"{c} ** x": ((lambda x, c=c: torch.pow(c, x)), (lambda x, c=c: _power(mp.mpf(c), x)))
        for c in _NUMBERS
        if c > 0
    },
    "xlogy(3, x)": (lambda x: torch.xlogy(3, x), _within(0, INF, lambda x: 3 * mp.log(x))),
    "xlog1py(3, x)": (
        lambda x: torch.special.xlog1py(3, x),
        _within(-1, INF, lambda x: 3 * mp.log1p(x)),
    ),
    "zeta(3, x)": (
        lambda x: torch.special.zeta(3.0, x),
        _within(0, 999, lambda x: mp.zeta(3, x)),
    ),
    "zeta(x, 1)": (lambda x: torch.special.zeta(x, 1.0), _within(1, 60, mp.zeta)),
    "ldexp(x, 5)": (lambda x: torch.ldexp(x, torch.tensor(5)), lambda x: x * 32),
    "addcmul": (  # the error is relative to the summands, which cancel next to -1
        lambda x: torch.addcmul(x, x, x),
        lambda x: x + x * x if abs(x + 1) > 0.5 else None,
    ),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x), lambda x: x + 1),
    "lerp": (lambda x: torch.lerp(x, x * 0, 0.25), lambda x: x * 3 / 4),
    "mvlgamma": (
        lambda x: torch.mvlgamma(x.clamp_min(3), 2),
        _within(3, 1e6, lambda x: mp.log(mp.pi) / 2 + mp.loggamma(x) + mp.loggamma(x - 0.5)),
    ),
    "selu": (F.selu, lambda x: _SELU * (x if x > 0 else _SELU_ALPHA * mp.expm1(x))),
    "hardswish": (F.hardswish, lambda x: x * min(max(x + 3, 0), 6) / 6),
    "hardsigmoid": (F.hardsigmoid, lambda x: min(max(x + 3, 0), 6) / mp.mpf(6)),
    "smooth_l1_loss": (
        lambda x: F.smooth_l1_loss(x, x * 0, reduction="none"),
        lambda x: x * x / 2 if abs(x) < 1 else abs(x) - 0.5,
    ),
    "modified_bessel_k0": (
        torch.special.modified_bessel_k0,
        _within(1e-9, 99, lambda x: mp.besselk(0, x)),
    ),
    "modified_bessel_k1": (
        torch.special.modified_bessel_k1,
        _within(1e-9, 99, lambda x: mp.besselk(1, x)),
    ),
    "scaled_modified_bessel_k0": (
        torch.special.scaled_modified_bessel_k0,
        _within(1e-9, 99, lambda x: mp.besselk(0, x) * mp.exp(x)),
    ),
    "scaled_modified_bessel_k1": (
        torch.special.scaled_modified_bessel_k1,
        _within(1e-9, 99, lambda x: mp.besselk(1, x) * mp.exp(x)),
    ),
}
FUNCTIONS.update(WITH_NUMBER)


def pairs(format: mcf.Format, many: bool) -> tuple[Tensor, Tensor]:
    """Pairs of `points`: any two, two of a moderate size, and two that are nearly equal."""
    x = points(format, many=True)
    moderate = x[(x.abs() > 1e-3) & (x.abs() < 100)]
    count = 1000 if many else 100
    generator = torch.Generator().manual_seed(1)

    def draw(x: Tensor) -> Tensor:
        return x[torch.randint(len(x), (count,), generator=generator)]

    a, gaps = draw(x), torch.randint(-9, 10, (count,), generator=generator) * 2.0**-12
    first, second = (
        torch.cat([a, draw(moderate), a]),
        torch.cat([draw(x), draw(moderate), a * (1 + gaps)]),
    )
    second = mcf.as_plain(mcf.as_expansion(second, format), torch.float64)
    counts = (second.abs() >= format.full_precision_min) & torch.isfinite(second)
    return first[counts], second[counts]


def measure_of_two(
    name: str, format: mcf.Format, many: bool = False
) -> tuple[float, tuple[float, float] | float]:
    """The worst error of a function of two arguments, in units of u^n, and where it is."""
    function, exact = OF_TWO[name]
    x, y = pairs(format, many)
    result = function(mcf.as_expansion(x, format), mcf.as_expansion(y, format))
    found = mcf.as_plain(result, torch.float64) if isinstance(result, mcf.MCFTensor) else result
    places = torch.arange(len(x), dtype=torch.float64)
    arguments = list(zip(x.tolist(), y.tolist(), strict=True))

    def at(place: Any) -> Any:
        return exact(*map(mp.mpf, arguments[int(place)]))

    worst, place = units(found, places, at, format)
    return worst, place if math.isnan(place) else arguments[int(place)]
