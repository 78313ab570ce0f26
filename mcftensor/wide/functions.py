"""Elementary functions of terms, by the names of their formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcftensor.arithmetic.network_numbers import Terms
from mcftensor.arithmetic.number_protocol import Number
from mcftensor.wide import (
    angles,
    error_function,
    exponentials,
    gamma_function,
    hyperbolic,
    logarithms,
    trigonometry,
)
from mcftensor.wide.exponentials import Result
from mcftensor.wide.guarded import Guarded, finish


def _of_terms(function: Callable[..., Result]) -> Callable[..., Number]:
    """Turn a function of guarded numbers into a function of network numbers."""

    def of_numbers(*operands: Number) -> Number:
        entered = [Guarded(x.floats, len(x.floats) + 1) for x in operands]
        value, plain = function(*entered)
        if len(entered) == 1:
            leading = entered[0].leading
            plain = torch.where(torch.isnan(leading), leading, plain)
        return Terms(finish(value, plain))

    return of_numbers


_FUNCTIONS: dict[str, Callable[..., Result]] = {
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
    "cbrt": logarithms.cube_root,
    "erf": error_function.erf,
    "erfc": error_function.erfc,
    "erfcx_of_size": error_function.erfcx_of_size,
    "ndtr": error_function.ndtr,
    "gelu": error_function.gelu,
    "gamma": gamma_function.gamma_of,
    "lgamma": gamma_function.lgamma,
    "digamma": gamma_function.digamma,
    "trigamma": gamma_function.trigamma,
}

FUNCTIONS: dict[str, Callable[..., Number]] = {
    name: _of_terms(function) for name, function in _FUNCTIONS.items()
}
"""The same on network numbers."""
