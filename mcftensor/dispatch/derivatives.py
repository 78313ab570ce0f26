"""Functions whose derivatives PyTorch forms with float64 constants, or whose parts cancel.

They serve formats of more than 48 bits, and all formats without float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcftensor.arithmetic import exact_constants as exact
from mcftensor.dispatch.elementary import bits_of_constants, by_formula, constant_in, in_longer
from mcftensor.dispatch.operands import is_wrapped, stored_in
from mcftensor.formats import Format, named
from mcftensor.tensor import MCFTensor


def _constant(of_bits: Callable[[int], Any], format: Format, device: torch.device) -> MCFTensor:
    """Return a constant as an expansion without dimensions."""
    return constant_in(format, of_bits(bits_of_constants(format)), device)


def _two_by_root_of_pi(bits: int) -> Fraction:
    return 2 / exact.sqrt(exact.pi(bits), bits)


def _density_at_zero(bits: int) -> Fraction:
    return exact.sqrt(1 / exact.pi(bits) / 2, bits)


@in_longer
def _exp_of_square(x: Tensor, factor: float) -> Tensor:
    return torch.exp(x * x * factor)


_DERIVATIVES: dict[str, Callable[[Tensor, Tensor, Format], Tensor]] = {
    "exp2": lambda x, y, format: y * _constant(exact.log_2, format, x.device),
    "log2": lambda x, y, format: 1 / (x * _constant(exact.log_2, format, x.device)),
    "log10": lambda x, y, format: 1 / (x * _constant(exact.log_10, format, x.device)),
    "erf": lambda x, y, format: (
        _exp_of_square(x, -1) * _constant(_two_by_root_of_pi, format, x.device)
    ),
    "erfc": lambda x, y, format: (
        -_exp_of_square(x, -1) * _constant(_two_by_root_of_pi, format, x.device)
    ),
    "ndtr": lambda x, y, format: (
        _exp_of_square(x, -0.5) * _constant(_density_at_zero, format, x.device)
    ),
    "tanhshrink": lambda x, y, format: torch.tanh(x).square(),
}
"""Derivatives as functions of x, f(x), and the format of both."""


class _Differentiated(torch.autograd.Function):
    """A function by its name, with a derivative from the table."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, name: str, format: str
    ) -> tuple[Tensor, Any]:
        return _Differentiated.apply(x, name, format), in_dims[0]

    @staticmethod
    def forward(x: Tensor, name: str, format: str) -> Tensor:
        return by_formula(name, x)

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


def _rpow(format: Format, x: Tensor, base: Any) -> Tensor:
    return _pow(format, base, x)


def _functions(name: str) -> list[Callable[..., Any]]:
    """Return the functions of PyTorch that have a name."""
    places = (torch, Tensor, torch.special, F)
    return [getattr(place, name) for place in places if hasattr(place, name)]


OWN: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **{
        function: functools.partial(_by_name, name)
        for name in _DERIVATIVES
        for function in _functions(name)
    },
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _pow),
    Tensor.__rpow__: _rpow,
}
"""Replacements of PyTorch's functions, which take the format before their arguments."""
