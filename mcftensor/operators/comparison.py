"""Operations that only compare elements: exact on all terms.

Normalized expansions compare as their terms do, leading terms first. A number or plain tensor
is rounded to the format first, as it is with a tensor of any other dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.ordering import choose, clamp, equal, less, maximum, minimum
from mcftensor.arithmetic.rounding import quiet
from mcftensor.dispatch.default_handler import compute, of_values
from mcftensor.dispatch.operands import (
    common_format,
    common_role,
    computes_plainly,
    expansions,
    leading,
    on_leading,
    selected,
    stored_in,
)
from mcftensor.dispatch.registry import implements, register_forms
from mcftensor.dispatch.rounded_arguments import has_rests
from mcftensor.dispatch.storage_formats import of_terms
from mcftensor.dispatch.store import store
from mcftensor.dispatch.system import serves
from mcftensor.formats import Format
from mcftensor.kernels.custom_ops import opaque
from mcftensor.kernels.without_float64 import widest, without
from mcftensor.passes import expansion
from mcftensor.tensor import GradientTensor, MCFTensor
from mcftensor.tensor.implicit_rounding import note_moved

aten = torch.ops.aten
Terms = Sequence[Tensor]


# ------------------------------------------------------------------------------ between operands


def _enter(name: str, operands: Sequence[Any]) -> tuple[Format, list[Any]]:
    """Return the common format of operands, and their terms; an omitted limit stays None."""
    format = common_format(name, operands)
    device = next(x.device for x in operands if isinstance(x, MCFTensor))
    return format, [None if x is None else stored_in(x, format, device) for x in operands]


_COMPARISONS: dict[str, Callable[[Terms, Terms], Tensor]] = {
    "eq": equal,
    "ne": lambda x, y: ~equal(x, y),
    "lt": less,
    "gt": lambda x, y: less(y, x),
    "le": lambda x, y: less(x, y) | equal(x, y),
    "ge": lambda x, y: less(y, x) | equal(x, y),
}


@implements(*(getattr(aten, name) for name in _COMPARISONS))  # x < y, x == 0
@of_terms
def compare(func: Any, x: Any, y: Any) -> Tensor:
    """Return elementwise comparisons."""
    if computes_plainly((x, y)):
        return func(*leading((x, y)))
    name = func.overloadpacket.__name__
    _, terms = _enter(name, (x, y))
    return _COMPARISONS[name](*terms)


@implements(aten.equal.default)  # torch.equal
@of_terms
def all_equal(func: Any, x: Any, y: Any) -> bool:
    """Return torch.equal."""
    if x.shape != y.shape:
        return False
    if computes_plainly((x, y)):
        return func(*leading((x, y)))
    _, terms = _enter("equal", (x, y))
    return bool(equal(*terms).all())


# aten's name: the choice between operands, each a list of terms of one format.
_CHOICES: dict[str, Callable[..., list[Tensor]]] = {
    "maximum": maximum,  # torch.maximum, amsgrad
    "minimum": minimum,  # torch.minimum, all_reduce
    "clamp": clamp,  # x.clamp
    "clamp_min": clamp,  # x.clamp_min, torch._foreach_maximum_
    "clamp_max": lambda x, high: clamp(x, None, high),  # x.clamp_max, torch._foreach_minimum_
    "abs": lambda x: choose(torch.signbit(x[0]), [-t for t in x], x),  # x.abs, Adamax
    "neg": lambda x: [quiet(-x[0]), *(-t for t in x[1:])],  # -x, maximize
}


def _chosen(name: str, operands: Sequence[Any], select: Callable[..., list[Tensor]]) -> MCFTensor:
    if name in ("abs", "neg") and isinstance(operands[0], GradientTensor):  # maximize
        (found,) = select([operands[0]._component0])
        return GradientTensor.over(found, operands[0]._format)
    format, terms = _enter(name, operands)
    return selected(select(*terms), format, common_role(operands), operands)


def _register_choice(name: str, select: Callable[..., list[Tensor]]) -> None:
    @of_terms
    def choice(func: Any, *args: Any) -> Any:
        return on_leading(func, args, {}) if computes_plainly(args) else _chosen(name, args, select)

    @of_terms
    def choice_into(func: Any, *args: Any, out: Tensor | None = None) -> Any:
        target = args[0] if out is None else out
        chosen = _chosen(name, args, select)
        store(func, target, chosen, [chosen])
        return target

    register_forms(name, choice, choice_into, choice_into)


for _name, _select in _CHOICES.items():
    _register_choice(_name, _select)


@implements(
    aten.fmax.default,  # torch.fmax
    aten.fmin.default,  # torch.fmin
)
@of_values
def without_nan(func: Any, x: Any, y: Any) -> Any:
    """Return the larger or smaller elements of values; NaN only where both are NaN."""
    select = maximum if func is aten.fmax.default else minimum

    def selected_terms(x: Terms, y: Terms) -> list[Tensor]:
        return choose(torch.isnan(x[0]), y, choose(torch.isnan(y[0]), x, select(x, y)))

    return _chosen(func.overloadpacket.__name__, (x, y), selected_terms)


def _in_one_storage(x: Any, y: Any) -> list[Sequence[Tensor]] | None:
    """Return the components of values of one storage format, whose elements can be moved, or None.

    Plain tensors of its dtype enter exactly.
    """
    ours = expansions((x, y))
    format = ours[0]._format
    if format.arithmetic != "numbers" or format.shared or any(z._format != format for z in ours):
        return None
    if any(z.acts_as != "value" for z in ours) or isinstance(ours[0], GradientTensor):
        return None
    if any(getattr(z, "dtype", None) != format.dtype for z in (x, y)):
        return None
    return [stored_in(z, format.nearest, ours[0].device) for z in (x, y)]


@implements(aten.where.self)  # torch.where, x.where
def where(func: Any, condition: Tensor, x: Any, y: Any) -> Any:
    """Return torch.where of expansions, or of an expansion and a plain tensor."""
    if not isinstance(condition, MCFTensor) and (stored := _in_one_storage(x, y)) is not None:
        format = expansions((x, y))[0]._format
        return selected(choose(condition, *stored), format, "value", (x, y))
    return _where(func, condition, x, y)


@of_terms
def _where(func: Any, condition: Tensor, x: Any, y: Any) -> Any:
    if isinstance(condition, MCFTensor):
        return compute(func, condition, x, y)
    if computes_plainly((x, y)):
        chosen = on_leading(func, (condition, x, y), {})
        note_moved(chosen, expansions((x, y))[0])
        return chosen
    return _chosen("where", (x, y), lambda x, y: choose(condition, x, y))


# ------------------------------------------------------------------------------------ neighbours


@opaque(lambda x, towards: torch.empty_like(x))
def _neighbour(x: Tensor, towards: Tensor) -> Tensor:
    """Return torch.nextafter, opaque to compilers, which evaluate 16-bit bases in float32."""
    return torch.nextafter(x, towards)


@implements(aten.nextafter.default)  # torch.nextafter
@of_values
def nextafter(func: Any, x: Any, y: Any) -> Any:
    """Return the next number after x towards y in the format.

    The precision of a format is not fixed: the neighbour of 1 in `bf16x2` is 1 + 2^-133, with the
    smallest number of the base as its tail.
    """
    format, (x, y) = _enter("nextafter", (x, y))
    x, y = zip(*(torch.broadcast_tensors(a, b) for a, b in zip(x, y, strict=True)), strict=True)
    up = less(x, y)
    towards = torch.where(up, torch.inf, -torch.inf).to(format.dtype)
    near = _stepped(x, towards)
    for _ in range(len(x) - 1):  # a changed leading term may halve the gaps
        nearer = _stepped(near, -towards)
        near = choose(torch.where(up, less(x, nearer), less(nearer, x)), nearer, near)
    plain = [_neighbour(x[0], y[0]), *(torch.zeros_like(t) for t in x[1:])]
    stays = equal(x, y) | torch.isnan(x[0]) | torch.isnan(y[0])
    moved = choose(torch.isfinite(x[0]), near, plain)
    return MCFTensor.of(choose(stays, choose(torch.isnan(x[0]), plain, y), moved), format)


def _stepped(x: Terms, towards: Tensor) -> list[Tensor]:
    """Return terms with the last one moved to its neighbour, normalized."""
    return list(expansion.renormalize([*x[:-1], _neighbour(x[-1], towards)], len(x)))


# ------------------------------------------------------------------------------ within one operand


def _ranks(x: MCFTensor) -> tuple[Tensor, list[Tensor]]:
    """Return the rank of each element as a float, and the terms of the elements of each rank.

    Equal elements have equal ranks, larger ones larger ranks, and NaN stays NaN.
    """
    terms = [t.reshape(-1) for t in x._read()]
    order = torch.arange(terms[0].numel(), device=x.device)
    for term in reversed(terms):
        order = order[torch.argsort(term[order], stable=True)]
    terms = [term[order] for term in terms]
    is_new = torch.zeros_like(order, dtype=torch.bool)
    for term in terms:
        is_new[1:] |= term[1:] != term[:-1]
    rank = is_new.cumsum(0)
    first = torch.zeros_like(order).index_put((rank,), torch.arange(len(order), device=x.device))
    dtype = widest(x.device)
    if len(order) > 1 << BASES[dtype].precision:
        raise without(f"the order of {len(order)} numbers, more than float32 counts,")
    ranked = torch.empty(len(order), dtype=dtype, device=x.device)
    ranked[order] = rank.to(dtype).masked_fill(torch.isnan(terms[0]), torch.nan)
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
@of_values
def by_rank(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operation on ranks, and replace the ranks by elements; indices stay unchanged."""
    if not isinstance(x, MCFTensor) or expansions((args, kwargs)):
        return compute(func, x, *args, **kwargs)
    if not x.numel() and func._schema.name.endswith("median") and not (args or kwargs):
        return x.new_full((), math.nan)
    rank, elements = _ranks(x)

    def element(result: Any) -> Any:
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        absent = ~torch.isfinite(result)  # NaN, or the padding of an empty window
        place = result.masked_fill(absent, 0).long()
        chosen = [term.index_select(0, place.reshape(-1)).view(place.shape) for term in elements]
        terms = [term.masked_fill(absent, 0) for term in chosen]
        terms[0] = torch.where(absent, quiet(result.to(terms[0].dtype)), terms[0])
        return MCFTensor.of(terms, x.format, own=True)

    return tree_map(element, func(rank, *args, **kwargs))


