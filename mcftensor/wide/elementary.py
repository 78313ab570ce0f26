"""Elementary functions of formats beyond 48 bits.

Functions of one element have formulas. Sums of exponentials, and PyTorch's derivative operators,
are evaluated in a format with one more term and rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcftensor.arithmetic import special_functions
from mcftensor.arithmetic.base_types import BASES
from mcftensor.dispatch.operands import expansions, mapped, stored_in, value_of
from mcftensor.dispatch.system import SHARPER
from mcftensor.formats import Format
from mcftensor.operators.own_functions import by_formula
from mcftensor.passes.operators import Number
from mcftensor.tensor import MCFTensor
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.functions import FUNCTIONS

ConstantOfBits = exact.Constant | Callable[[int], Fraction]
"""A constant, or a function that returns it with a number of bits."""


def _pow(x: Any, exponent: Any) -> Tensor:
    """Return a power; exponents 1, 2 and -1 by arithmetic."""
    if isinstance(exponent, Number) and isinstance(x, Tensor):
        if exponent == 1:
            return x.clone()
        if exponent == 2:
            return torch.square(x)
        if exponent == -1:
            return torch.reciprocal(x)
    return by_formula("pow", x, exponent)


def nearest_value(x: Any, format: Format, device: torch.device | None = None) -> MCFTensor:
    """Return an operand as a value of a format on its device, or another, rounded to nearest."""
    return MCFTensor.of(stored_in(x, format, x.device if device is None else device), format)


def in_longer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of values that is evaluated with one more term and rounded once."""

    @functools.wraps(function)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        found = expansions((args, kwargs))
        format = found[0]._format
        longer = format.guarded  # type: ignore[attr-defined]

        def lengthened(x: Any) -> Any:
            return nearest_value(x, longer) if isinstance(x, MCFTensor) else x

        result = function(*mapped(lengthened, args), **mapped(lengthened, kwargs))
        if isinstance(result, tuple):  # PyTorch's decompositions give tuples with names
            result = tuple(result)
        return mapped(
            lambda x: value_of(x, format, found) if isinstance(x, MCFTensor) else x, result
        )

    return rounded


# -------------------------------------------------------------------------------- activations


@in_longer
def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    inner = torch.where(x > 0, torch.zeros_like(x), x)  # of +inf, too
    low = torch.expm1(inner * input_scale) * alpha * scale
    return torch.where(x > 0, x * scale, low)


@in_longer
def _elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:
    inner = torch.where(x > 0, torch.zeros_like(x), x)
    slope: Tensor = like(x, Fraction(alpha) * Fraction(scale))
    slope = inner + slope if is_result else torch.exp(inner * input_scale) * slope
    return torch.where(x > 0, grad * scale, grad * input_scale * slope)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return by_formula("gelu_tanh" if approximate == "tanh" else "gelu", x)


def like(x: Tensor, value: ConstantOfBits) -> MCFTensor:
    """Return a constant in the format of x, on its device."""
    return constant_in(x._format, value, x.device)  # type: ignore[attr-defined]


def constant_in(format: Format, value: ConstantOfBits, device: torch.device) -> MCFTensor:
    """Return a constant, or a function of the number of its bits, without dimensions."""
    base = BASES[format.dtype]
    number = value(format.precision + 2 * base.precision) if callable(value) else value
    floats = exact.floats_of(number, base.precision, len(format.components))
    terms = [torch.full((), y, dtype=base.dtype, device=device) for y in floats]  # no copy there
    return MCFTensor.of(terms, format.nearest)


def _polygamma(n: int, x: Tensor) -> Tensor:
    """The derivative of order n of digamma, whose own derivative is trigamma."""
    if n < 2:
        return by_formula("trigamma" if n else "digamma", x)
    return _derivative_of_digamma(n, x)


