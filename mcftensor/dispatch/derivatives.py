"""Derivatives from the argument, which PyTorch takes from a rounded result or of parts that cancel.

They serve every format of terms.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcftensor.arithmetic.special_functions import is_largest, reduced
from mcftensor.formats import Format, named


def _slope_of_sigmoid(x: Tensor, y: Tensor, format: Format) -> Tensor:
    e = torch.exp(-x.abs())
    return e / ((1 + e) * (1 + e))


def _slope_of_tanh(x: Tensor, y: Tensor, format: Format) -> Tensor:
    e = torch.exp(-x.abs())  # of which a square may underflow where 1 / cosh(x) does not
    return (2 * e / (1 + e * e)).square()


DERIVATIVES: dict[str, Callable[[Tensor, Tensor, Format], Tensor]] = {
    "sigmoid": _slope_of_sigmoid,
    "tanh": _slope_of_tanh,
    "expm1": lambda x, y, format: torch.exp(x),
}
"""Derivatives as functions of x, f(x), and the format of both, which autograd differentiates again;
there PyTorch's functions are its own, without what is here. The wing `wide` adds to them."""

VALUES: dict[str, Callable[[Tensor], Tensor]] = {}
"""Functions of these names that are not `torch.NAME`."""


class _Differentiated(torch.autograd.Function):
    """A function by its name, with a derivative from the table."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, name: str, format: str
    ) -> tuple[Tensor, Any]:
        return _Differentiated.apply(x, name, format), in_dims[0]

    @staticmethod
    def forward(x: Tensor, name: str, format: str) -> Tensor:
        function: Callable[[Tensor], Tensor] = VALUES.get(name) or getattr(torch, name)
        return function(x)

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
    return DERIVATIVES[ctx.name](x, y, named(ctx.format))


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


def differentiated(name: str, format: Format, x: Tensor) -> Tensor:
    """Return a function of x by its name, with its derivative from the table."""
    made: Tensor = _Differentiated.apply(x, name, format.name)
    return made


_signature = functools.cache(inspect.signature)


def given_by_name(loss: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a loss by name, the older ones as its reduction."""
    bound = _signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = dict(bound.arguments)
    older = [given.pop(name, None) for name in ("size_average", "reduce")]
    if older != [None, None]:
        given["reduction"] = nn._reduction.legacy_get_string(*older)
    return given


def _glu(format: Format, input: Tensor, dim: int = -1) -> Tensor:
    """Return x s(y) of two halves; PyTorch's derivative has 1 - s(y) of a rounded s(y)."""
    if not input.dim() or input.shape[dim] % 2:
        return F.glu(input, dim)  # raises
    x, y = input.chunk(2, dim)
    return x * differentiated("sigmoid", format, y)


def _binary_cross_entropy_with_logits(format: Format, *args: Any, **kwargs: Any) -> Tensor:
    """Return losses by two parts of the same sign; PyTorch's derivative is s(x) - target."""
    given = given_by_name(F.binary_cross_entropy_with_logits, args, kwargs)
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


def functions(name: str) -> list[Callable[..., Any]]:
    """Return the functions of PyTorch that have a name, without patches."""
    places = (torch, Tensor, torch.special, F)
    return [inspect.unwrap(getattr(place, name)) for place in places if hasattr(place, name)]


OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    **{
        function: functools.partial(differentiated, name)
        for name in DERIVATIVES
        for function in functions(name)
    },
    F.glu: _glu,
    **{function: functools.partial(_softmax, function) for function in functions("softmax")},
    **dict.fromkeys((torch.renorm, Tensor.renorm), _renorm),
    F.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
}
"""Replacements of PyTorch's functions, which take the format before their arguments."""
