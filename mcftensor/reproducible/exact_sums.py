"""Sums, means, products and norms of plain tensors, independent of order and rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES
from mcftensor.reproducible.sum_operators import RunningSum, reduction
from mcftensor.sums.correct_rounding import MOST_IN_A_MEAN

Dims = int | Sequence[int] | None


def sum(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the exact sum of elements, rounded once.

    The result depends on the elements alone: not on their order, the number of threads, the
    device, or how a compiler divides the loop.

    *Requires*: `x` is a plain tensor of bfloat16, float16, float32 or float64, of any strides.
    `dim` is a dimension, a tuple of dimensions, or None for all; an empty tuple also means all.

    *Returns*: the sums over `dim`. These dimensions are removed, or have length 1 if `keepdim` is
    set. The dtype is `dtype`, by default the dtype of `x`.

    *Error*: half an ulp of the result. Sums beyond the range of the dtype become infinite. Sums
    within the range do not overflow in the computation.

    *Cost*: one pass over memory if the sum runs over the last dimensions of a contiguous tensor on
    a CPU: 1.2 times the time of `torch.sum` for 10^7 elements of float32, and 5.7 times if their
    exponents are spread over the whole range. Other tensors are copied first. A call takes at least
    about 12 µs, for the smallest tensors too.

    *Source*: R. Neal, "Fast exact summation using small and large superaccumulators", 2015;
    J. Demmel and H. D. Nguyen, "Parallel reproducible summation", IEEE Transactions on Computers
    64(7), 2015.

    *Special values*: as in IEEE 754, for any order: infinities of both signs give NaN, an empty sum
    gives 0, and a sum of -0 alone gives -0.

    Raises:
        TypeError: `x` is not a plain tensor of these dtypes, or `dtype` is not one of them.
        IndexError: `dim` is not a dimension of `x`.
        ValueError: `dim` names a dimension twice.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = torch.tensor([1e30, 1.0, -1e30, 2.0])
        >>> mcf.exact.sum(x), torch.sum(x)
        (tensor(3.), tensor(2.))
        >>> mcf.exact.sum(x.to(torch.bfloat16).view(2, 2), dim=1, dtype=torch.float32)
        tensor([ 1.0003e+30, -1.0003e+30])
    """
    return _reduced("sum", x, None, dim, keepdim, dtype)


