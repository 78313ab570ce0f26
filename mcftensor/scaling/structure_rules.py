"""Rules of operators that move, create, select and place elements: scales are carried along."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import refusal
from mcftensor.dispatch.registry import TABLE
from mcftensor.formats.moving import move_component
from mcftensor.kernels.columns import on_device
from mcftensor.operators.structure import move_elements
from mcftensor.scaling.exponents import ANY, largest
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled import ScaledTensor, data_of, is_all, is_scaled, made_of
from mcftensor.scaling.scaled_format import TOPS, ScaledFormat, of_dtype
from mcftensor.scaling.scaled_numbers import Unrounded, aligned, by_size, leveled, number, write_to
from mcftensor.tensor.implicit_rounding import rounding
from mcftensor.tensor.tensor import MCFTensor


@rule(
    *(func for func, handler in TABLE.items() if handler is move_elements),
    aten._unsafe_view.default,  # flatten and reshape of non-contiguous tensors
    aten.view_as_real_copy.default,
    aten.lift_fresh.default,  # torch.tensor and checkpoints
    *(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.im2col.default),
    takes_operator=True,
)
def _moved(func: Any, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator that moves elements to each component, and copy the exponent."""
    *data, s = x._held()
    moved = [move_component(func, y, args, kwargs) for y in data]
    if isinstance(moved[0], Tensor):
        return made_of(moved, s.clone(), x._format)
    return [made_of(piece, s.clone(), x._format) for piece in zip(*moved, strict=True)]


@rule(aten.view_as_complex.default)
def _as_complex(x: ScaledTensor) -> Any:
    raise refusal(aten.view_as_complex.default, [x], "its result is complex")


@rule(aten.constant_pad_nd, keeps_tails=True)
def _padded(x: Any, pad: Sequence[int], value: float = 0) -> Unrounded:
    """Pad with zeros, which fit every scale, or another value, which may raise the scale."""
    level = number(value)
    s = largest(x.exponent, level.exponent)
    inside = aten.constant_pad_nd(torch.ones_like(x._component0, dtype=torch.bool), pad, 0)
    padded = aten.constant_pad_nd(number(x).at(s), pad, 0.0)
    return Unrounded(torch.where(inside, padded, level.at(s)) if value else padded, s)


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
        parts = [part.to(device, non_blocking=non_blocking) for part in data_of(x)]
        x = made_of(parts, x.exponent.to(device), x.format)
        if dtype == x.dtype:
            return x
    if dtype not in TOPS:
        return x._collapsed().to(dtype)
    format = x.format if dtype == x.dtype else of_dtype(dtype)
    if format.top >= x.format.top:
        return made_of(format.store(number(x).mantissa), x.exponent.clone(), format)
    made = _empty_like(x, format)
    write_to(made, number(x))
    return made


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
        return write_to(target, number(source).to(target.device))
    new = encoded(source.to(target.device), target.format)
    return write_to(target, number(new.expand(target.shape)))


def encoded(x: Tensor, format: ScaledFormat) -> ScaledTensor:
    """Encode a plain tensor or an expansion: each number rounded once, placed by size."""
    if isinstance(x, MCFTensor):
        x = x._collapsed()
    placed = by_size(x, format)
    if x.dtype != torch.float64:
        return placed
    s = placed.exponent.to(torch.int64)
    near = torch.where(
        placed.exponent == ANY, 0.0, x * ((1023 - s).clamp(1, 2046) << 52).view(torch.float64)
    )
    return made_of(format.store(near), placed.exponent, format)


# ---------------------------------------------------------------------------------------- making


def _empty_like(x: ScaledTensor, format: ScaledFormat, **kwargs: Any) -> ScaledTensor:
    data = format.components[:-1]
    parts = [torch.empty_like(x._component0, dtype=y.dtype, **kwargs) for y in data]
    return made_of(parts, torch.full_like(x.exponent, ANY), format)


def _format_for(x: ScaledTensor, dtype: torch.dtype | None) -> ScaledFormat | None:
    """Return the format of a new tensor like x, or None if its dtype has no scales."""
    if dtype is None or dtype == x.dtype:
        return x.format.of_states
    return of_dtype(dtype) if dtype in TOPS else None


