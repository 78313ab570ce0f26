"""The contribution of one logit to sums of exponentials, to log-probabilities and to gradients.

Every function is a chain of additions and multiplications in float64, each rounded to nearest, and
of integer operations. So the bits of a result depend on the values of its element and its row
alone. `torch.exp` makes no such promise: its vectors and the rest of a loop may differ.

**Exponential.** For d = x - m <= 0, t = d log2(e) = k + f with an integer k and |f| <= 1/2, and
e^d = 2^k 2^f. 2^f is the polynomial that interpolates it in the ten Chebyshev nodes of
[-1/2, 1/2]. With h = log(2) / 2 its error is at most e^h h^10 / (2^9 10!) = 2^-45.6, and 2^-45.1 of
2^f >= e^-h. The roundings of d, of t and of the constant log2(e) change the exponent by at most
2.5 |d| 2^-53. Horner's rule adds 2^-51. So the relative error is below 2^-44 for |d| <= 64, and
below 2^-41.8 for |d| <= 700. Below -700 the exponential counts as e^-700, which rounds to zero in
every result.

**Sums.** A term of a sum of V exponentials is e^d rounded to a multiple of 2^-P, as an integer,
with P = `binary_places(V)`. The integers have no order, and are below 2^51; their sum is below
2^63. As the largest term is 1, the relative error of the sum is at most 2^-44 + V 2^-(P+1), since
terms below e^-64 round to zero.

**Logarithm.** y = 2^k z with z in [sqrt(1/2), sqrt(2)), and log(z) = 2 atanh((z - 1) / (z + 1)) by
its power series up to the 19th power; what follows is below 2^-54 of it. The relative error is
below 2^-50, and log(1) = 0.

Source: L. N. Trefethen, "Approximation Theory and Approximation Practice", SIAM 2013, and
E. W. Cheney, "Introduction to Approximation Theory", 1966 (interpolation in Chebyshev nodes);
J.-M. Muller, "Elementary Functions", 3rd edition, 2016 (reduction of arguments).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.rounding import round_to
from mcftensor.reproducible.binned_sums import SHIFTER, SHIFTER_BITS, nearest_integer

MOST_CLASSES = 2**24
"""Logits of a row."""

_POWERS = (
    1.0000000000000135,
    0.6931471805599462,
    0.2402265069564034,
    0.05550410866465167,
    0.009618129193934313,
    0.0013333558200794592,
    0.0001540343375125101,
    1.5252672924850737e-05,
    1.325964524488711e-06,
    1.0205905413765595e-07,
)
"""The coefficients of the polynomial of 2^f."""

_ROOT_BITS = 0x3FE6A09E667F3BCD  # of sqrt(1/2)


def binary_places(classes: int) -> int:
    """The binary places of a term in a sum of so many exponentials."""
    return min(50, 62 - (classes - 1).bit_length())


def exponential(d: Tensor, least: float, power: int = 0) -> Tensor:
    """2^power e^d, where d lies between `least` and 0; of others something finite."""
    d = torch.where((d >= least) & (d <= 0), d, least)
    t = d * math.log2(math.e)
    shifted = t + SHIFTER
    f = t - (shifted - SHIFTER)
    value = _POWERS[-1] * f
    for coefficient in _POWERS[-2:0:-1]:
        value = (value + coefficient) * f
    value = value + _POWERS[0]
    scale = ((shifted.view(torch.int64) - SHIFTER_BITS + (1023 + power)) << 52).view(torch.float64)
    return value * scale


def counted(d: Tensor, places: int) -> Tensor:
    """e^d as a multiple of 2^-places: an integer."""
    return nearest_integer(exponential(d, -64.0, places))


def natural_logarithm(x: Tensor) -> Tensor:
    """log(x) of float64 numbers that are positive, normal and finite; -inf of 0."""
    is_positive = x > 0
    bits = torch.where(is_positive, x, 1.0).view(torch.int64)
    k = (bits - _ROOT_BITS) >> 52
    z = (bits - (k << 52)).view(torch.float64)
    t = (z - 1.0) / (z + 1.0)
    square = t * t
    series = square * (1 / 19)
    for i in range(17, 1, -2):
        series = (series + 1 / i) * square
    value = k.to(torch.float64) * math.log(2) + (2.0 * t + 2.0 * t * series)
    return torch.where(is_positive, value, torch.where(x == 0, -torch.inf, torch.nan))


def _log_probability(x: Tensor, most: Tensor, log_sum: Tensor) -> Tensor:
    """Return the log-probability of a logit; `log_sum` is the log of the sum of e^(x - most)."""
    return (x.to(torch.float64) - most) - log_sum


def _slope(x: Tensor, most: Tensor, a: Tensor) -> Tensor:
    return a * exponential(x.to(torch.float64) - most, -700.0)


def _slope_and(x: Tensor, y: Tensor, most: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _slope(x, most, a) + b * y.to(torch.float64)


def _slopes(x: Tensor, y: Tensor, most: Tensor, a: Tensor, other: Tensor, b: Tensor) -> Tensor:
    return _slope(x, most, a) + _slope(y, other, b)


def _value(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def _gap(x: Tensor, most: Tensor) -> Tensor:
    return most - x.to(torch.float64)


def _weighted_gap(x: Tensor, y: Tensor, most: Tensor) -> Tensor:
    """y (most - x), and 0 where y is 0."""
    wide = y.to(torch.float64)
    return torch.where(wide == 0, 0.0, wide * _gap(x, most))


def _log_ratio(
    x: Tensor, y: Tensor, most: Tensor, log_sum: Tensor, other: Tensor, other_log: Tensor
) -> Tensor:
    """log(q) - log(p) for p of the logit x and q of y."""
    return _log_probability(y, other, other_log) - _log_probability(x, most, log_sum)


def _divergence(
    x: Tensor,
    y: Tensor,
    most: Tensor,
    log_sum: Tensor,
    other: Tensor,
    other_log: Tensor,
    share: Tensor,
) -> Tensor:
    """q (log(q) - log(p)) for p of the logit x and q of y; share is 1 / the sum of y's row."""
    u = _log_ratio(x, y, most, log_sum, other, other_log)
    return torch.where(y == -torch.inf, 0.0, _slope(y, other, share) * u)


