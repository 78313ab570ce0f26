"""Hyperbolic functions, their inverses and the logistic function, on guarded numbers.

Functions of |x| are computed from q and k in exp(|x|) = 2^k (1 + q), without cancellation.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import Base
from mcftensor.arithmetic.networks import two_sum
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials, logarithms
from mcftensor.wide.exponentials import Result, bounded, limit_of
from mcftensor.wide.guarded import Guarded, constant, polynomial, power_of_two, where


def _signed(value: Guarded, plain: Tensor, x: Guarded) -> Result:
    """Extend the value of an odd function at |x| to x. Where x is tiny, the result is x."""
    leading = x.leading
    is_tiny = leading.abs() < 2.0 ** (x.base.min_exponent + x.base.precision)
    value, plain = where(is_tiny, abs(x), value), torch.where(is_tiny, leading.abs(), plain)
    is_negative = torch.signbit(leading)
    plain = torch.where(is_negative, -plain, plain)
    return where(is_negative, -value, value), torch.where(leading == 0, leading, plain)


def _small_power(k: Tensor, like: Guarded) -> Tensor:
    """2^-k for k >= 0, or another small power where 2^-k is too small to matter."""
    most = float(8 * like.base.precision) if k.dtype == torch.float64 else 120.0
    return power_of_two(-torch.where(k > most, most, k))


def _without_power(q: Guarded, power: Tensor) -> Guarded:
    """1 + q - power, with an exact difference of 1 and the power."""
    return q + q.like(two_sum(constant(1.0, power), -power))


def _halves(x: Guarded) -> tuple[Guarded, Guarded, Tensor]:
    """sinh|x| and cosh|x|, both divided by 2^(k - 1), and k."""
    q, k = exponentials.parts(bounded(abs(x), limit_of(x)))
    v = 1 + q
    s = _small_power(k + k, q)
    inverse = (1 / v).times(s)
    return _without_power(q + q * inverse, s), v + inverse, k


def sinh(x: Guarded) -> Result:
    """The hyperbolic sine."""
    sine, _, k = _halves(x)
    value = sine.scaled(k - 1)
    return _signed(value, torch.where(x.leading.abs() < limit_of(x), value.leading, torch.inf), x)


def cosh(x: Guarded) -> Result:
    """The hyperbolic cosine."""
    _, cosine, k = _halves(x)
    value = cosine.scaled(k - 1)
    return value, torch.where(x.leading.abs() < limit_of(x), value.leading, torch.inf)


def tanh(x: Guarded) -> Result:
    """The hyperbolic tangent, (exp(2|x|) - 1) / (exp(2|x|) + 1)."""
    value = _tanh_of_size(x)
    return _signed(value, value.leading, x)


def _tanh_of_size(x: Guarded) -> Guarded:
    """The hyperbolic tangent of |x|."""
    limit = x.count * x.base.precision * math.log(2)
    q, k = exponentials.parts(bounded(abs(x), limit).times(2.0))
    s = _small_power(k, q)
    value = _without_power(q, s) / ((1 + q) + s)
    return where(x.leading.abs() >= limit, 1.0, value)


_LOG2_NEAR = -1
"""log2 of |x| below which the hyperbolic tangent is subtracted from x by a series."""


def _tanh(k: int, base: Base, terms: int) -> list[Fraction]:
    """The coefficient of x^(2k) in (x - tanh(x)) / x^3."""
    n = k + 2
    return [-(4**n) * (4**n - 1) * exact.bernoulli(n) / math.factorial(2 * n)]


def tanhshrink(x: Guarded) -> Result:
    """x minus its hyperbolic tangent."""
    size = abs(x)
    is_near = size.leading < 2.0**_LOG2_NEAR
    inner = where(is_near, size, 0.0)
    square = inner * inner
    near = inner * (square * polynomial(square, _tanh, 2.0 * _LOG2_NEAR))
    value = where(is_near, near, size - _tanh_of_size(x))
    value = where(size.leading == torch.inf, size, value)
    value = where(torch.signbit(x.leading), -value, value)
    return value, value.leading + 0.0  # 0 of -0, as by subtraction


def asinh(x: Guarded) -> Result:
    """The inverse hyperbolic sine, log(1 + |x| + x² / (1 + sqrt(1 + x²)))."""
    size = abs(x)
    is_large = size.leading > _large(x)
    inner = where(is_large | torch.isnan(size.leading), 1.0, size)
    square = inner * inner
    w = inner + square / (1 + (1 + square).sqrt())
    value = _log_of(size, w, is_large)
    return _signed(value, torch.where(size.leading == torch.inf, torch.inf, value.leading), x)


def _large(x: Guarded) -> float:
    """Return the bound above which x² + 1 is x² to all bits."""
    return 2.0 ** (x.count * x.base.precision // 2 + 2)


def _log_of(size: Guarded, w: Guarded, is_large: Tensor) -> Guarded:
    """log(1 + w), or log(2 size) where `is_large` is set."""
    is_finite = is_large & (size.leading < torch.inf)
    rest, k = logarithms.parts(where(is_finite, size, 1 + w), where(is_large, 1.0, w))
    return logarithms.with_power(rest, torch.where(is_finite, k + 1, k))


def acosh(x: Guarded) -> Result:
    """The inverse hyperbolic cosine, log(1 + t + sqrt(2 t + t²)) with t = x - 1."""
    leading, t = x.leading, x - 1
    is_large = leading > _large(x)
    inner = where((t.leading > 0) & ~is_large, t, 1.0)
    w = inner + logarithms.root_of_product(inner, inner + 2)
    value = _log_of(x, w, is_large)
    plain = torch.where(leading < 1, torch.nan, value.leading)
    plain = torch.where(t.leading == 0, 0.0, plain)
    return value, torch.where(leading == torch.inf, leading, plain)


def atanh(x: Guarded) -> Result:
    """The inverse hyperbolic tangent, log(1 + 2 |x| / (1 - |x|)) / 2."""
    size = abs(x)
    below = 1 - size
    is_inside = below.leading > 0
    inner = where(is_inside, size, 0.0)
    # Where 1 - |x| is small, it is scaled by 2^shift, and so is the argument of the logarithm.
    below_normal, shift = logarithms.normal(below)
    w = inner.times(2.0) / below_normal
    unit = where(shift > 0, x.of(2.0 ** -logarithms.shift_of(x)), 1.0)
    rest, k = logarithms.parts(w + unit, where(shift > 0, 1.0, w))
    value = logarithms.with_power(rest, k + shift).times(0.5)
    plain = torch.where(is_inside, value.leading, torch.nan)
    return _signed(value, torch.where(below.leading == 0, torch.inf, plain), x)


# --------------------------------------------------------------------------------- activations


def _logistic(x: Guarded) -> tuple[Guarded, Tensor]:
    """1 / (1 + e^-x) of a guarded number as v 2^k, from e^-|x|, the numerator where x < 0."""
    is_negative = x.leading < 0
    q, k = exponentials.parts(bounded(where(is_negative, x, -x), limit_of(x)))
    power = 1 + q
    value = where(is_negative, power, 1.0) / (1 + power.scaled(k))
    value = where(x.leading >= limit_of(x), 1.0, value)
    return value, torch.where(is_negative, k, torch.zeros_like(k))


def sigmoid(x: Guarded) -> Result:
    """The logistic function."""
    v, k = _logistic(x)
    value = v.scaled(k)
    return value, torch.where(x.leading <= -limit_of(x), 0.0, value.leading)


def silu(x: Guarded) -> Result:
    """x sigmoid(x)."""
    return _weighted(x, x)


def _weighted(x: Guarded, argument: Guarded) -> Result:
    """x sigmoid(argument)."""
    leading, limit = x.leading, limit_of(x)
    value, k = _logistic(argument)
    is_below, is_above = argument.leading <= -limit, argument.leading >= limit
    is_inside = ~is_below & ~is_above & torch.isfinite(leading)
    value = (value * where(is_inside, x, 1.0)).scaled(k)
    value = where(is_above, x, value)
    plain = torch.copysign(torch.where(is_below, 0.0, value.leading), leading)
    return value, torch.where(leading == 0, leading, plain)


def mish(x: Guarded) -> Result:
    """x tanh(softplus(x)) = x (u - 1) / (u + 1), with u = (1 + e^x)²."""
    leading, limit = x.leading, limit_of(x)
    is_negative = leading < 0
    q, k = exponentials.parts(bounded(-abs(x), limit))
    power = 1 + q
    p = power.scaled(k)  # e^-|x|; for x < 0, u - 1 = p (2 + p), else (1 + 2 p) / p²
    above = where(is_negative, 2 + p, 1 + p.times(2.0))
    below = where(is_negative, 2 + p * above, 1 + (p * (1 + p)).times(2.0))
    value = above * where(is_negative, power, 1.0) / below
    value = value * where(leading.abs() < limit, x, 1.0)
    value = value.scaled(torch.where(is_negative, k, torch.zeros_like(k)))
    value = where(leading >= limit, x, value)
    plain = torch.copysign(torch.where(leading <= -limit, 0.0, value.leading), leading)
    return value, torch.where(leading == 0, leading, plain)


_CUBIC = Fraction("0.044715")


def gelu_tanh(x: Guarded) -> Result:
    """x sigmoid(sqrt(8 / pi) (x + 0.044715 x³))."""
    leading = x.leading
    inner = bounded(x, 2.0**24)
    argument = inner * (1 + inner * inner * _CUBIC)
    argument = argument * x.of(lambda bits: exact.sqrt(8 / exact.pi(bits), bits))
    is_inside = (leading.abs() < 2.0**24) | torch.isnan(leading)
    return _weighted(x, where(is_inside, argument, torch.where(leading < 0, -1e30, 1e30)))
