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
from mcftensor.dispatch.derivatives import (
    DERIVATIVES,
    VALUES,
    differentiated,
    functions,
    given_by_name,
)
from mcftensor.formats import Format, named
from mcftensor.kernels.columns import is_wrapped
from mcftensor.operators.own_functions import by_formula
from mcftensor.tensor import MCFTensor
from mcftensor.wide import beyond_float64
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.elementary import constant_in, in_longer, like, nearest_value


@in_longer
def _exp_of_square(factor: float, x: Tensor) -> Tensor:
    return torch.exp(x * x * factor)


def _bell(x: Tensor, factor: float, square: Callable[[Any], Any], format: Format) -> Tensor:
    """Return exp(factor x²) times the root of a function of pi."""
    root = constant_in(format, lambda bits: exact.sqrt(square(exact.pi(bits)), bits), x.device)
    return differentiated(f"exp({factor} x²)", format, x) * root


def _slope_of_gelu(approximate: str, x: Tensor) -> Tensor:
    made: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)
    return made


def _bend_of_gelu(x: Tensor, y: Tensor, format: Format) -> Tensor:
    """Return the second derivative of x F(x), with F the normal distribution."""
    return _bell(x, -0.5, lambda pi: 1 / pi / 2, format) * (2 - x * x)


def _bend_of_gelu_tanh(x: Tensor, y: Tensor, format: Format) -> Tensor:
    """Return the second derivative of x s(z), with s the logistic function, z = r x (1 + c x²)."""
    root = constant_in(format, lambda bits: exact.sqrt(8 / exact.pi(bits), bits), x.device)
    cubic = like(x, Fraction("0.044715"))
    z, slope, bend = (
        root * x * (1 + cubic * x * x),
        root * (1 + 3 * cubic * x * x),
        6 * root * cubic,
    )
    s, t = torch.sigmoid(z), torch.sigmoid(-z)
    return s * t * (2 * slope + x * (bend * x + slope * slope * (t - s)))


_SERIES = 2.0**-16  # below it, the terms that are left out are smaller than 2^-120


@in_longer
def _slope_of_sinc(x: Tensor) -> Tensor:
    """(cos(pi x) - sinc(x)) / x, from the exact distance to the nearest integer; near 0 by the
    series.
    """
    pi = constant_in(x._format, exact.pi, x.device)  # type: ignore[attr-defined]
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


def _bend_of_sinc(x: Tensor, y: Tensor, format: Format) -> Tensor:
    """Return the derivative of the slope y of sinc: -pi² sinc(x) - 2 y / x."""
    square = constant_in(format, exact.pi, x.device).square()
    is_zero = x == 0
    bend = -square * differentiated("sinc", format, x) - 2 * y / torch.where(
        is_zero, torch.ones_like(x), x
    )
    return torch.where(is_zero, -square / 3, bend)


_EXACT: dict[str, Callable[[Tensor, Tensor, Format], Tensor]] = {
    "exp2": lambda x, y, format: y * constant_in(format, exact.log_2, x.device),
    "log2": lambda x, y, format: 1 / (x * constant_in(format, exact.log_2, x.device)),
    "log10": lambda x, y, format: (
        1 / (x * constant_in(format, lambda bits: exact.log(10, bits), x.device))
    ),
    "erf": lambda x, y, format: _bell(x, -1, lambda pi: 4 / pi, format),
    "erfc": lambda x, y, format: -_bell(x, -1, lambda pi: 4 / pi, format),
    "ndtr": lambda x, y, format: _bell(x, -0.5, lambda pi: 1 / pi / 2, format),
    "erfinv": lambda x, y, format: _bell(y, 1, lambda pi: pi / 4, format),
    "tanhshrink": lambda x, y, format: torch.tanh(x).square(),
    "sinc": lambda x, y, format: differentiated("slope of sinc", format, x),
    "slope of sinc": _bend_of_sinc,
    "exp(-1 x²)": lambda x, y, format: -2 * x * y,
    "exp(-0.5 x²)": lambda x, y, format: -x * y,
    "exp(1 x²)": lambda x, y, format: 2 * x * y,
    "gelu": lambda x, y, format: differentiated("slope of gelu", format, x),
    "slope of gelu": _bend_of_gelu,
    "gelu tanh": lambda x, y, format: differentiated("slope of gelu tanh", format, x),
    "slope of gelu tanh": _bend_of_gelu_tanh,
    "deg2rad": lambda x, y, format: (
        torch.ones_like(x) * constant_in(format, lambda bits: exact.pi(bits) / 180, x.device)
    ),
    "rad2deg": lambda x, y, format: (
        torch.ones_like(x) * constant_in(format, lambda bits: 180 / exact.pi(bits), x.device)
    ),
}
DERIVATIVES.update(_EXACT)
VALUES.update(
    {f"exp({x} x²)": functools.partial(_exp_of_square, x) for x in (-1, -0.5, 1)}
    | {
        "ndtr": functools.partial(by_formula, "ndtr"),
        "slope of sinc": _slope_of_sinc,
        "gelu": F.gelu,
        "gelu tanh": functools.partial(F.gelu, approximate="tanh"),
        "slope of gelu": functools.partial(_slope_of_gelu, "none"),
        "slope of gelu tanh": functools.partial(_slope_of_gelu, "tanh"),
        "tanhshrink": functools.partial(by_formula, "tanhshrink"),
    }
)


