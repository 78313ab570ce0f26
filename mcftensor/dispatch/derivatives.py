"""Functions that PyTorch, or its derivative, forms with float64 constants, or whose parts cancel.

They serve formats of more than 48 bits, and all formats without float64. Derivatives that PyTorch
takes from a rounded result, which may be 1, are taken from the argument in every format of terms.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcftensor.arithmetic import exact_constants as exact
from mcftensor.arithmetic.special_functions import is_largest, reduced
from mcftensor.dispatch import beyond_float64
from mcftensor.dispatch.elementary import bits_of_constants, by_formula, constant_in, in_longer
from mcftensor.dispatch.operands import is_wrapped, stored_in
from mcftensor.formats import Format, named
from mcftensor.tensor import MCFTensor


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


def _slope_of_sigmoid(x: Tensor, y: Tensor, format: Format) -> Tensor:
    e = torch.exp(-x.abs())
    return e / ((1 + e) * (1 + e))


def _slope_of_tanh(x: Tensor, y: Tensor, format: Format) -> Tensor:
    e = torch.exp(-x.abs())  # of which a square may underflow where 1 / cosh(x) does not
    return (2 * e / (1 + e * e)).square()


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


_DERIVATIVES: dict[str, Callable[[Tensor, Tensor, Format], Tensor]] = {
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
    "sigmoid": _slope_of_sigmoid,
    "tanh": _slope_of_tanh,
    "expm1": lambda x, y, format: torch.exp(x),
}
"""Derivatives as functions of x, f(x), and the format of both."""

_FROM_ARGUMENT = ("sigmoid", "tanh", "expm1")
"""Functions whose rounded results say too little of their derivatives, in every format."""


class _Differentiated(torch.autograd.Function):
    """A function by its name, with a derivative from the table."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, name: str, format: str
    ) -> tuple[Tensor, Any]:
        return _Differentiated.apply(x, name, format), in_dims[0]

    @staticmethod
    def forward(x: Tensor, name: str, format: str) -> Tensor:
        function = getattr(torch, name, None)
        return by_formula(name, x) if function is None else function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.name, ctx.format = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent * _derivative(ctx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * _derivative(ctx), None, None


def _derivative(ctx: Any) -> Tensor:
    x, y = ctx.saved_tensors
    return _DERIVATIVES[ctx.name](x, y, named(ctx.format))


class _Softmax(torch.autograd.Function):
    """Softmax, with the distance from 1 of an element that rounds to 1.

    The other elements have this distance: their sum. A softmax has the same derivative if a number
    is subtracted from the gradient or tangent. Subtracted is the one of an element above 1/2, so
    that this element drops out of the sum.
    """

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: int) -> tuple[Tensor, int]:
        return _Softmax.apply(x.movedim(in_dims[0], 0), dim + 1 if dim >= 0 else dim), 0

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return torch.softmax(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.dim = inputs
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (y,), dim = ctx.saved_tensors, ctx.dim
        if y.numel():
            own = torch.where(is_largest(y, dim), tangent, torch.zeros_like(tangent))
            own = own.sum(dim, keepdim=True)
            dominates = (y > 0.5).any(dim, keepdim=True) & torch.isfinite(own)
            tangent = tangent - torch.where(dominates, own, torch.zeros_like(own))
        return torch._softmax_backward_data(tangent, y, dim, y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Softmax.jvp(ctx, grad), None


def _softmax(
    function: Callable[..., Tensor], format: Format, input: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    dim = args[0] if args else kwargs.get("dim")
    dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
    if not isinstance(dim, int) or any(x != format.dtype for x in dtypes):
        return function(input, *args, **kwargs)
    made: Tensor = _Softmax.apply(input, dim)
    return made


def _by_name(name: str, format: Format, x: Tensor) -> Tensor:
    made: Tensor = _Differentiated.apply(x, name, format.name)
    return made


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


_signature = functools.cache(inspect.signature)


def _given(loss: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a loss by name, the older ones as its reduction."""
    bound = _signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = dict(bound.arguments)
    older = [given.pop(name, None) for name in ("size_average", "reduce")]
    if older != [None, None]:
        given["reduction"] = nn._reduction.legacy_get_string(*older)
    return given


def _half_log_of_two_pi(format: Format, device: torch.device) -> MCFTensor:
    return _constant(lambda bits: (exact.log_2(bits) + exact.log_of_pi(bits)) / 2, format, device)


def _gaussian_nll_loss(format: Format, *args: Any, **kwargs: Any) -> Tensor:
    given = _given(F.gaussian_nll_loss, args, kwargs)
    loss = F.gaussian_nll_loss(**given | {"full": False})
    if not given["full"]:
        return loss
    shape = torch.broadcast_shapes(given["input"].shape, given["target"].shape)
    count = math.prod(shape) if given["reduction"] == "sum" else 1
    return loss + _half_log_of_two_pi(format, loss.device) * count


def _poisson_nll_loss(format: Format, *args: Any, **kwargs: Any) -> Tensor:
    given = _given(F.poisson_nll_loss, args, kwargs)
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
    given = _given(F.cross_entropy, args, kwargs)
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


def _glu(format: Format, input: Tensor, dim: int = -1) -> Tensor:
    """Return x s(y) of two halves; PyTorch's derivative has 1 - s(y) of a rounded s(y)."""
    if not input.dim() or input.shape[dim] % 2:
        return F.glu(input, dim)  # raises
    x, y = input.chunk(2, dim)
    return x * _by_name("sigmoid", format, y)


def _binary_cross_entropy_with_logits(format: Format, *args: Any, **kwargs: Any) -> Tensor:
    """Return losses by two parts of the same sign; PyTorch's derivative is s(x) - target."""
    given = _given(F.binary_cross_entropy_with_logits, args, kwargs)
    x, target = given["input"], given["target"]
    if x.shape != target.shape:
        return F.binary_cross_entropy_with_logits(x, target)  # raises
    positive = target if given["pos_weight"] is None else target * given["pos_weight"]
    losses = (target - 1) * F.logsigmoid(-x) - positive * F.logsigmoid(x)
    losses = losses if given["weight"] is None else losses * given["weight"]
    return reduced(losses, nn._reduction.get_enum(given["reduction"]))


def _renorm(format: Format, input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Return slices with norms of at most `maxnorm`; PyTorch's derivative rounds 1e-7."""
    dims = [d for d in range(input.dim()) if d != dim % input.dim()]
    norm = torch.linalg.vector_norm(input, p, dims, keepdim=True)
    return input * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), torch.ones_like(norm))


def _functions(name: str) -> list[Callable[..., Any]]:
    """Return the functions of PyTorch that have a name."""
    places = (torch, Tensor, torch.special, F)
    return [getattr(place, name) for place in places if hasattr(place, name)]


_OF_LONG_FORMATS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.lerp, Tensor.lerp), _lerp),
    **{pool: functools.partial(_lp_pool, pool) for pool in (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)},
    **{
        function: functools.partial(_spread, name)
        for name in ("var", "std", "var_mean", "std_mean")
        for function in _functions(name)
    },
    F.cross_entropy: _cross_entropy,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.poisson_nll_loss: _poisson_nll_loss,
}

_COMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.glu: _glu,
    **{function: functools.partial(_softmax, function) for function in _functions("softmax")},
    **dict.fromkeys((torch.renorm, Tensor.renorm), _renorm),
    F.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
}

OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    **{
        function: functools.partial(_by_name, name)
        for name in _DERIVATIVES
        for function in _functions(name)
    },
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _pow),
    Tensor.__rpow__: lambda format, x, base: _pow(format, base, x),
    **_OF_LONG_FORMATS,
    **_COMPOSED,
}
"""Replacements of PyTorch's functions, which take the format before their arguments."""

OF_LONG_FORMATS = frozenset(_OF_LONG_FORMATS)
"""Those of them that PyTorch composes of operators, which serve 16-bit terms as they are."""

IN_ALL_FORMATS = frozenset([*(x for name in _FROM_ARGUMENT for x in _functions(name)), *_COMPOSED])
"""Those of them that serve every format of terms."""