def mean(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the exact mean of elements, rounded once.

    *Requires*: as `sum`; fewer than 2^31 elements in a mean.

    *Returns*: the means over `dim`, in the shape and the dtype of `sum`.

    *Error*: half an ulp of the result. The sum is exact before the division, and never overflows.

    *Cost*: as `sum`.

    *Source*: as `sum`.

    *Special values*: as `sum`; the mean of no elements is NaN.

    Raises:
        TypeError: as `sum`.
        IndexError: as `sum`.
        ValueError: as `sum`, or a mean of 2^31 elements or more.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = torch.full((4,), 60000.0, dtype=torch.float16)
        >>> mcf.exact.mean(x)
        tensor(60000., dtype=torch.float16)
    """
    return _reduced("mean", x, None, dim, keepdim, dtype)


def dot(
    x: Tensor,
    y: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the exact sum of products of elements, rounded once.

    *Requires*: `x` and `y` are plain tensors of one dtype, bfloat16, float16, float32 or float64,
    and their shapes broadcast. `dim` is a dimension of the product, a tuple of them, or None for
    all.

    *Returns*: the sums of `x * y` over `dim`, as `sum` returns them. No product is rounded.

    *Error*: half an ulp of the result. Products may overflow or underflow if the sum does not.

    *Cost*: as `sum`, for both tensors.

    *Source*: as `sum`, and for products of float64 numbers T. J. Dekker, Numerische Mathematik 18,
    1971.

    *Special values*: as IEEE 754 sums of IEEE 754 products: 0 times infinity is NaN.

    Raises:
        TypeError: as `sum`, or tensors of different types.
        IndexError: as `sum`.
        ValueError: as `sum`, or shapes that do not broadcast.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x, y = torch.tensor([1e20, 1.0, 1e20]), torch.tensor([1e20, 0.5, -1e20])
        >>> mcf.exact.dot(x, y), torch.dot(x, y)
        (tensor(0.5000), tensor(nan))
    """
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.dtype != y.dtype:
            raise TypeError(
                f"exact.dot: got {x.dtype} and {y.dtype}; convert one of them with .to(dtype)"
            )
        try:
            x, y = torch.broadcast_tensors(x, y if y is not x else y.view(y.shape))
        except RuntimeError:
            raise ValueError(
                f"exact.dot: shapes {tuple(x.shape)} and {tuple(y.shape)} do not broadcast"
            ) from None
    _require_floats("dot", y)
    return _reduced("sum", x, y, dim, keepdim, dtype, name="dot")


def norm(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the square root of the exact sum of squares of elements, rounded once.

    *Requires*: as `sum`.

    *Returns*: the Euclidean norms over `dim`, in the shape and the dtype of `sum`.

    *Error*: half an ulp of the result. No square is rounded, overflows or underflows.

    *Cost*: up to twice the cost of `sum`.

    *Source*: as `dot`.

    *Special values*: the norm is infinite if an element is infinite and none is NaN. The norm of no
    elements is 0. Where the norm is 0, the gradient is 0.

    Raises:
        TypeError: as `sum`.
        IndexError: as `sum`.
        ValueError: as `sum`.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.exact.norm(torch.tensor([3e30, 4e30]))
        tensor(5.0000e+30)
    """
    return _reduced("norm", x, None, dim, keepdim, dtype)


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the exact sums of the first elements along a dimension, each rounded once.

    *Requires*: as `sum`, of one dimension.

    *Returns*: a tensor of the shape of `x`; result i is the sum of elements 0 to i. The dtype is
    `dtype`, by default the dtype of `x`.

    *Error*: half an ulp of each result. So the error of a difference of two results is at most the
    errors of both, for any distance between them.

    *Cost*: 0.2 to 1 µs an element, hundreds of times the cost of `torch.cumsum`: each element
    becomes an accumulator.

    *Source*: as `sum`.

    *Special values*: as `sum`, for the elements of each sum.

    Raises:
        TypeError: as `sum`.
        IndexError: as `sum`.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.exact.cumsum(torch.tensor([1e30, 1.0, -1e30]), 0)
        tensor([1.0000e+30, 1.0000e+30, 1.0000e+00])
    """
    _require_floats("cumsum", x)
    dtype = _result_type("cumsum", x, dtype)
    (dim,) = _dimensions("cumsum", x, (dim,))
    if x.dim() == 0:
        return _reduced("sum", x, None, None, False, dtype)
    return RunningSum.apply(x, dim, dtype)


def _reduced(
    finish: str,
    x: Tensor,
    y: Tensor | None,
    dim: Dims,
    keepdim: bool,
    dtype: torch.dtype | None,
    name: str | None = None,
) -> Tensor:
    name = name or finish
    _require_floats(name, x)
    dtype = _result_type(name, x, dtype)
    dims = _dimensions(name, x, dim)
    if x.dim() == 0:
        dims = []
    count = 1
    for i in dims:
        count *= x.shape[i]
    if finish == "mean" and count > MOST_IN_A_MEAN:
        raise ValueError(
            f"exact.mean: means of {count} elements, of shape {tuple(x.shape)}; at most "
            f"{MOST_IN_A_MEAN} are possible: divide the result of mcf.exact.sum"
        )
    result = reduction(x, y, dims, finish, dtype)
    for i in dims if keepdim else ():
        result = result.unsqueeze(i)
    return result


def _require_floats(name: str, x: object) -> None:
    if isinstance(x, Tensor) and x.dtype in BASES:
        return
    kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
    raise TypeError(
        f"exact.{name}: got {kind}; give a plain tensor of bfloat16, float16, float32 or float64"
    )


def _result_type(name: str, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return x.dtype
    if dtype not in BASES:
        raise TypeError(
            f"exact.{name}: a result of {dtype}; it can be bfloat16, float16, float32 or float64"
        )
    return dtype


def _dimensions(name: str, x: Tensor, dim: Dims) -> list[int]:
    """Return the dimensions in ascending order, all of at least 0."""
    is_list = dim is None or isinstance(dim, (list, tuple))
    named: list[Any] = list(dim or ()) if is_list else [dim]  # type: ignore[arg-type]
    if not named:
        return list(range(x.dim()))
    most = max(x.dim(), 1)
    for i in named:
        if not isinstance(i, int):
            raise TypeError(f"exact.{name}: dim={dim!r}; give integers")
        if not -most <= i < most:
            raise IndexError(
                f"exact.{name}: dimension {i} of a tensor of shape {tuple(x.shape)}; it can be "
                f"{-most} to {most - 1}"
            )
    found = sorted({i % most for i in named})
    if len(found) < len(named):
        raise ValueError(f"exact.{name}: dim={dim} names a dimension twice")
    return found