class _LogAddExp2(torch.autograd.Function):
    """log2(2^x + 2^y), whose second derivative PyTorch forms with a float64 log(2)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, format: str) -> Tensor:
        return torch.logaddexp2(x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *operands, ctx.format = inputs
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        shares = _shares(ctx)
        return grad * shares[0], grad * shares[1], None

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor, of_y: Tensor, _: Any) -> Tensor:
        shares = _shares(ctx)
        return of_x * shares[0] + of_y * shares[1]


def _shares(ctx: Any) -> list[Tensor]:
    """Return the derivatives of log2(2^x + 2^y)."""
    x, y = ctx.saved_tensors
    return [1 / (1 + differentiated("exp2", named(ctx.format), d)) for d in (y - x, x - y)]


def _logaddexp2(format: Format, x: Any, y: Any) -> Tensor:
    device = (x if isinstance(x, Tensor) else y).device
    x, y = torch.broadcast_tensors(_entered(x, format, device), _entered(y, format, device))
    made: Tensor = _LogAddExp2.apply(x, y, format.name)
    return made


def _gelu(format: Format, input: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate not in ("none", "tanh"):
        return F.gelu(input, approximate=approximate)  # raises
    return differentiated("gelu tanh" if approximate == "tanh" else "gelu", format, input)


def _pow(format: Format, x: Any, exponent: Any) -> Tensor:
    """Return a power of operands that enter as expansions.

    The derivatives need the logarithm of the base and the exponent minus 1. Whole exponents that
    are numbers lose nothing, and an exponent of 1/2 is a square root.
    """
    if not isinstance(exponent, Tensor) and exponent == 0.5:
        return torch.sqrt(x)
    if not isinstance(exponent, Tensor) and float(exponent).is_integer():
        return torch.pow(x, exponent)
    device = (x if isinstance(x, Tensor) else exponent).device
    return torch.pow(_entered(x, format, device), _entered(exponent, format, device))


def _entered(x: Any, format: Format, device: torch.device) -> Tensor:
    """Return an operand as an expansion, unless a gradient follows it."""
    is_followed = isinstance(x, Tensor) and (x.requires_grad or is_wrapped(x))
    if isinstance(x, MCFTensor) or is_followed:
        return x
    return nearest_value(x, format.nearest, device)


def _lerp(format: Format, x: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Return x + weight (end - x). Of a weight that is a number, PyTorch rounds 1 - weight."""
    is_number = not isinstance(weight, Tensor)
    return torch.lerp(x, end, constant_in(format, weight, x.device) if is_number else weight)


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
    dim, keepdim = axis if dim is None else dim, keepdim or keepdims
    return beyond_float64.MOMENTS[name](x, dim, correction=correction, keepdim=keepdim)


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
    return torch.pow(sums, constant_in(format, 1 / Fraction(norm_type), x.device))


def _half_log_of_two_pi(format: Format, device: torch.device) -> MCFTensor:
    return constant_in(format, lambda bits: exact.log(2 * exact.pi(bits + 8), bits) / 2, device)


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
    is_large, one = given["target"] > 1, constant_in(format, 1, loss.device)
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
    share, classes = constant_in(format, smoothing, x.device), x.shape[min(1, x.dim() - 1)]
    if target.is_floating_point():
        return F.cross_entropy(**given | {"target": target * (1 - share) + share / classes})
    # The loss is linear in the smoothing. At 1 it has the rounded 1 / classes as a factor.
    others = F.cross_entropy(**given | {"label_smoothing": 1.0})
    factor = Fraction(smoothing) / (classes * Fraction(1 / classes))
    own = F.cross_entropy(**given) * (1 - share)
    return own + others * constant_in(format, factor, x.device)


_WITHOUT_CONSTANTS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.lerp, Tensor.lerp), _lerp),
    **{pool: functools.partial(_lp_pool, pool) for pool in (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)},
    **{
        function: functools.partial(_spread, name)
        for name in beyond_float64.MOMENTS
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
    F.gelu: _gelu,
    **dict.fromkeys((torch.logaddexp2, Tensor.logaddexp2), _logaddexp2),
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _pow),
    Tensor.__rpow__: lambda format, x, base: _pow(format, base, x),
    **_WITHOUT_CONSTANTS,
}
"""Replacements of PyTorch's functions, which take the format before their arguments."""
