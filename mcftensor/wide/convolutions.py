"""Convolutions of more than 48 bits, as matrix products of windows.

A convolution is a product of a matrix with one row for each window of the input and a matrix with
one column for each channel of the output. Gradients, and so transposed convolutions, are those of
this composition.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mcftensor.wide.decompositions import gradients

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
    sizes = _for_each_dimension(weight, *how)
    result = (_transposed if sizes.transposed else _convolution)(x, weight, sizes)
    return result if bias is None else result + bias.view(-1, *[1] * (weight.dim() - 2))


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sizes | None,
    *arguments: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of the input, of the weight and of the bias, if they are asked for."""
    *given, (*of_operands, of_bias) = arguments
    how = _for_each_dimension(weight, *given)
    bias = gradient.sum([0, *range(2, gradient.dim())]) if of_bias else None
    if how.transposed:  # the gradient of y in the product of x and a convolution of y
        of_x, of_weight = of_operands
        return (
            _convolution(gradient, weight, how) if of_x else None,
            gradients(lambda w: _convolution(gradient, w, how), x, [weight], [of_weight])[0],
            bias,
        )
    operands = [x, weight]
    found = gradients(lambda x, w: _convolution(x, w, how), gradient, operands, of_operands)
    return found[0], found[1], bias


def _for_each_dimension(weight: Tensor, *how: Any) -> _How:
    dimensions = weight.dim() - 2
    given: list[Any] = [x * dimensions if isinstance(x, list) and len(x) == 1 else x for x in how]
    return _How(*given)


def _transposed(x: Tensor, weight: Tensor, how: _How) -> Tensor:
    """Return the gradient of the input of a convolution."""
    spaces = zip(x.shape[2:], weight.shape[2:], *how[:3], how.output_padding, strict=True)
    shape = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + more for n, k, s, p, d, more in spaces]
    of = x.new_zeros([x.shape[0], weight.shape[1] * how.groups, *shape])
    made = gradients(lambda y: _convolution(y, weight, how), x, [of])[0]
    assert made is not None
    return made


def _convolution(x: Tensor, weight: Tensor, how: _How) -> Tensor:
    padding = [*chain(*((p, p) for p in reversed(how.padding)))]
    windows = _windows(functional.pad(x, padding), weight.shape[2:], how)
    columns = weight.reshape(how.groups, weight.shape[0] // how.groups, -1).transpose(1, 2)
    product = torch.bmm(_rows(windows, how.groups), columns)
    spread = product.unflatten(1, (x.shape[0], *windows.shape[2 : weight.dim()]))
    return spread.movedim((0, -1), (1, 2)).flatten(1, 2)


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
