"""Functions that PyTorch, or its derivative, forms with float64 constants, with exact ones.

They serve formats of more than 48 bits, and all formats without float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcftensor.arithmetic.special_functions import reduced
from mcftensor.dispatch.derivatives import DERIVATIVES, differentiated, functions, given_by_name
from mcftensor.dispatch.operands import is_wrapped, stored_in
from mcftensor.formats import Format
from mcftensor.tensor import MCFTensor
from mcftensor.wide import beyond_float64
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.elementary import bits_of_constants, constant_in, in_longer


def _constant(of_bits: Callable[[int], Any], format: Format, device: torch.device) -> MCFTensor:
    """Return a constant as an expansion without dimensions."""
    return constant_in(format, of_bits(bits_of_constants(format)), device)


@in_longer
def _exp_of_square(x: Tensor, factor: float) -> Tensor:
    return torch.exp(x * x * factor)


def _bell(x: Tensor, factor: float, square: Callable[[Any], Any], format: Format) -> Tensor:
    """Return exp(factor x²) times the root of a function of pi."""
    root = _constant(lambda bits: exact.sqrt(square(exact.pi(bits)), bits), format, x.device)
    return _exp_of_square(x, factor) * root


_SERIES = 2.0**-16  # below it, the terms that are left out are smaller than 2^-120


@in_longer
def _slope_of_sinc(x: Tensor) -> Tensor:
    """(cos(pi x) - sinc(x)) / x, from the exact distance to the nearest integer; near 0 by the
    series.
    """
    pi = _constant(exact.pi, x._format, x.device)  # type: ignore[attr-defined]
    is_small = x.abs() < _SERIES
    large = torch.where(is_small, torch.ones_like(x), x)
    whole = large.round()
    angle = (large - whole) * pi
    sign = torch.where(torch.remainder(whole, 2) == 1, -1.0, 1.0)
    slope = (torch.cos(angle) - torch.sin(angle) / (large * pi)) * sign / large
    square = (x * pi).square()
    sixth = square * square * square / 45360
    series = -x * pi.square() * (1 - square / 10 + square.square() / 280 - sixth * 3) / 3
    return torch.where(is_small, series, slope)


_EXACT: dict[str, Callable[[Tensor, Tensor, Format], Tensor]] = {
    "exp2": lambda x, y, format: y * _constant(exact.log_2, format, x.device),
    "log2": lambda x, y, format: 1 / (x * _constant(exact.log_2, format, x.device)),
    "log10": lambda x, y, format: 1 / (x * _constant(exact.log_10, format, x.device)),
    "erf": lambda x, y, format: _bell(x, -1, lambda pi: 4 / pi, format),
    "erfc": lambda x, y, format: -_bell(x, -1, lambda pi: 4 / pi, format),
    "ndtr": lambda x, y, format: _bell(x, -0.5, lambda pi: 1 / pi / 2, format),
    "erfinv": lambda x, y, format: _bell(y, 1, lambda pi: pi / 4, format),
    "tanhshrink": lambda x, y, format: torch.tanh(x).square(),
    "sinc": lambda x, y, format: _slope_of_sinc(x),
    "deg2rad": lambda x, y, format: (
        torch.ones_like(x) * _constant(lambda bits: exact.pi(bits) / 180, format, x.device)
    ),
    "rad2deg": lambda x, y, format: (
        torch.ones_like(x) * _constant(lambda bits: 180 / exact.pi(bits), format, x.device)
    ),
}
DERIVATIVES.update(_EXACT)


def _pow(format: Format, x: Any, exponent: Any) -> Tensor:
    """Return a power of operands that enter as expansions.

    The derivatives need the logarithm of the base and the exponent minus 1. Whole exponents that
    are numbers lose nothing, and an exponent of 1/2 is a square root.
    """
    if not isinstance(exponent, Tensor) and exponent == 0.5:
        return torch.sqrt(x)
    device = (x if isinstance(x, Tensor) else exponent).device

    def entered(y: Any) -> Any:
        if isinstance(y, MCFTensor) or (isinstance(y, Tensor) and _is_followed(y)):
            return y
        return MCFTensor.of(stored_in(y, format.nearest, device), format.nearest)

    is_whole = not isinstance(exponent, Tensor) and float(exponent).is_integer()
    return torch.pow(x if is_whole else entered(x), exponent if is_whole else entered(exponent))


def _is_followed(x: Tensor) -> bool:
    return x.requires_grad or is_wrapped(x)


def _whole_number(x: Any, format: Format, device: torch.device) -> MCFTensor:
    """Return a number with all its bits as an expansion without dimensions."""
    return constant_in(format, Fraction(x), device)


def _lerp(format: Format, x: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Return x + weight (end - x). Of a weight that is a number, PyTorch rounds 1 - weight."""
    is_number = not isinstance(weight, Tensor)
    return torch.lerp(x, end, _whole_number(weight, format, x.device) if is_number else weight)


