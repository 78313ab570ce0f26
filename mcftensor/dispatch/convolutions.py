"""Convolutions of more than 48 bits, as matrix products of windows.

A convolution is a product of a matrix with one row for each window of the input and a matrix with
one column for each channel of the output. A transposed convolution is a convolution of the input
with zeros between its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Sizes = Sequence[int]


class _How(NamedTuple):
    """The arguments of a convolution, one number for each dimension of space."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: int


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """Return `torch.convolution`.

    Shapes: (batch, channels, ...), (outputs, channels / groups, ...) and (outputs,); a transposed
    convolution has a weight of shape (channels, outputs / groups, ...).

    *Error*: that of `sliced_product`, for the sum of products of a window.
    """
    result = _convolution(x, weight, _for_each_dimension(weight, *how))
    return result if bias is None else result + _along_channels(bias, weight)


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sizes | None,
    *arguments: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of the input, of the weight and of the bias, if they are asked for."""
    *given, asked = arguments
    how = _for_each_dimension(weight, *given)
    of_x, of_weight, of_bias = (bool(x) for x in asked)
    return (
        _gradient_of_input(gradient, x, weight, how) if of_x else None,
        _gradient_of_weight(gradient, x, weight, how) if of_weight else None,
        gradient.sum([0, *range(2, gradient.dim())]) if of_bias else None,
    )


def _for_each_dimension(weight: Tensor, *how: Any) -> _How:
    dimensions = weight.dim() - 2
    given: list[Any] = [x * dimensions if isinstance(x, list) and len(x) == 1 else x for x in how]
    return _How(*given)


def _along_channels(bias: Tensor, weight: Tensor) -> Tensor:
    return bias.view(-1, *(1 for _ in weight.shape[2:]))


def _convolution(x: Tensor, weight: Tensor, how: _How) -> Tensor:
    if how.transposed:
        stuffed = _with_zeros_between(x, how.stride)
        edges = [d * (k - 1) for d, k in zip(how.dilation, weight.shape[2:], strict=True)]
        left = [edge - p for edge, p in zip(edges, how.padding, strict=True)]
        right = [edge + more for edge, more in zip(left, how.output_padding, strict=True)]
        padded = _padded(stuffed, left, right)
        plain = how._replace(stride=[1] * len(edges), transposed=False, padding=[0] * len(edges))
        return _convolution(padded, _turned(weight, how.groups), plain)
    windows = _windows(_padded(x, how.padding, how.padding), weight.shape[2:], how)
    columns = weight.reshape(how.groups, weight.shape[0] // how.groups, -1).transpose(1, 2)
    product = torch.bmm(_rows(windows, how.groups), columns)
    spread = product.unflatten(1, (x.shape[0], *windows.shape[2 : weight.dim()]))
    return spread.movedim((0, -1), (1, 2)).flatten(1, 2)


def _gradient_of_input(gradient: Tensor, x: Tensor, weight: Tensor, how: _How) -> Tensor:
    if how.transposed:
        return _convolution(gradient, weight, how._replace(transposed=False))
    # What the windows leave over at the end of each dimension.
    left_over = [
        (n + 2 * p - d * (k - 1) - 1) % s
        for n, p, d, k, s in zip(
            x.shape[2:], how.padding, how.dilation, weight.shape[2:], how.stride, strict=True
        )
    ]
    return _convolution(gradient, weight, how._replace(transposed=True, output_padding=left_over))


def _gradient_of_weight(gradient: Tensor, x: Tensor, weight: Tensor, how: _How) -> Tensor:
    # The operand of which windows are taken, and the one that has an element for each.
    taken, other = (gradient, x) if how.transposed else (x, gradient)
    windows = _windows(_padded(taken, how.padding, how.padding), weight.shape[2:], how)
    channels = other.unflatten(1, (how.groups, -1)).movedim((1, 2), (0, 1)).flatten(2)
    return torch.bmm(channels, _rows(windows, how.groups)).reshape(weight.shape)


def _windows(x: Tensor, sizes: Sizes, how: _How) -> Tensor:
    """Return a view of shape (batch, channels, places..., window...)."""
    for axis, (size, s, d) in enumerate(zip(sizes, how.stride, how.dilation, strict=True), 2):
        x = x.unfold(axis, d * (size - 1) + 1, s)[..., ::d]
    return x


def _rows(windows: Tensor, groups: int) -> Tensor:
    """Return windows as rows, of shape (groups, batch * places, channels * window)."""
    places = (windows.dim() - 2) // 2
    split = windows.unflatten(1, (groups, -1)).movedim(1, 0)  # groups, batch, channels, ...
    return split.movedim(2, 2 + places).flatten(2 + places).flatten(1, 1 + places)


def _padded(x: Tensor, left: Sizes, right: Sizes) -> Tensor:
    """Return x with zeros around it; a negative number removes elements."""
    return functional.pad(x, [*chain(*zip(reversed(left), reversed(right), strict=True))])


def _with_zeros_between(x: Tensor, stride: Sizes) -> Tensor:
    """Return x with stride - 1 zeros between elements along each dimension of space."""
    sizes = [s * (n - 1) + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    result = x.new_zeros([*x.shape[:2], *sizes])
    every: list[Any] = [slice(None, None, s) for s in stride]
    result[(..., *every)] = x
    return result


def _turned(weight: Tensor, groups: int) -> Tensor:
    """Return the weight of a transposed convolution as the weight of a plain one."""
    split = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return split.flip(list(range(2, weight.dim())))