def _filled(template: Tensor, x: ScaledTensor, dtype: torch.dtype | None, value: float) -> Tensor:
    """Return a filled tensor with the layout of the template, in the format for x and a dtype."""
    format = _format_for(x, dtype)
    if format is None:
        return torch.full_like(template, value, dtype=dtype)
    parts = [torch.zeros_like(template, dtype=y.dtype) for y in format.components[:-1]]
    exponent = torch.full((), ANY, dtype=torch.int32, device=template.device)
    made = made_of(parts, exponent, format)
    return made.fill_(value) if value else made


@rule(aten.full_like)
def _full_like(
    x: ScaledTensor,
    value: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **unused: Any,
) -> Tensor:
    template = torch.empty_like(x._component0, device=device, memory_format=memory_format)
    return _filled(template, x, dtype, value)


@rule(aten.new_full)
def _new_full(
    x: ScaledTensor,
    size: Sequence[int],
    value: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **unused: Any,
) -> Tensor:
    template = torch.empty(size, dtype=x.dtype, device=device or x.device)
    return _filled(template, x, dtype, value)


@rule(
    *(aten.empty_like, aten.zeros_like, aten.ones_like),
    *(aten.new_empty, aten.new_zeros, aten.new_ones),
    takes_operator=True,
)
def _made(func: Any, x: ScaledTensor, *size: Any, **how: Any) -> Tensor:
    """Make states of optimizers, gradients of a loss or of unused tensors."""
    value = 1.0 if func.overloadpacket in (aten.ones_like, aten.new_ones) else 0.0
    made: Tensor = (_new_full if size else _full_like)(x, *size, value, **how)
    return made


@rule(aten.new_empty_strided)
def _new_empty_strided(
    x: ScaledTensor, size: Sequence[int], stride: Sequence[int], **how: Any
) -> Tensor:
    """Return a tensor in which gradients accumulate, with the layout of their parameter."""
    template = torch.empty_strided(size, stride, dtype=x.dtype, device=x.device)
    return _filled(template, x, how.get("dtype"), 0.0)


@rule(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(x: Tensor, value: Any) -> Tensor:
    filled = number(value)
    mantissa = on_device(filled.mantissa, x.device).expand(x.shape)
    return write_to(x, Unrounded(mantissa, filled.exponent))


@rule(aten.zero_)
def _zero_(x: ScaledTensor) -> ScaledTensor:
    for part in data_of(x):
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


@rule(aten.cat, keeps_tails=True)
def _cat(tensors: Sequence[Tensor], dim: int = 0, join: Any = torch.cat) -> Unrounded:
    """Join numbers at the largest of their exponents."""
    s, numbers = aligned(tensors)
    return Unrounded(join([x.at(s) for x in numbers], dim), s)


rule(aten.stack, keeps_tails=True)(functools.partial(_cat, join=torch.stack))


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, keeps_tails=True)
def _where(condition: Tensor, x: Any, y: Any) -> Unrounded:
    s, (a, b) = aligned([x, y])
    return Unrounded(torch.where(condition, a.at(s), b.at(s)), s)


@rule(aten.masked_fill, keeps_tails=True)
def _masked_fill(x: Any, mask: Tensor, value: Any) -> Unrounded:
    """Fill by a mask; infinities, as in causal masks, fit every scale."""
    filled = number(value)
    if not isinstance(value, Tensor) and not math.isfinite(value):
        return Unrounded(number(x).mantissa.masked_fill(mask, value), x.exponent)
    s, (filled, own) = leveled([filled, number(x)])
    return Unrounded(torch.where(mask, filled.at(s), own.at(s)), s)


# ----------------------------------------------------------------------- comparisons and queries


@rule(aten._local_scalar_dense)
def _item(x: ScaledTensor) -> float:
    return x._collapsed().item()


@rule(aten.is_pinned)
def _is_pinned(x: ScaledTensor, *args: Any) -> bool:
    return x._component0.is_pinned()


@rule(
    *(
        getattr(packet, name)
        for packet in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
        for name in ("Scalar", "Tensor")
    ),
    aten.equal.default,
    aten.isnan.default,
    aten.isinf.default,
    aten.isfinite.default,
    aten.isposinf.default,
    aten.isneginf.default,
    aten.argmax.default,  # accuracy
    aten.argmin.default,
    aten.argsort.default,
    aten.signbit.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    takes_operator=True,
)
def _asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator without floating results to the numbers in float64."""
    return func(*map(_exactly, args), **kwargs)


def _exactly(x: Any) -> Any:
    return x._collapsed() if is_scaled(x) else x


@rule(aten.allclose)
def _allclose(x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
    return torch.allclose(_exactly(x).double(), _exactly(y).double(), *args, **kwargs)
