"""Numbers of PyTorch: a dtype or a format of this library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from mpmath import mp
from torch import Tensor

import mcftensor as mcf
from fpcore.evaluation import Mask, Unsupported

Kind: TypeAlias = torch.dtype | mcf.Format

LONG = 1200
"""Bits of constants."""


def named(name: str) -> Kind:
    """A dtype or a format by its name."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else mcf.Format.from_name(name)


def entered(values: Sequence[Fraction | float], kind: Kind) -> Tensor:
    """Exact values, rounded once."""
    if isinstance(kind, mcf.Format):
        return mcf.exact.from_exact(list(values), kind)
    return mcf.as_plain(mcf.exact.from_exact(list(values), mcf.fp64x2), kind)


@functools.cache
def constant(value: Fraction | str, kind: Kind) -> Tensor:
    """A number, or a constant by its name, without dimensions."""
    if value in ("INFINITY", "NAN"):
        exact: Any = float("inf" if value == "INFINITY" else "nan")
    elif isinstance(value, str):
        with mp.workprec(LONG):
            number = +{"PI": mp.pi, "E": mp.e}[value]
        exact = Fraction(int(number.man)) * Fraction(2) ** int(number.exp)
    else:
        exact = value
    return entered([exact], kind)[0]


def _cube_root(x: Tensor) -> Tensor:
    third = x.new_ones(()) / 3
    return torch.where(x < 0, -torch.pow(-x, third), torch.pow(x.abs(), third))


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "*": torch.mul,
    "/": torch.div,
    "fma": lambda x, y, z: torch.addcmul(z, x, y),
    "fabs": torch.abs,
    "cbrt": _cube_root,
    "log": torch.log,
    "fmin": lambda x, y: torch.where(torch.isnan(x) | (y < x), y, x),
    "fmax": lambda x, y: torch.where(torch.isnan(x) | (y > x), y, x),
    **{
        name: getattr(torch, name)
        for name in (
            "sqrt", "hypot", "pow", "exp", "exp2", "expm1", "log2", "log10", "log1p", "sin", "cos",
            "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh",
            "atanh", "floor", "ceil", "trunc", "fmod", "copysign",
        )
    },
}  # fmt: skip

COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "==": torch.eq,
    "!=": torch.ne,
}


class Machine:
    """Tensors of a dtype or a format."""

    def __init__(self, kind: Kind, lanes: int) -> None:
        self.kind = kind
        self.lanes = lanes

    def constant(self, value: Fraction | str) -> Tensor:
        """A number, or a constant by its name, on all lanes."""
        return constant(value, self.kind).expand(self.lanes)

    def apply(self, operation: str, operands: Sequence[Any]) -> Tensor:
        """An operation on each lane."""
        if operation == "-" and len(operands) == 1:
            return -operands[0]
        if operation == "/" and len(operands) == 1:
            return 1 / operands[0]
        if operation in ("+", "-", "*", "/"):
            function: Any = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}[
                operation
            ]
            return functools.reduce(function, operands)
        if operation not in OPERATIONS:
            raise Unsupported(f"{operation} is no operation here")
        return OPERATIONS[operation](*operands)

    def compare(self, operation: str, x: Any, y: Any) -> Mask:
        """A comparison on each lane."""
        found: Mask = COMPARISONS[operation](x, y).numpy()
        return found

    def choose(self, mask: Mask, x: Any, y: Any) -> Tensor:
        """x on the lanes of a mask, y on the others."""
        return torch.where(torch.from_numpy(mask), x, y)


def terms(x: Tensor) -> list[list[float]]:
    """The floats whose sum each element is."""
    components = x.components if isinstance(x, mcf.MCFTensor) else (x,)
    return [list(row) for row in zip(*(t.double().tolist() for t in components), strict=True)]
