"""Hyperbolic functions, their inverses and the logistic function, on guarded expansions.

Functions of |x| are computed from q and k in exp(|x|) = 2^k (1 + q), without cancellation.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.arithmetic.networks import two_sum
from mcftensor.wide import exact_constants as exact
from mcftensor.wide import exponentials, logarithms
from mcftensor.wide.exponentials import bits_of, bounded, limit_of, one
from mcftensor.wide.guarded import (
    Terms,
    add,
    constants,
    div,
    finish,
    mul,
    neg,
    polynomial,
    power_of_two,
    precision_of,
    scaled,
    size_of,
    sqrt,
    sub,
    times,
    where,
)


def _signed(value: Terms, plain: Tensor, x: Terms) -> Terms:
    """Extend the value of an odd function at |x| to x. Where x is tiny, the result is x."""
    leading, terms = x[0], len(x)
    base = BASES[leading.dtype]
    is_tiny = leading.abs() < 2.0 ** (base.min_exponent + base.precision)
    value, plain = where(is_tiny, size_of(x), value), torch.where(is_tiny, leading.abs(), plain)
    is_negative = torch.signbit(leading)
    value = where(is_negative, neg(value), value)
    plain = torch.where(is_negative, -plain, plain)
    plain = torch.where(torch.isnan(leading) | (leading == 0), leading, plain)
    return finish(value, terms, plain)


def _small_power(k: Tensor) -> Tensor:
    """2^-k for k >= 0, or another small power where 2^-k is too small to matter."""
    most = float(8 * precision_of(k)) if k.dtype == torch.float64 else 120.0
    return power_of_two(-torch.where(k > most, most, k))


def _halves(x: Terms, limit: float) -> tuple[Terms, Terms, Tensor]:
    """sinh|x| and cosh|x|, both divided by 2^(k - 1), and k."""
    terms, leading = len(x), x[0]
    m = terms + 1
    q, k = exponentials.parts(bounded(size_of(x), limit), terms)
    v = add(one(leading), q, m)
    s = _small_power(k + k)
    inverse = times(div(one(leading), v, m), s)
    sine = add(add(q, mul(q, inverse, m), m), two_sum(one(leading)[0], -s), m)
    return sine, add(v, inverse, m), k


def sinh(x: Terms) -> Terms:
    """The hyperbolic sine."""
    limit = limit_of(x[0]) * math.log(2)
    sine, _, k = _halves(x, limit)
    value = scaled(sine, k - 1)
    return _signed(value, torch.where(x[0].abs() < limit, value[0], torch.inf), x)


def cosh(x: Terms) -> Terms:
    """The hyperbolic cosine."""
    limit = limit_of(x[0]) * math.log(2)
    _, cosine, k = _halves(x, limit)
    value = scaled(cosine, k - 1)
    plain = torch.where(x[0].abs() < limit, value[0], torch.inf)
    return finish(value, len(x), torch.where(torch.isnan(x[0]), x[0], plain))


def tanh(x: Terms) -> Terms:
    """The hyperbolic tangent, (exp(2|x|) - 1) / (exp(2|x|) + 1)."""
    value = _tanh_of_size(x)
    return _signed(value, value[0], x)


def _tanh_of_size(x: Terms) -> Terms:
    """The hyperbolic tangent of |x|, with one term more than x."""
    terms, leading = len(x), x[0]
    m, limit = terms + 1, ((terms + 1) * precision_of(leading)) * math.log(2)
    q, k = exponentials.parts(times(bounded(size_of(x), limit), 2.0), terms)
    s = _small_power(k)
    above = add(q, two_sum(one(leading)[0], -s), m)
    value = div(above, add(add(one(leading), q, m), (s,), m), m)
    return where(leading.abs() >= limit, one(leading), value)


_LOG2_NEAR = -1
"""log2 of |x| below which the hyperbolic tangent is subtracted from x by a series."""


def _tanh(k: int, base: Base, terms: int) -> list[Fraction]:
    """The coefficient of x^(2k) in (x - tanh(x)) / x^3."""
    n = k + 2
    return [-(4**n) * (4**n - 1) * exact.bernoulli(n) / math.factorial(2 * n)]


def tanhshrink(x: Terms) -> Terms:
    """x minus its hyperbolic tangent."""
    terms, leading, size = len(x), x[0], size_of(x)
    m, is_near = terms + 1, leading.abs() < 2.0**_LOG2_NEAR
    inner = where(is_near, size, (torch.zeros_like(leading),))
    square = mul(inner, inner, m)
    near = mul(inner, mul(square, polynomial(square, _tanh, 2.0 * _LOG2_NEAR, terms), m), m)
    value = where(is_near, near, sub(size, _tanh_of_size(x), m))
    value = where(size[0] == torch.inf, size, value)
    value = where(torch.signbit(leading), neg(value), value)
    plain = value[0] + 0.0  # 0 of -0, as by subtraction
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def asinh(x: Terms) -> Terms:
    """The inverse hyperbolic sine, log(1 + |x| + x² / (1 + sqrt(1 + x²)))."""
    terms, size = len(x), size_of(x)
    m, leading = terms + 1, size[0]
    is_large = leading > _large(leading, m)
    inner = where(is_large | torch.isnan(leading), one(leading), size)
    square = mul(inner, inner, m)
    root = sqrt(add(one(leading), square, m), m)
    w = add(inner, div(square, add(one(leading), root, m), m), m)
    value = _log_of(size, w, is_large, terms)
    return _signed(value, torch.where(leading == torch.inf, torch.inf, value[0]), x)


def _large(x: Tensor, count: int) -> float:
    """Return the bound above which x² + 1 is x² to all bits."""
    return 2.0 ** (count * precision_of(x) // 2 + 2)


def _log_of(size: Terms, w: Terms, is_large: Tensor, terms: int) -> Terms:
    """log(1 + w), or log(2 size) where `is_large` is set."""
    m, leading = terms + 1, size[0]
    is_finite = is_large & (leading < torch.inf)
    u = where(is_finite, size, add(one(leading), w, m))
    near = where(is_large, one(leading), w)
    rest, k = logarithms.parts(u, terms, near)
    k = torch.where(is_finite, k + 1, k)
    log_2 = constants(exact.log(2, bits_of(k, terms)), m, k)
    return add(mul((k,), log_2, m), rest, m)


def acosh(x: Terms) -> Terms:
    """The inverse hyperbolic cosine, log(1 + t + sqrt(2 t + t²)) with t = x - 1."""
    terms, leading = len(x), x[0]
    m = terms + 1
    t = sub(x, one(leading), m)
    is_large = leading > _large(leading, m)
    is_inside = (t[0] > 0) & ~is_large
    t_in = where(is_inside, t, one(leading))
    above = add(t_in, constants(2, 1, leading), m)
    w = add(t_in, logarithms.root_of_product(t_in, above, m), m)
    value = _log_of(x, w, is_large, terms)
    plain = torch.where(t[0] == 0, 0.0, torch.where(leading < 1, torch.nan, value[0]))
    plain = torch.where(leading == torch.inf, leading, plain)
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def atanh(x: Terms) -> Terms:
    """The inverse hyperbolic tangent, log(1 + 2 |x| / (1 - |x|)) / 2."""
    terms, leading = len(x), x[0]
    m = terms + 1
    size = size_of(x)
    below = sub(one(leading), size, m)
    is_inside = below[0] > 0
    inner = where(is_inside, size, (torch.zeros_like(leading),))
    # Where 1 - |x| is small, it is scaled by 2^shift, and so is the argument of the logarithm.
    below_normal, shift = logarithms.normal(below)
    w = div(times(inner, 2.0), below_normal, m)
    near = where(shift > 0, one(leading), w)
    unit = where(shift > 0, times(one(leading), 2.0 ** -logarithms.shift_of(leading)), one(leading))
    rest, k = logarithms.parts(add(unit, w, m), terms, near)
    value = times(logarithms.with_power(rest, k + shift, terms), 0.5)
    plain = torch.where(below[0] == 0, torch.inf, torch.where(is_inside, value[0], torch.nan))
    return _signed(value, plain, x)


# --------------------------------------------------------------------------------- activations


def _logistic(x: Terms, count: int) -> tuple[Terms, Tensor]:
    """1 / (1 + e^-x) of a guarded number as v 2^k, from e^-|x|, the numerator where x < 0."""
    leading = x[0]
    m = count + 1
    is_negative = leading < 0
    inside = bounded(where(is_negative, x, neg(x)), limit_of(leading) * math.log(2))
    q, k = exponentials.parts(inside, count)
    power = add(one(leading), q, m)
    value = div(where(is_negative, power, one(leading)), add(one(leading), scaled(power, k), m), m)
    is_beyond = leading >= limit_of(leading) * math.log(2)
    value = where(is_beyond, one(leading), value)
    return value, torch.where(is_negative, k, torch.zeros_like(k))


def sigmoid(x: Terms) -> Terms:
    """The logistic function."""
    terms, leading = len(x), x[0]
    value = scaled(*_logistic(x, terms))
    is_below = leading <= -limit_of(leading) * math.log(2)
    plain = torch.where(is_below, 0.0, value[0])
    return finish(value, terms, torch.where(torch.isnan(leading), leading, plain))


def silu(x: Terms) -> Terms:
    """x sigmoid(x)."""
    return _weighted(x, x)


def _weighted(x: Terms, argument: Terms) -> Terms:
    """x sigmoid(argument)."""
    terms, leading = len(x), x[0]
    value, k = _logistic(argument, terms)
    limit = limit_of(leading) * math.log(2)
    is_below, is_above = argument[0] <= -limit, argument[0] >= limit
    is_inside = ~is_below & ~is_above & torch.isfinite(leading)
    value = scaled(mul(value, where(is_inside, x, one(leading)), terms + 1), k)
    value = where(is_above, x, value)
    plain = torch.copysign(torch.where(is_below, 0.0, value[0]), leading)
    return finish(value, terms, torch.where(torch.isnan(leading) | (leading == 0), leading, plain))


def mish(x: Terms) -> Terms:
    """x tanh(softplus(x)) = x (u - 1) / (u + 1), with u = (1 + e^x)²."""
    terms, leading = len(x), x[0]
    m, is_negative = terms + 1, leading < 0
    limit, two = limit_of(leading) * math.log(2), constants(2, 1, leading)
    q, k = exponentials.parts(bounded(neg(size_of(x)), limit), terms)
    power = add(one(leading), q, m)
    p = scaled(power, k)  # e^-|x|; for x < 0, u - 1 = p (2 + p), else (1 + 2 p) / p²
    above = where(is_negative, add(two, p, m), add(one(leading), times(p, 2.0), m))
    below = add(one(leading), times(mul(p, add(one(leading), p, m), m), 2.0), m)
    below = where(is_negative, add(two, mul(p, above, m), m), below)
    value = div(mul(above, where(is_negative, power, one(leading)), m), below, m)
    is_inside = leading.abs() < limit
    value = mul(value, where(is_inside, x, one(leading)), m)
    value = scaled(value, torch.where(is_negative, k, torch.zeros_like(k)))
    value = where(leading >= limit, x, value)
    plain = torch.copysign(torch.where(leading <= -limit, 0.0, value[0]), leading)
    return finish(value, terms, torch.where(torch.isnan(leading) | (leading == 0), leading, plain))


_CUBIC = Fraction("0.044715")


def gelu_tanh(x: Terms) -> Terms:
    """x sigmoid(sqrt(8 / pi) (x + 0.044715 x³))."""
    terms, leading = len(x), x[0]
    m = terms + 1
    inner = bounded(x, 2.0**24)
    factor = constants(
        exact.sqrt(8 / exact.pi(bits_of(leading, terms)), bits_of(leading, terms)), m, leading
    )
    cubic = mul(mul(inner, inner, m), constants(_CUBIC, m, leading), m)
    argument = mul(mul(inner, add(one(leading), cubic, m), m), factor, m)
    huge = torch.where(leading < 0, -1e30, 1e30)
    is_inside = leading.abs() < 2.0**24
    argument = where(is_inside | torch.isnan(leading), argument, (huge,))
    return _weighted(x, argument)
