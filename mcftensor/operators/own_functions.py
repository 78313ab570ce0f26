"""Elementary functions that PyTorch lacks, as operators with derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import NARROW
from mcftensor.dispatch import storage_formats
from mcftensor.dispatch.operands import after, expansions, rounding_key, stored_in, value_of
from mcftensor.dispatch.registry import implements
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels.columns import is_wrapped
from mcftensor.kernels.custom_ops import LIBRARY, opaque
from mcftensor.kernels.without_float64 import widest
from mcftensor.passes import expressions
from mcftensor.tensor import MCFTensor

Derivative = Callable[[Tensor, Tensor], Tensor]
"""The derivative at x, given x and f(x)."""


def by_formula(operation: str, *operands: Any) -> MCFTensor:
    """Evaluate a formula on expansions of one format and numbers; one operand is an expansion."""
    first = expansions(operands)[0]
    format = first._format
    key = rounding_key(format, operands)
    components: list[Tensor] = []
    for x in operands:
        is_ours = isinstance(x, MCFTensor)
        components += x._read() if is_ours else stored_in(x, format.nearest, first.device)
    formats = [format.name] * len(operands)
    keys = [] if key is None else [key]
    found = expressions.evaluate(operation, format.name, components, formats, keys)
    return MCFTensor.of(found, format, own=True, writes=after(format, key))


def _evaluated(name: str, x: Tensor, source: Format) -> MCFTensor:
    """Return f(x) in the format of x if its terms have a formula, else in a longer one."""
    if source.arithmetic == "terms":
        if source.dtype not in NARROW:
            return by_formula(name, x)
        wide = Format(torch.float32, len(source.components))
    else:
        wide = Format(widest(x.device), 2)
    return by_formula(name, MCFTensor.of(stored_in(x, wide, x.device), wide))


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _operator(name: str, derivative: Derivative) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return _evaluated(name, x, PLAIN[x.dtype])._collapsed(x.dtype)

    function.__name__ = name
    call = opaque(_empty, [torch.Tag.pointwise], of_one=True)(function)
    operator = getattr(torch.ops.mcftensor, name).default

    @implements(operator)  # mcf.functional.sinpi
    def of_expansion(func: Any, x: MCFTensor) -> Tensor:
        if x.acts_as == "parameter":
            return call(x.compute_tensor)
        if x._format.arithmetic == "numbers":
            return storage_formats.on_numbers(func, (x,), {})
        found = _evaluated(name, x, x._format)
        return found if found._format is x._format else value_of(found, x._format, [x])

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                return call(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs, output)
            ctx.save_for_forward(*inputs, output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * derivative(*ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent * derivative(*ctx.saved_tensors)

        @staticmethod
        def vmap(info: Any, dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
            return call(x), dims[0]

    LIBRARY.impl(name, Differentiated.apply, "Autograd")
    # PyTorch's transforms take a function whole, and have no rules for operators.
    return lambda x: Differentiated.apply(x) if is_wrapped(x) else call(x)


def _pi(x: Tensor) -> Tensor:
    """Return pi with all bits of the format of x."""
    return torch.acos(x.new_full((), -1.0))


sinpi: Callable[[Tensor], Tensor] = _operator("sinpi", lambda x, y: cospi(x) * _pi(x))
cospi: Callable[[Tensor], Tensor] = _operator("cospi", lambda x, y: -sinpi(x) * _pi(x))
gamma: Callable[[Tensor], Tensor] = _operator("gamma", lambda x, y: y * torch.digamma(x))
cbrt: Callable[[Tensor], Tensor] = _operator("cbrt", lambda x, y: 1 / (3 * y * y))
