"""Products of matrices and vectors of more than 48 bits, by exact slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mcftensor.dispatch.operands import value_of
from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor import MCFTensor
from mcftensor.wide.products import sliced_product


def multiplied(x: MCFTensor, y: MCFTensor) -> MCFTensor:
    """Return the products of matrices of one format, of shapes (b, m, k) and (b, k, n)."""
    format = x._format
    machine = widest(x.device)
    summed = format.sums_in(machine)  # type: ignore[attr-defined]
    made = sliced_product(
        list(x._read()), list(y._read()), len(summed.components), format.precision, machine
    )
    result = MCFTensor.of(made, summed, own=True)
    return result if summed is format else value_of(result, format, [x, y])


def mm(x: Any, y: Any) -> Tensor:
    """Return the product of two matrices."""
    return multiplied(x.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


def mv(x: Any, y: Any) -> Tensor:
    """Return the product of a matrix and a vector."""
    return mm(x, y.unsqueeze(1)).squeeze(1)


def inner(x: Any, y: Any) -> Tensor:
    """Return the dot product of two vectors."""
    return mv(x.unsqueeze(0), y).squeeze(0)


def added(product: Callable[[Any, Any], Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes beta * z + alpha * product(x, y)."""

    def add(z: Tensor, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        result = product(x, y) if alpha == 1 else product(x, y) * alpha
        return result if beta == 0 else result + (z if beta == 1 else z * beta)

    return add
