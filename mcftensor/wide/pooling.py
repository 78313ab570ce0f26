"""Averages over windows, and their gradients, in formats that no machine type represents.

The windows of each dimension are intervals, so an average over a box is an average along one
dimension after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcftensor.wide.decompositions import gradient_of
from mcftensor.wide.elementary import in_longer

aten = torch.ops.aten


def _averages(func: Any, dims: int) -> Callable[..., Tensor]:
    """Return `torch.nn.functional.avg_pool2d` or `avg_pool3d` of expansions."""

    def pooled(
        x: Tensor,
        size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Tensor:
        like = torch.empty(x.shape, device="meta")
        shape = func(like, size, stride, padding, ceil_mode, count_include_pad, divisor).shape
        each = [list(y) * (dims if len(y) == 1 else 1) for y in (size, stride or size, padding)]
        around = [p for p in reversed(each[2]) for _ in range(2)]

        def sums(x: Tensor, value: float) -> Tensor:
            x = F.pad(x, around, value=value)
            for axis, k, s in zip(range(-dims, 0), *each[:2], strict=True):
                beyond = (shape[axis] - 1) * s + k - x.shape[axis]
                x = F.pad(x, [*[0, 0] * (-1 - axis), 0, beyond]).unfold(axis, k, s).sum(-1)
            return x

        ones = torch.ones(x.shape[-dims:], dtype=x.dtype, device=x.device)
        return sums(x, 0.0) / (divisor or sums(ones, float(count_include_pad)))

    return pooled


def _adaptive_averages(dims: int) -> Callable[..., Tensor]:
    """Return `torch.nn.functional.adaptive_avg_pool2d` or the form of 3 dimensions."""

    def pooled(x: Tensor, sizes: Sequence[int]) -> Tensor:
        for axis, count in enumerate(sizes, -dims):
            n = x.shape[axis]
            ends = [(i * n // count, -((i + 1) * n // -count)) for i in range(count)]
            means = [x.narrow(axis, a, b - a).mean(axis, keepdim=True) for a, b in ends]
            x = torch.cat([x.narrow(axis, 0, 0), *means], axis)
        return x

    return pooled


def _rows(dims: int, func: Any) -> dict[str, Callable[..., Any]]:
    average, adaptive = _averages(func, dims), _adaptive_averages(dims)

    def backward(grad: Tensor, x: Tensor) -> Tensor | None:
        return gradient_of(adaptive)(grad, x, grad.shape[-dims:])

    return {
        f"avg_pool{dims}d": in_longer(average),
        f"avg_pool{dims}d_backward": gradient_of(average),
        f"_adaptive_avg_pool{dims}d": in_longer(adaptive),
        f"_adaptive_avg_pool{dims}d_backward": backward,
    }


ALGORITHMS = {**_rows(2, aten.avg_pool2d), **_rows(3, aten.avg_pool3d)}  # F.avg_pool1d, too
"""Algorithms by the names of aten operators."""