def _spread(
    name: str,
    format: Format,
    x: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    axis: Any = None,
    keepdims: bool = False,
) -> Any:
    """Return a variance or deviation, alone or with the mean.

    PyTorch's derivative has 2 / (n - correction) as a float64 number.
    """
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        correction = int(unbiased)
    moments = beyond_float64.std_mean if "std" in name else beyond_float64.var_mean
    dim = axis if dim is None else dim
    moment, mean = moments(x, dim, correction=correction, keepdim=keepdim or keepdims)
    return (moment, mean) if "mean" in name else moment


def _lp_pool(
    pool: Callable[..., Tensor],
    format: Format,
    x: Tensor,
    norm_type: float,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return roots of sums of powers; PyTorch rounds the exponent of the root."""
    if math.isinf(norm_type) or norm_type == 1:
        return pool(x, norm_type, *args, **kwargs)
    sums = pool(torch.pow(x, norm_type), 1, *args, **kwargs)
    return torch.pow(sums, _whole_number(1 / Fraction(norm_type), format, x.device))


def _half_log_of_two_pi(format: Format, device: torch.device) -> MCFTensor:
    return _constant(lambda bits: (exact.log_2(bits) + exact.log_of_pi(bits)) / 2, format, device)


def _gaussian_nll_loss(format: Format, *args: Any, **kwargs: Any) -> Tensor:
    given = given_by_name(F.gaussian_nll_loss, args, kwargs)
    loss = F.gaussian_nll_loss(**given | {"full": False})
    if not given["full"]:
        return loss
    shape = torch.broadcast_shapes(given["input"].shape, given["target"].shape)
    count = math.prod(shape) if given["reduction"] == "sum" else 1
    return loss + _half_log_of_two_pi(format, loss.device) * count


def _poisson_nll_loss(format: Format, *args: Any, **kwargs: Any) -> Tensor:
    given = given_by_name(F.poisson_nll_loss, args, kwargs)
    if not given["full"]:
        return F.poisson_nll_loss(**given)
    loss = F.poisson_nll_loss(**given | {"full": False, "reduction": "none"})
    is_large, one = given["target"] > 1, _whole_number(1, format, loss.device)
    target = torch.where(is_large, given["target"], one)
    log = torch.log(target)
    stirling = target * log - target + log / 2 + _half_log_of_two_pi(format, loss.device)
    losses = loss + torch.where(is_large, stirling, torch.zeros_like(stirling))
    return reduced(losses, nn._reduction.get_enum(given["reduction"]))


def _cross_entropy(format: Format, *args: Any, **kwargs: Any) -> Tensor:
    """Return losses. Of smoothed labels, PyTorch rounds 1 - smoothing and smoothing / classes."""
    given = given_by_name(F.cross_entropy, args, kwargs)
    x, target, smoothing = (given[name] for name in ("input", "target", "label_smoothing"))
    given["label_smoothing"] = 0.0
    if not smoothing or not isinstance(x, MCFTensor):
        return F.cross_entropy(**given | {"label_smoothing": smoothing})
    share, classes = _whole_number(smoothing, format, x.device), x.shape[min(1, x.dim() - 1)]
    if target.is_floating_point():
        return F.cross_entropy(**given | {"target": target * (1 - share) + share / classes})
    # The loss is linear in the smoothing. At 1 it has the rounded 1 / classes as a factor.
    others = F.cross_entropy(**given | {"label_smoothing": 1.0})
    factor = Fraction(smoothing) / (classes * Fraction(1 / classes))
    own = F.cross_entropy(**given) * (1 - share)
    return own + others * _whole_number(factor, format, x.device)


_WITHOUT_CONSTANTS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.lerp, Tensor.lerp), _lerp),
    **{pool: functools.partial(_lp_pool, pool) for pool in (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)},
    **{
        function: functools.partial(_spread, name)
        for name in ("var", "std", "var_mean", "std_mean")
        for function in functions(name)
    },
    F.cross_entropy: _cross_entropy,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.poisson_nll_loss: _poisson_nll_loss,
}


OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    **{
        function: functools.partial(differentiated, name)
        for name in _EXACT
        for function in functions(name)
    },
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _pow),
    Tensor.__rpow__: lambda format, x, base: _pow(format, base, x),
    **_WITHOUT_CONSTANTS,
}
"""Replacements of PyTorch's functions, which take the format before their arguments."""
