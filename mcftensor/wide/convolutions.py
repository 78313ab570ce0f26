"""Convolutions of more than 48 bits, as matrix products of windows, and averages over windows.

A convolution is a product of a matrix with one row for each window of the input and a matrix with
one column for each channel of the output. Gradients, and so transposed convolutions, are those of
this composition. The windows of each dimension are intervals, so an average over a box is an
average along one dimension after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mcftensor.wide.decompositions import gradient_of, gradients
from mcftensor.wide.elementary import in_longer

aten = torch.ops.aten

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
    windows = _windows(F.pad(x, padding), weight.shape[2:], how)
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


# ------------------------------------------------------------------------------------ averages


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


def _averages_by_name(dims: int, func: Any) -> dict[str, Callable[..., Any]]:
    average, adaptive = _averages(func, dims), _adaptive_averages(dims)

    def backward(grad: Tensor, x: Tensor) -> Tensor | None:
        return gradient_of(adaptive)(grad, x, grad.shape[-dims:])

    return {
        f"avg_pool{dims}d": in_longer(average),
        f"avg_pool{dims}d_backward": gradient_of(average),
        f"_adaptive_avg_pool{dims}d": in_longer(adaptive),
        f"_adaptive_avg_pool{dims}d_backward": backward,
    }


ALGORITHMS = {
    **_averages_by_name(2, aten.avg_pool2d),
    **_averages_by_name(3, aten.avg_pool3d),
}  # F.avg_pool1d, too
"""Algorithms by the names of aten operators."""
