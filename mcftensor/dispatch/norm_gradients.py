"""Gradients of norms over batches and groups, in formats that no machine type represents.

PyTorch's decompositions multiply by 1 / n, a float64 number, and the means that they are given are
rounded. Here deviations are taken anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mcftensor.dispatch.elementary import in_longer

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _of_input(grad: Tensor, units: Tensor, scale: Tensor, dims: list[int]) -> Tensor:
    """Return the gradient of the input, given that of `units`, its deviations times `scale`."""
    along = (units * grad).mean(dims, keepdim=True)
    return (grad - grad.mean(dims, keepdim=True) - units * along) * scale


@in_longer
def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    _: Tensor | None,
    invstd: Tensor | None,
    trains: bool,
    eps: float,
    mask: Sequence[bool],
) -> Gradients:
    shape = [1, -1, *[1] * (x.dim() - 2)]
    dims = [d for d in range(x.dim()) if d != 1]
    if trains:
        assert invstd is not None
        scale, below = invstd.view(shape), x - x.mean(dims, keepdim=True)
    else:
        assert running_mean is not None
        assert running_var is not None
        scale, below = (running_var + eps).rsqrt().view(shape), x - running_mean.view(shape)
    units = below * scale
    own = grad if weight is None else grad * weight.view(shape)
    of_x = None
    if mask[0]:
        of_x = _of_input(own, units, scale, dims) if trains else own * scale
    return (
        of_x,
        (grad * units).sum(dims) if mask[1] else None,
        grad.sum(dims) if mask[2] else None,
    )


@in_longer
def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    _: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    channels: int,
    places: int,
    groups: int,
    mask: Sequence[bool],
) -> Gradients:
    shape = [n, groups, channels // groups, places]
    scale, grouped = rstd.view(n, groups, 1, 1), x.reshape(shape)
    units = (grouped - grouped.mean([2, 3], keepdim=True)) * scale
    grad = grad.reshape(shape)
    own = grad if weight is None else grad * weight.view(1, *shape[1:3], 1)
    return (
        _of_input(own, units, scale, [2, 3]).reshape(x.shape) if mask[0] else None,
        (grad * units).sum([0, 3]).reshape(channels) if mask[1] else None,
        grad.sum([0, 3]).reshape(channels) if mask[2] else None,
    )


ALGORITHMS: dict[str, Callable[..., Any]] = {
    "native_batch_norm_backward": _batch_norm_backward,  # nn.BatchNorm2d, nn.InstanceNorm2d
    "native_group_norm_backward": _group_norm_backward,  # nn.GroupNorm
}
"""Algorithms by the names of aten operators."""