def _divergence_slope(
    x: Tensor,
    y: Tensor,
    most: Tensor,
    log_sum: Tensor,
    other: Tensor,
    other_log: Tensor,
    a: Tensor,
    mean: Tensor,
) -> Tensor:
    """a e^(y - other) (log(q) - log(p) - mean)."""
    u = _log_ratio(x, y, most, log_sum, other, other_log)
    return torch.where(y == -torch.inf, 0.0, _slope(y, other, a) * (u - mean))


def _divergence_from(x: Tensor, y: Tensor, most: Tensor, log_sum: Tensor) -> Tensor:
    """y (log(y) - log(p)) for a probability y."""
    wide = y.to(torch.float64)
    u = natural_logarithm(wide) - _log_probability(x, most, log_sum)
    return torch.where(wide == 0, 0.0, wide * u)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "log": natural_logarithm,
    "log_probability": _log_probability,
    "slope": _slope,
    "slope_and": _slope_and,
    "slopes": _slopes,
    "value": _value,
    "gap": _gap,
    "weighted_gap": _weighted_gap,
    "divergence": _divergence,
    "divergence_slope": _divergence_slope,
    "divergence_from": _divergence_from,
}


@functools.lru_cache(maxsize=256)  # bodies have to be the same objects at every call
def body_of(name: str, dtype: torch.dtype) -> Any:
    """One of the functions above as a body, whose result is rounded to a dtype once."""
    function = _FUNCTIONS[name]

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> list[Tensor]:
        return [round_to(function(*vectors, *scalars), dtype)]

    return body


@functools.lru_cache(maxsize=64)
def count_body(places: int) -> Any:
    """A body: logits and the largest of their row -> integers of a sum."""

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> list[Tensor]:
        operands: list[Any] = [*vectors, *scalars]
        x, most = operands
        return [counted(x.to(torch.float64) - most, places)]

    return body