@in_longer
def _derivative_of_digamma(n: int, x: Tensor) -> Tensor:
    """(-1)^(n + 1) n! times the sum of (x + k)^-s over all k >= 0, for s = n + 1.

    Below 0, the sum over k < 0 is subtracted from the sum over all integers. The error is relative
    to the larger one.
    """
    s = n + 1
    sign = 1.0 if s % 2 == 0 else -1.0
    offset = x - torch.round(x)
    is_inside = torch.isfinite(x) & ((x > 0) | (offset != 0))
    size = torch.where(is_inside, torch.where(x > 0, x, 1 - x), torch.ones_like(x))
    offset = torch.where(is_inside & (x < 0), offset, torch.full_like(x, 0.5))
    sums = _sums_of_powers(torch.stack([size, 1 + offset, 1 - offset]), s)
    of_all = (sums[1] + sign * sums[2]) + _scaled_power(offset, s)
    result = sign * torch.where(x > 0, sums[0], of_all - sign * sums[0])
    plain = torch.polygamma(n, x._read()[0])  # type: ignore[attr-defined]
    return torch.where(is_inside, result, plain)


def _sums_of_powers(x: Tensor, s: int) -> Tensor:
    """(s - 1)! times the sum of (x + k)^-s over all k >= 0, by the Euler-Maclaurin formula."""
    bits = x._format.precision + 8  # type: ignore[attr-defined]
    count = bits // 4  # each term of the formula has 4 bits
    start = math.ceil((s + 2 * count) * 2 / math.pi)
    total = torch.zeros_like(x)
    for k in range(start):
        total = total + _scaled_power(x + k, s)
    last = x + start
    inverse = start / last
    square = inverse * inverse
    rest = torch.zeros_like(x)
    for k in range(count, 0, -1):
        rising = Fraction(math.prod(range(s, s + 2 * k - 1)), math.factorial(2 * k))
        rest = rest * square + like(x, exact.bernoulli(k) * rising / start ** (2 * k - 1))
    return total + _scaled_power(last, s) * (last / (s - 1) + 0.5 + inverse * rest)


def _scaled_power(x: Tensor, s: int) -> Tensor:
    """(s - 1)! x^-s, whose factors stay near 1."""
    factor = math.factorial(s - 1)
    e = round(math.log2(factor) / s)
    base = 2.0**e / x
    power = like(x, Fraction(factor) / Fraction(2) ** (e * s)) * torch.ones_like(x)
    power = power * base if s % 2 else power
    while s := s // 2:
        base = base * base
        power = power * base if s % 2 else power
    return power


@in_longer
def _spherical_bessel_j0(x: Tensor) -> Tensor:
    is_inside = torch.isfinite(x) & (x != 0)
    inside = torch.where(is_inside, x, torch.ones_like(x))
    ends = torch.where(x == 0, torch.ones_like(x), torch.where(torch.isnan(x), x, 0.0))
    return torch.where(is_inside, torch.sin(inside) / inside, ends)


