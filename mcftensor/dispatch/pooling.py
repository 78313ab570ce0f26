"""Averages over windows, and their gradients, in formats that no machine type represents.

The windows of each dimension are intervals, so an average over a box is an average along one
dimension after another. The gradient sums, for each element, over the windows that contain it.
These windows are an interval, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class _Windows(NamedTuple):
    """The windows along one dimension: their starts, ends and divisors."""

    starts: list[int]
    ends: list[int]
    divisors: list[int]


def averages(func: Any) -> Callable[..., Tensor]:
    """Return `torch.nn.functional.avg_pool2d` or `avg_pool3d` of expansions."""

    def pooled(x: Tensor, size: Sequence[int], *how: Any) -> Tensor:
        windows, divisor = _windows(func, x, size, *how)
        for axis, w in enumerate(windows, -len(windows)):
            x = _divided(_sums(x, axis, w.starts, w.ends), axis, w)
        return x if divisor is None else x / divisor

    return pooled


def gradients_of_averages(func: Any) -> Callable[..., Tensor]:
    """Return the gradient of `averages(func)`, which divides and sums over windows."""

    def backward(grad: Tensor, x: Tensor, size: Sequence[int], *how: Any) -> Tensor:
        windows, divisor = _windows(func, x, size, *how)
        return _spread(grad if divisor is None else grad / divisor, x, windows)

    return backward


def adaptive_averages(dims: int) -> Callable[..., Tensor]:
    """Return `torch.nn.functional.adaptive_avg_pool2d` or the form of 3 dimensions."""

    def pooled(x: Tensor, sizes: Sequence[int]) -> Tensor:
        for axis, w in enumerate(_adaptive_windows(x, sizes), -dims):
            x = _divided(_sums(x, axis, w.starts, w.ends), axis, w)
        return x

    return pooled


def gradients_of_adaptive_averages(dims: int) -> Callable[..., Tensor]:
    """Return the gradient of `adaptive_averages(dims)`."""

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        return _spread(grad, x, _adaptive_windows(x, grad.shape[-dims:]))

    return backward


def _windows(
    func: Any,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> tuple[list[_Windows], int | None]:
    """Return the windows of each dimension, and the divisor that replaces theirs, if any."""
    like = torch.empty(x.shape, device="meta")
    shape = func(like, size, stride, padding, ceil_mode, count_include_pad, divisor).shape
    dims = 2 if func is aten.avg_pool2d else 3
    sizes, strides, pads = (
        list(y) * (dims if len(y) == 1 else 1) for y in (size, stride or size, padding)
    )
    found = []
    for k, s, p, outputs, n in zip(
        sizes, strides, pads, shape[-dims:], x.shape[-dims:], strict=True
    ):
        first = [i * s - p for i in range(outputs)]
        starts, ends = [max(i, 0) for i in first], [min(i + k, n) for i in first]
        counted = [min(i + k, n + p) - i for i in first]
        own = counted if count_include_pad else [b - a for a, b in zip(starts, ends, strict=True)]
        found.append(_Windows(starts, ends, [1] * outputs if divisor is not None else own))
    return found, divisor


def _adaptive_windows(x: Tensor, sizes: Sequence[int]) -> list[_Windows]:
    found = []
    for n, outputs in zip(x.shape[-len(sizes) :], sizes, strict=True):
        starts = [i * n // outputs for i in range(outputs)]
        ends = [-((i + 1) * n // -outputs) for i in range(outputs)]
        found.append(_Windows(starts, ends, [b - a for a, b in zip(starts, ends, strict=True)]))
    return found


def _spread(grad: Tensor, x: Tensor, windows: list[_Windows]) -> Tensor:
    for axis, w in enumerate(windows, -len(windows)):
        elements = range(x.shape[axis])
        starts = [sum(end <= i for end in w.ends) for i in elements]
        ends = [sum(start <= i for start in w.starts) for i in elements]
        grad = _sums(_divided(grad, axis, w), axis, starts, ends)
    return grad


def _sums(x: Tensor, axis: int, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Return the sums of elements from each start to before each end along a dimension."""
    longest = max((b - a for a, b in zip(starts, ends, strict=True)), default=0)
    places = torch.tensor([[a + j for j in range(longest)] for a in starts], device=x.device)
    is_inside = places < torch.tensor(ends, device=x.device).unsqueeze(1)
    taken = x.movedim(axis, -1)[..., places.clamp(max=max(x.shape[axis] - 1, 0))]
    return torch.where(is_inside, taken, torch.zeros_like(taken)).sum(-1).movedim(-1, axis)


def _divided(x: Tensor, axis: int, windows: _Windows) -> Tensor:
    divisors = torch.tensor(windows.divisors, dtype=x.dtype, device=x.device)
    return x / divisors.view(-1, *(1 for _ in range(-1 - axis)))
