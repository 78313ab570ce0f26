"""Operations that only compare elements: run on their ranks, and so exact on all terms.

Equal elements have equal ranks, larger ones larger ranks, and NaN stays NaN. What comes out is a
choice of ranks, which are then exchanged for the elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.operands import expansions
from mcftensor.dispatch.registry import implements
from mcftensor.dispatch.stored import of_terms
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


def ranks(x: MCFTensor) -> tuple[Tensor, list[Tensor]]:
    """The rank of each element in float64, and the terms of the elements of each rank."""
    terms = [t.reshape(-1) for t in x._read()]
    order = torch.arange(terms[0].numel(), device=x.device)
    # Normalized expansions compare as their terms do, first ones first.
    for term in reversed(terms):
        order = order[torch.argsort(term[order], stable=True)]
    terms = [term[order] for term in terms]
    is_new = torch.zeros_like(order, dtype=torch.bool)
    for term in terms:
        is_new[1:] |= term[1:] != term[:-1]
    rank = is_new.cumsum(0)
    first = torch.zeros_like(order).index_put((rank,), torch.arange(len(order), device=x.device))
    ranked = torch.empty(len(order), dtype=torch.float64, device=x.device)
    ranked[order] = rank.double().masked_fill(torch.isnan(terms[0]), torch.nan)
    return ranked.view(x.shape), [term[first] for term in terms]


@implements(
    aten.sort.default,  # x.sort, x.argsort, x.msort
    aten.sort.stable,  # torch.sort(x, stable=True)
    aten.topk.default,  # x.topk
    aten.kthvalue.default,  # x.kthvalue
    aten.mode.default,  # x.mode
    aten.median.default,  # x.median()
    aten.median.dim,  # x.median(0)
    aten.nanmedian.default,  # x.nanmedian()
    aten.nanmedian.dim,  # x.nanmedian(0)
    aten.max.default,  # x.max()
    aten.max.dim,  # x.max(0)
    aten.min.default,  # x.min()
    aten.min.dim,  # x.min(0)
    aten.amax.default,  # x.amax, norms of order inf
    aten.amin.default,  # x.amin, norms of order -inf
    aten.aminmax.default,  # torch.aminmax
    aten.argmax.default,  # x.argmax
    aten.argmin.default,  # x.argmin
    aten.cummax.default,  # x.cummax
    aten.cummin.default,  # x.cummin
    aten._unique2.default,  # torch.unique(x)
    aten.unique_dim.default,  # torch.unique(x, dim=0)
    aten.unique_consecutive.default,  # torch.unique_consecutive
    aten.max_pool2d_with_indices.default,  # F.max_pool2d, F.max_pool1d
    aten.max_pool3d_with_indices.default,  # F.max_pool3d
    aten.adaptive_max_pool2d.default,  # F.adaptive_max_pool2d, F.adaptive_max_pool1d
    aten.adaptive_max_pool3d.default,  # F.adaptive_max_pool3d
)
@of_terms
def by_rank(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on ranks; integer results, such as indices, are as they are."""
    if not isinstance(x, MCFTensor) or x.role == "parameter" or expansions((args, kwargs)):
        return compute(func, x, *args, **kwargs)
    rank, elements = ranks(x)

    def element(result: Any) -> Any:
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        absent = ~torch.isfinite(result)  # NaN, or the padding of an empty window
        place = result.masked_fill(absent, 0).long()
        chosen = [term.index_select(0, place.reshape(-1)).view(place.shape) for term in elements]
        terms = [term.masked_fill(absent, 0) for term in chosen]
        terms[0] = torch.where(absent, result.to(terms[0].dtype), terms[0])
        return MCFTensor.of(terms, x.format, own=True)

    return tree_map(element, func(rank, *args, **kwargs))
