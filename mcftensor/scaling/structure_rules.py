"""Rules of operators that move, create, select or compare elements: scales are carried along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.default_handler import of_leading_term, of_zeros
from mcftensor.formats.moving import move_component
from mcftensor.kernels.columns import on_device
from mcftensor.operators.comparison import all_equal, by_rank, compare
from mcftensor.operators.structure import (
    filled_like,
    item,
    join,
    layer,
    like,
    move_elements,
    new,
    new_filled,
    view,
    view_as_complex,
)
from mcftensor.scaling.exponents import ANY, times_any_power
from mcftensor.scaling.rule_table import aten, handled_by, homogeneous, rule
from mcftensor.scaling.scaled import ScaledTensor, each_made_of, is_all, is_scaled, made_of
from mcftensor.scaling.scaled_format import TOPS, ScaledFormat, of_dtype
from mcftensor.scaling.scaled_numbers import (
    Unrounded,
    aligned,
    by_size,
    lead,
    number,
    where_of,
    write_to,
)
from mcftensor.tensor.implicit_rounding import rounding
from mcftensor.tensor.tensor import MCFTensor


@rule(
    *handled_by(move_elements, layer, view),
    aten.view_as_real_copy.default,
    aten.lift_fresh.default,  # torch.tensor and checkpoints
    takes_operator=True,
)
def _moved(func: Any, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator that moves elements to each component, and copy the exponent."""
    *data, s = x._held()
    return each_made_of([move_component(func, y, args, kwargs) for y in data], s.clone(), x._format)


rule(*handled_by(view_as_complex), takes_operator=True)(view_as_complex)


@rule(aten.constant_pad_nd, keeps_tails=True)
def _padded(x: Any, pad: Sequence[int], value: float = 0) -> Unrounded:
    """Pad with zeros, which fit every scale, or another value, which may raise the scale."""
    a = number(x)
    padded = Unrounded(aten.constant_pad_nd(a.mantissa, pad, 0.0), a.exponent)
    if not value:
        return padded
    inside = aten.constant_pad_nd(torch.ones_like(x._component0, dtype=torch.bool), pad, 0)
    return where_of(inside, padded, value)


@rule(aten._to_copy)
def _to_copy(
    x: ScaledTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **unused: Any,
) -> Any:
    """Convert to another dtype or device.

    Dtypes of data keep the scale, so that gradients come back scaled. Float64 and integers are
    plain. Data is moved for a narrower dtype only if it would not fit.
    """
    dtype = dtype or x.dtype
    if device is not None and torch.device(device) != x.device:
        *data, s = x._held()
        data = [part.to(device, non_blocking=non_blocking) for part in data]
        x = made_of(data, s.to(device), x.format)
        if dtype == x.dtype:
            return x
    if dtype not in TOPS:
        return x._collapsed().to(dtype)
    format = x.format if dtype == x.dtype else of_dtype(dtype)
    if format.top >= x.format.top:
        return made_of(format.store(number(x).mantissa), x.exponent.clone(), format)
    return write_to(torch.empty_like(x, dtype=dtype), number(x))


@rule(aten.copy_)
def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy numbers: with the exponent if the formats are the same, else placed by size."""
    if not is_scaled(target):
        assert is_scaled(source)
        is_plain = target.is_floating_point() and not isinstance(target, MCFTensor)
        if is_plain:
            rounding(aten.copy_, [source], target)
        return target.copy_(source._collapsed(target.dtype if is_plain else torch.float64))
    if is_scaled(source) and source.format is target.format and is_all(target):
        for mine, theirs in zip(target._held(), source._held(), strict=True):
            mine.copy_(theirs, non_blocking)
        return target
    if is_scaled(source):
        return write_to(target, number(source.to(target.device)))
    new = encoded(source.to(target.device), target.format)
    return write_to(target, number(new.expand(target.shape)))


def encoded(x: Tensor, format: ScaledFormat) -> ScaledTensor:
    """Encode a tensor or an expansion: each number rounded once, placed by size."""
    if isinstance(x, MCFTensor) and not is_scaled(x):
        x = x._collapsed()
    placed = by_size(x, format)
    if x.dtype != torch.float64:
        return placed
    near = times_any_power(x, -placed.exponent)
    return made_of(format.store(near), placed.exponent, format)


# ---------------------------------------------------------------------------------------- making


@rule(*handled_by(like, new, filled_like, new_filled), takes_operator=True)
def _made(
    func: Any, x: ScaledTensor, *args: Any, dtype: torch.dtype | None = None, **how: Any
) -> Any:
    """Make states of optimizers, gradients of a loss or of unused tensors."""
    if dtype is None or dtype == x.dtype:
        format = x.format.of_states
    elif dtype in TOPS:
        format = of_dtype(dtype)
    else:
        return func(x._component0, *args, dtype=dtype, **how)
    is_full = func.overloadpacket in (aten.full_like, aten.new_full)
    value = args[-1] if is_full else float(func.overloadpacket in (aten.ones_like, aten.new_ones))
    args = (*args[:-1], 0) if is_full else args
    data = [func(x._component0, *args, dtype=y.dtype, **how) for y in format.components[:-1]]
    exponent = torch.full((), ANY, dtype=torch.int32, device=data[0].device)
    made = made_of([part.zero_() for part in data], exponent, format)
    return made.fill_(value) if value else made


@rule(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(x: Tensor, value: Any) -> Tensor:
    filled = number(value)
    mantissa = on_device(filled.mantissa, x.device).expand(x.shape)
    return write_to(x, Unrounded(mantissa, filled.exponent))


@rule(aten.zero_)
def _zero_(x: ScaledTensor) -> ScaledTensor:
    for part in x._held()[:-1]:
        part.zero_()
    if is_all(x):
        x.exponent.fill_(ANY)
    return x


@rule(
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,  # dropout
    aten.bernoulli_.Tensor,
    aten.exponential_.default,
    takes_operator=True,
)
def _drawn(func: Any, x: ScaledTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw random numbers in float32."""
    drawn = torch.empty_like(x._component0, dtype=torch.float32)
    return x.copy_(func(drawn, *args, **kwargs))


