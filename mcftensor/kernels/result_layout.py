"""The memory layout of results: the layout of the first operand of their shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def empty_terms(operands: Sequence[Tensor], dtype: torch.dtype, terms: int) -> list[Tensor]:
    """Return uninitialized tensors of the shape to which the operands broadcast."""
    template = template_of(operands)
    return [torch.empty_like(template, dtype=dtype) for _ in range(terms)]


def template_of(operands: Sequence[Tensor]) -> Tensor:
    """Return the first operand of the broadcast shape, or a new tensor of this shape."""
    first = next((x for x in operands if x.dim() > 0), operands[0])
    if all(x.dim() == 0 or x.shape == first.shape for x in operands):
        return first
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    for x in operands:
        if x.shape == shape and x.device == first.device:
            return x
    return torch.empty(shape, dtype=operands[0].dtype, device=first.device)


def laid_out(
    function: Callable[P, R], template_of: Callable[[Sequence[Tensor]], Tensor] = template_of
) -> Callable[P, R]:
    """Return results in the layout that `empty_terms` predicts, the layout of the first operand.
    Results of another shape are unchanged.

    For operands with different strides, torch's layout depends on the order of operations.
    """

    def kernel(*args: P.args, **kwargs: P.kwargs) -> R:
        results = function(*args, **kwargs)
        operands = [x for a in args for x in (a if isinstance(a, list) else [a])]
        tensors = [x for x in operands if isinstance(x, Tensor)]
        if not tensors:
            return results
        template = template_of(tensors)

        def fitted(x: Tensor) -> Tensor:
            if x.stride() == template.stride() or x.shape != template.shape:
                return x
            like = torch.empty_like(template, dtype=x.dtype)
            return x if x.stride() == like.stride() else like.copy_(x)

        if isinstance(results, Tensor):
            return cast(R, fitted(results))
        return type(results)(fitted(x) for x in results)  # type: ignore[call-arg, attr-defined]

    return kernel
