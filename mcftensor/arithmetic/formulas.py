"""Elementwise operations, each written once for all kinds of numbers."""

from __future__ import annotations

from collections.abc import Callable

from mcftensor.arithmetic import (
    angles,
    cube_root,
    error_function,
    exponentials,
    gamma_function,
    hyperbolic,
    logarithms,
    networks,
    trigonometry,
)
from mcftensor.arithmetic.network_numbers import Terms
from mcftensor.arithmetic.number_protocol import Number


def _lerp(start: Number, end: Number, weight: Number) -> Number:
    """start + weight * (end - start), computed from the nearer end."""
    difference = end - start
    near = weight.fma(difference, start)
    far = (weight - 1.0).fma(difference, end)
    return near.where(weight.is_below(0.5), far)


def _of_terms(function: Callable[..., networks.Terms]) -> Callable[..., Number]:
    """Turn a function of terms into a function of network numbers."""

    def of_numbers(*operands: Number) -> Number:
        return Terms(function(*(x.floats for x in operands)))

    return of_numbers


_FUNCTIONS: dict[str, Callable[..., networks.Terms]] = {
    "exp": exponentials.exp,
    "exp2": exponentials.exp2,
    "expm1": exponentials.expm1,
    "log": logarithms.log,
    "log2": logarithms.log2,
    "log10": logarithms.log10,
    "log1p": logarithms.log1p,
    "pow": logarithms.pow,
    "sinh": hyperbolic.sinh,
    "cosh": hyperbolic.cosh,
    "tanh": hyperbolic.tanh,
    "tanhshrink": hyperbolic.tanhshrink,
    "asinh": hyperbolic.asinh,
    "acosh": hyperbolic.acosh,
    "atanh": hyperbolic.atanh,
    "sigmoid": hyperbolic.sigmoid,
    "silu": hyperbolic.silu,
    "mish": hyperbolic.mish,
    "softplus": logarithms.softplus,
    "gelu_tanh": hyperbolic.gelu_tanh,
    "sin": trigonometry.sin,
    "cos": trigonometry.cos,
    "tan": trigonometry.tan,
    "sinpi": trigonometry.sin_of_pi,
    "cospi": trigonometry.cos_of_pi,
    "asin": angles.asin,
    "acos": angles.acos,
    "atan": angles.atan,
    "atan2": angles.atan2,
    "hypot": angles.hypot,
    "cbrt": cube_root.cube_root,
    "erf": error_function.erf,
    "erfc": error_function.erfc,
    "ndtr": error_function.ndtr,
    "gelu": error_function.gelu,
    "gamma": gamma_function.gamma_of,
    "lgamma": gamma_function.lgamma,
    "digamma": gamma_function.digamma,
    "trigamma": gamma_function.trigamma,
}

# Operations that network numbers alone have.
_OF_TERMS: dict[str, Callable[..., Number]] = {
    name: _of_terms(function) for name, function in _FUNCTIONS.items()
}

# Each operation on numbers of one kind. `passes/expansion.py` states its error in each format.
OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "square": lambda x: x * x,
    "sqrt": lambda x: x.sqrt(),
    "fma": lambda x, y, z: x.fma(y, z),
    "fnma": lambda x, y, z: (-x).fma(y, z),
    "addcmul": lambda x, a, b, value: (value * a).fma(b, x),
    "addcdiv": lambda x, a, b, value: x + value * a / b,
    "lerp": _lerp,
    **_OF_TERMS,
}
