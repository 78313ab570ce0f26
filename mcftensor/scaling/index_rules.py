"""Rules of lookup, assignment and accumulation by indices, and of resampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.rule_shapes import on_data
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, aligned, lead, number, write_to


@rule(aten.index_put, keeps_tails=True)
def _index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Unrounded:
    """Assign to indices, also for the gradients of indexing."""
    s, (a, b) = aligned([x, values])
    masks = [i for i in indices if i is not None]
    if values.dim() == 0 and len(masks) == 1 and masks[0].dtype == torch.bool and not accumulate:
        before = next(i for i, index in enumerate(indices) if index is not None)
        after = (1,) * (x.dim() - before - masks[0].dim())
        # torch.where needs no count of places, for which the host would wait.
        return Unrounded(torch.where(masks[0].view(*masks[0].shape, *after), b.at(s), a.at(s)), s)
    return Unrounded(aten.index_put(a.at(s), indices, b.at(s), accumulate), s)


@rule(aten._index_put_impl_)
def _index_put_impl_(
    x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    return write_to(x, _index_put(x, indices, values, accumulate))


@rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.index_add.default,
    aten.index_copy.default,
    keeps_tails=True,
    takes_operator=True,
)
def _placed(func: Any, x: Any, dim: int, index: Tensor, source: Any, **also: Any) -> Unrounded:
    """Write or add numbers at indices, all at the larger exponent."""
    if not isinstance(source, Tensor):
        source = torch.full(index.shape, float(source), device=index.device)
    s, (a, b) = aligned([x, source])
    by_tensor = aten.scatter.src if func is aten.scatter.value else func
    return Unrounded(by_tensor(a.at(s), dim, index, b.at(s), **also), s)


# Means of neighbours and sums of a few numbers keep the scale.
_UPSAMPLES = (
    *("nearest1d", "nearest2d", "nearest3d", "linear1d"),
    *("bilinear2d", "bicubic2d", "trilinear3d"),
)
on_data(
    aten.unfold_backward.default,
    aten.col2im.default,
    *(getattr(aten, f"upsample_{name}").default for name in _UPSAMPLES),
    *(getattr(aten, f"upsample_{name}_backward").default for name in _UPSAMPLES),
)


@rule(aten.embedding)
def _embedding(weight: Any, indices: Tensor, *unused: Any, **also: Any) -> Unrounded:
    picked = lead(weight)
    return Unrounded(torch.embedding(picked.mantissa, indices), picked.exponent)


@rule(aten.embedding_dense_backward)
def _embedding_backward(
    gradient: Any, indices: Tensor, count: int, padding: int, by: bool
) -> Unrounded:
    """Sum one row for each occurrence of a token; their number is not known beforehand."""
    g = number(gradient)
    summed = aten.embedding_dense_backward(g.mantissa, indices, count, padding, by)
    return Unrounded(summed, g.exponent, "by size")