def _times_logarithm(logarithm: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return x times a logarithm of y, and 0 for x = 0 unless y is NaN; numbers enter exactly."""

    @in_longer
    def product(x: Any, y: Any) -> Tensor:
        first = expansions((x, y))[0]
        a, b = (nearest_value(z, first._format, first.device) for z in (x, y))
        return torch.where((a == 0) & ~torch.isnan(b), torch.zeros_like(b * a), a * logarithm(b))

    return product


_LEAST_VARIANCE = float(np.float32(1e-12))
"""PyTorch's lower limit of x (1 - x) in the gradient of `binary_cross_entropy`."""


@in_longer
def _binary_cross_entropy_backward(
    grad: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    slope = (x - y) / (x * (1 - x)).clamp(min=_LEAST_VARIANCE)
    slope = slope if weight is None else slope * weight
    return grad * slope / (x.numel() if reduction == 1 else 1)


_FIRST_STEPS = 6
"""Newton's steps for `erfinv` in one float, from the asymptotic sqrt(-log(erfc))."""


@in_longer
def _erfinv(x: Tensor) -> Tensor:
    """The y with erfc(y) = 1 - |x|, by Halley's iteration, which triples the bits of each step."""
    format, rest = x._format, 1 - x.abs()  # type: ignore[attr-defined]
    is_inside = (rest > 0) & (x != 0)
    size = torch.where(is_inside, x.abs(), torch.full_like(x, 0.5))
    rest = 1 - size
    small, tail = (z._read()[0] for z in (size, rest))  # type: ignore[attr-defined]
    y = torch.sqrt(-torch.log(tail))
    for _ in range(_FIRST_STEPS):  # log(erfc(y)) = log(erfcx(y)) - y²
        scaled = torch.special.erfcx(y)
        y = y + (torch.log(scaled) - y * y - torch.log(tail)) * scaled * (math.sqrt(math.pi) / 2)
    y = torch.where(small < 0.5, torch.erfinv(small), y)
    found: Tensor = nearest_value(y, format)
    half_root = like(x, lambda bits: exact.sqrt(exact.pi(bits), bits) / 2)
    right = BASES[x.dtype].precision - 8
    while right < format.precision:
        inverse = torch.exp(found * found)  # without it, erfc may have tails below all numbers
        tail_error = by_formula("erfcx_of_size", found) - rest * inverse
        error = torch.where(size < 0.5, (size - torch.erf(found)) * inverse, tail_error)
        change = error * half_root
        found = found + change / (1 - found * change)
        right *= 3
    plain = torch.erfinv(x._read()[0])  # type: ignore[attr-defined]
    ends = torch.where(x.abs() > 1, torch.nan, plain)
    return torch.where(is_inside, torch.where(x < 0, -found, found), ends)


@in_longer
def _degrees_to_radians(x: Tensor) -> Tensor:
    return x * like(x, lambda bits: exact.pi(bits) / 180)


@in_longer
def _radians_to_degrees(x: Tensor) -> Tensor:
    return x * like(x, lambda bits: 180 / exact.pi(bits))


@in_longer
def _mvlgamma(x: Tensor, p: int) -> Tensor:
    halves = torch.arange(1 - p, 1, dtype=x.dtype, device=x.device) / 2
    share = Fraction(p * (p - 1), 4)
    rest = like(x, lambda bits: share * exact.log(exact.pi(bits + 8), bits))
    return torch.lgamma(x.unsqueeze(-1) + halves).sum(-1) + rest


DIFFERENCES: dict[str, Callable[..., Any]] = {
    "_log_softmax": in_longer(special_functions.log_softmax),  # x.log_softmax, F.cross_entropy
    "logsumexp": in_longer(special_functions.logsumexp),  # x.logsumexp
    # Gradients of F.binary_cross_entropy.
    "binary_cross_entropy_backward": _binary_cross_entropy_backward,
}
"""Functions of differences of elements."""

ALGORITHMS: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(by_formula, name) for name in FUNCTIONS},  # x.exp, torch.atan2
    **{x.__name__: in_longer(function) for x, function in SHARPER.items()},  # torch.logit
    **DIFFERENCES,
    "pow": _pow,  # x ** 0.3
    "gelu": _gelu,  # F.gelu
    "polygamma": _polygamma,  # gradients of torch.digamma
    "polygamma_": lambda x, n: _polygamma(n, x),  # x.polygamma_
    "elu": _elu,  # F.elu, F.selu
    "elu_backward": _elu_backward,  # gradients of F.elu
    **dict.fromkeys(
        ("softshrink_backward", "hardshrink_backward"),
        lambda grad, x, limit: torch.where(x.abs() > limit, grad, torch.zeros_like(grad)),
    ),  # gradients of F.softshrink and F.hardshrink
    "special_spherical_bessel_j0": _spherical_bessel_j0,  # torch.special.spherical_bessel_j0
    "erfinv": _erfinv,  # torch.erfinv
    "xlogy": _times_logarithm(torch.log),  # torch.xlogy
    "special_xlog1py": _times_logarithm(torch.log1p),  # torch.special.xlog1py
    "deg2rad": _degrees_to_radians,  # torch.deg2rad
    "rad2deg": _radians_to_degrees,  # torch.rad2deg
    "mvlgamma": _mvlgamma,  # torch.mvlgamma
    # PyTorch decomposes it into a difference of products, which cancels.
    "_softmax_backward_data": in_longer(
        lambda grad, y, dim, dtype: y * (grad - (grad * y).sum(dim, keepdim=True))
    ),
}
"""Algorithms by the names of aten operators."""