# --------------------------------------------------------------------- concatenation and selection


@rule(*handled_by(join), keeps_tails=True, takes_operator=True)
def _joined(func: Any, tensors: Sequence[Tensor], *how: Any) -> Unrounded:
    s, numbers = aligned(tensors)
    return Unrounded(func([x.at(s) for x in numbers], *how), s)


rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, keeps_tails=True)(where_of)


@rule(aten.masked_fill, keeps_tails=True)
def _masked_fill(x: Any, mask: Tensor, value: Any) -> Unrounded:
    return where_of(mask, value, x)


# ---------------------------------------------------------------------------- lookup by indices


@rule(aten.index_put, keeps_tails=True)
def _index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Unrounded:
    """Assign to indices, also for the gradients of indexing."""
    masks = [i for i in indices if i is not None]
    if values.dim() == 0 and len(masks) == 1 and masks[0].dtype == torch.bool and not accumulate:
        before = next(i for i, index in enumerate(indices) if index is not None)
        after = (1,) * (x.dim() - before - masks[0].dim())
        # torch.where needs no count of places, for which the host would wait.
        return where_of(masks[0].view(*masks[0].shape, *after), values, x)
    s, (a, b) = aligned([x, values])
    return Unrounded(aten.index_put(a.at(s), indices, b.at(s), accumulate), s)


@rule(aten._index_put_impl_)
def _index_put_impl_(
    x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    return write_to(x, _index_put(x, indices, values, accumulate))


homogeneous(
    *(aten.scatter.src, aten.scatter_add, aten.index_add, aten.index_copy),
    jointly=True,
    keeps_tails=True,
)


@rule(aten.scatter.value, keeps_tails=True)
def _scatter(x: Any, dim: int, index: Tensor, value: float) -> Unrounded:
    s, (a, b) = aligned([x, value])
    return Unrounded(
        a.at(s).scatter(dim, index, on_device(b.at(s), x.device).expand(index.shape)), s
    )


@rule(aten.embedding)
def _embedding(weight: Any, indices: Tensor, *unused: Any, **also: Any) -> Unrounded:
    picked = lead(weight)
    return Unrounded(torch.embedding(picked.mantissa, indices), picked.exponent)


# One row for each occurrence of a token is summed; their number is not known beforehand.
homogeneous(aten.embedding_dense_backward, placing="by size")


# ----------------------------------------------------------------------- comparisons and queries


# The order of numbers does not depend on the scale. The next rule replaces that of argmax.
homogeneous(*handled_by(by_rank))


@rule(
    *handled_by(compare, all_equal, item, of_leading_term, of_zeros),
    aten.isfinite.default,
    aten.argmax.default,  # accuracy
    aten.argmin.default,
    aten.argsort.default,
    aten.is_nonzero.default,
    takes_operator=True,
)
def _asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator without floating results to the numbers in float64."""
    return func(*(x._collapsed() if is_scaled(x) else x for x in args), **kwargs)


@rule(aten.is_pinned)  # which has no answer for collapsed numbers
def _is_pinned(x: ScaledTensor, *args: Any) -> bool:
    return x._component0.is_pinned()


@rule(aten.allclose)
def _allclose(x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
    return aten.allclose(x.double(), y.double(), *args, **kwargs)
