"""Elements written to places that may occur more than once, in formats beyond 48 bits.

The gradients of operations that select elements are of this kind, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _combined(
    x: Tensor,
    positions: Tensor,
    values: Tensor,
    combine: Callable[[Tensor, Tensor], Tensor] = torch.add,
    include_self: bool = True,
) -> Tensor:
    """Return x with its elements at flat positions combined with values, one after another.

    Without `include_self`, the first value takes the place of the element.
    """
    positions = positions.reshape(-1)
    order = torch.argsort(positions, stable=True)
    positions, values = positions[order], values.reshape(-1)[order]
    places = torch.arange(len(positions), device=positions.device)
    first = torch.ones_like(positions, dtype=torch.bool)
    first[1:] = positions[1:] != positions[:-1]
    occurrence = places - places.masked_fill(~first, 0).cummax(0).values
    result = x.reshape(-1).clone()
    for i in range(int(occurrence.max()) + 1 if len(positions) else 0):
        chosen = occurrence == i
        at, new = positions[chosen], values[chosen]
        if i or include_self:
            new = combine(result[at], new)
        result = result.index_put((at,), new)
    return result.reshape(x.shape)


def _places(x: Tensor) -> Tensor:
    """Return the flat position of each element."""
    return torch.arange(x.numel(), device=x.device).view(x.shape)


def _index_put(
    x: Tensor, indices: list[Any], values: Tensor, accumulate: bool = True, unsafe: bool = False
) -> Tensor:
    positions = _places(x)[tuple(slice(None) if i is None else i for i in indices)]
    return _combined(x, positions, values.expand(positions.shape))


def _index_put_impl(
    x: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    put = _index_put if accumulate else torch.index_put
    return put(x, indices, values)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if accumulate:
        return _combined(x, torch.where(index < 0, index + x.numel(), index), source)
    flat = x.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1))
    return flat.reshape(x.shape)


def _along(x: Tensor, dim: int, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions that `index_add` adds to, and the values."""
    return _places(x).index_select(dim, index), values


def _scattered(x: Tensor, dim: int, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions that `scatter_add` adds to, and the values."""
    slices = [slice(0, n) for n in index.shape]
    own = values[tuple(slices)]
    if slices:
        slices[dim] = slice(None)
    return _places(x)[tuple(slices)].gather(dim, index), own


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "amax": torch.maximum,
    "amin": torch.minimum,
}


def _reducing(placed: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Return `scatter_reduce` or `index_reduce`, by the places of their values."""

    def reduced(
        x: Tensor,
        dim: int,
        index: Tensor,
        source: Tensor,
        reduce: str,
        *,
        include_self: bool = True,
    ) -> Tensor:
        positions, values = placed(x, dim, index, source)
        found = _combined(x, positions, values, _COMBINE[reduce], include_self)
        if reduce != "mean":
            return found
        count = torch.bincount(positions.reshape(-1), minlength=x.numel()).view(x.shape)
        return found / (count + include_self).clamp(min=1).to(x.dtype)

    return reduced


def _bincount(places: Tensor, weights: Tensor, minlength: int = 0) -> Tensor:
    longest = max(minlength, int(places.max()) + 1 if len(places) else 0)
    return _combined(weights.new_zeros(longest), places, weights)


# ------------------------------------------------------------------ gradients of selected elements


def _of_maxima(dims: int) -> Callable[..., Tensor]:
    """Return the gradient of pooling by maxima, whose places in a plane are the last argument."""

    def backward(grad: Tensor, x: Tensor, *others: Any) -> Tensor:
        planes = torch.zeros_like(x).flatten(-dims)
        found = planes.scatter_add(-1, others[-1].flatten(-dims), grad.flatten(-dims))
        return found.view(x.shape)

    return backward


def _of_selection(grad: Tensor, shape: Sequence[int], select: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a function that selects elements, of which float32 holds the places
    in two parts.
    """
    found = grad.new_zeros(shape)
    parts = (_places(found) % 2**20, _places(found) // 2**20)
    low, high = (select(x.to(torch.float32)).long() for x in parts)
    return _combined(found, low + high * 2**20, grad)


def _of_padding(func: Any) -> Callable[..., Tensor]:
    return lambda grad, x, padding: _of_selection(grad, x.shape, lambda y: func(y, padding))


def _of_nearest(func: Any) -> Callable[..., Tensor]:
    def backward(
        grad: Tensor, sizes: Sequence[int], shape: Sequence[int], *scales: float | None
    ) -> Tensor:
        return _of_selection(grad, shape, lambda y: func(y, sizes, *scales))

    return backward


ALGORITHMS: dict[str, Callable[..., Any]] = {
    "index_put": _index_put,  # x.index_put with accumulate, gradients of x[i]
    "_unsafe_index_put": _index_put,  # compiled gradients of F.interpolate
    "_index_put_impl": _index_put_impl,  # x._index_put_impl_
    "put": _put,  # x.put, gradients of x.take
    "index_reduce": _reducing(_along),  # x.index_reduce
    "scatter_add": functools.partial(
        _reducing(_scattered), reduce="sum"
    ),  # x.scatter_add, gradients of x.gather
    "scatter_reduce": _reducing(_scattered),  # x.scatter_reduce
    "bincount": _bincount,  # torch.bincount of weights
    "max_pool2d_with_indices_backward": _of_maxima(2),  # gradients of F.max_pool2d
    "max_pool3d_with_indices_backward": _of_maxima(3),  # gradients of F.max_pool3d
    "adaptive_max_pool2d_backward": _of_maxima(2),  # gradients of F.adaptive_max_pool2d
    "adaptive_max_pool3d_backward": _of_maxima(3),  # gradients of F.adaptive_max_pool3d
    **{
        f"{name}{dims}d_backward": gradient(getattr(aten, f"{name}{dims}d"))
        for gradient, names in {
            _of_padding: ("reflection_pad", "replication_pad"),  # gradients of F.pad
            _of_nearest: ("upsample_nearest", "_upsample_nearest_exact"),  # of F.interpolate
        }.items()
        for name in names
        for dims in (1, 2, 3)
    },  # gradients of both
}
"""Algorithms by the names of aten operators."""