@implements(
    aten.searchsorted.Tensor,  # torch.searchsorted
    aten.searchsorted.Scalar,  # torch.searchsorted(x, 3.0)
    aten.bucketize.Tensor,  # torch.bucketize
    aten.bucketize.Scalar,  # torch.bucketize(3.0, x)
    aten.isin.Tensor_Tensor,  # torch.isin
    aten.isin.Tensor_Scalar,  # torch.isin(x, 3.0)
    aten.isin.Scalar_Tensor,  # torch.isin(3.0, x)
)
@of_values
def search(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the places of numbers in a sequence, or whether it has them."""
    found = expansions(args)
    in_float64 = all(serves(x._format, x.device) for x in found) and not has_rests(args)
    if in_float64:
        return compute(func, *args, **kwargs)
    format, columns = _enter(func.overloadpacket.__name__, args[:2])
    joined = [torch.cat([x.reshape(-1) for x in terms]) for terms in zip(*columns, strict=True)]
    ranks, _ = _ranks(MCFTensor.of(joined, format))
    shapes = [terms[0].shape for terms in columns]
    own = ranks.split([x.numel() for x in shapes])
    places = [x.reshape(shape) for x, shape in zip(own, shapes, strict=True)]
    packet = func.overloadpacket
    on_tensors = packet.Tensor_Tensor if packet is aten.isin else packet.Tensor
    return on_tensors(*places, *args[2:], **kwargs)
