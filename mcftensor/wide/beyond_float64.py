"""Operations of formats beyond 48 bits, composed of the arithmetic of the format.

No machine type represents these formats. Sums are pairwise, so that the error of n terms grows with
log2 n. Matrix products, convolutions and elementary functions have separate files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mcftensor.dispatch.default_handler import in_machine_type
from mcftensor.dispatch.operands import expansions, mapped, refusal, stored_in, value_of
from mcftensor.dispatch.schemas import written_to
from mcftensor.dispatch.store import assign
from mcftensor.dispatch.system import PRECISION_OF_FLOAT32
from mcftensor.formats import Format
from mcftensor.kernels.without_float64 import without
from mcftensor.tensor import MCFTensor
from mcftensor.wide import (
    convolutions,
    decompositions,
    elementary,
    linear_algebra,
    products,
    random_numbers,
    scattering,
)
from mcftensor.wide.elementary import in_longer, like

aten = torch.ops.aten

# ---------------------------------------------------------------------------------- reductions


def _dims_of(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Return the dimensions along which an operator reduces."""
    dims = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return sorted({d % x.dim() for d in dims}) if x.dim() else []


def _reduce(
    combine: Callable[[Tensor, Tensor], Tensor],
    neutral: float,
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Return the pairwise combination of all elements along dimensions."""
    reduced = _dims_of(x, dim)
    kept = [d for d in range(x.dim()) if d not in reduced]
    shape = [x.shape[d] for d in kept]
    row = x.permute(kept + reduced).reshape([*shape, math.prod(x.shape[d] for d in reduced)])
    if row.shape[-1] == 0:
        row = torch.full_like(row[..., :0].new_empty([*shape, 1]), neutral)
    while row.shape[-1] > 1:
        half = row.shape[-1] // 2
        pairs = combine(row[..., :half], row[..., half : 2 * half])
        row = torch.cat([pairs, row[..., 2 * half :]], -1)
    result = row[..., 0]
    for d in reduced if keepdim else ():
        result = result.unsqueeze(d)
    return result


_sum = functools.partial(_reduce, torch.add, 0.0)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    total = _sum(x, dim, keepdim)
    return total / (x.numel() / max(total.numel(), 1))


def _scan(combine: Callable[[Tensor, Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Return running results: each pass combines every element with the one 1, 2, 4, ... places
    before.
    """
    distance = 1
    while x.dim() and distance < x.shape[dim]:
        length = x.shape[dim] - distance
        later = combine(x.narrow(dim, distance, length), x.narrow(dim, 0, length))
        x = torch.cat([x.narrow(dim, 0, distance), later], dim)
        distance *= 2
    return x.clone()


def _moments(
    reduce: Callable[[Tensor, Any, float], Tensor],
    x: Tensor,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a function of the deviations from the mean and of their count, and the mean."""
    places = _dims_of(x, dim)
    if any(x.shape[d] == 0 for d in places):
        nothing = _sum(x, places, keepdim) + math.nan
        return nothing, nothing.clone()
    # A shift changes no derivative; the differences are exact where elements share leading terms.
    first = x.detach()[tuple(slice(0, 1 if d in places else None) for d in range(x.dim()))]
    below = x - first
    mean = _mean(below, dim, True)
    count = x.numel() / max(mean.numel(), 1) - (1 if correction is None else correction)
    moment, mean = reduce(below - mean, places, max(count, 0.0)), first + mean
    return (moment, mean) if keepdim else (moment.squeeze(places), mean.squeeze(places))


def _mean_of_squares(x: Tensor, dim: Any, count: float) -> Tensor:
    return _sum(torch.square(x), dim, True) / count


def _root_of_squares(x: Tensor, dim: Any, count: float = 1.0) -> Tensor:
    """Return the root of the sum of squares, divided by a count, in rows without a unit."""
    size = x.abs().amax(dim, True)._read()[0]  # type: ignore[attr-defined]
    size = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    # Powers of two change no bits.
    scale = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1)
    return torch.sqrt(_sum(torch.square(x / scale), dim, True) / count) * scale


var_mean = functools.partial(_moments, _mean_of_squares)
std_mean = functools.partial(_moments, _root_of_squares)


def _norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    if ord in (math.inf, -math.inf):
        dims = list(range(x.dim())) if dim is None else dim
        return (torch.amax if ord > 0 else torch.amin)(x.abs(), dims, keepdim)
    if ord == 1:
        return _sum(x.abs(), dim, keepdim)
    if ord == 0:
        return _sum((x != 0).to(x.dtype) + torch.zeros_like(x), dim, keepdim)
    if not x.numel():
        return _sum(x, dim, keepdim)
    if ord == 2:
        total = _root_of_squares(x, list(range(x.dim())) if dim is None else dim)
    else:
        largest = x.abs().amax(list(range(x.dim())) if dim is None else dim, True)
        largest = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
        root = like(x, 1 / Fraction(ord))
        total = _sum((x.abs() / largest) ** ord, dim, True) ** root * largest
    return total if keepdim else total.squeeze(dim) if dim is not None else total.reshape(())


_PAIRS = 1 << 22
"""Numbers at a time in the differences of all pairs of rows."""


def _halves(x: Tensor, y: Tensor) -> list[int]:
    """Return the row at which the first operand of `torch.cdist` is divided, if it is too large."""
    return [x.shape[-2] // 2] if x.numel() * y.shape[-2] > _PAIRS and x.shape[-2] > 1 else []


def _cdist(x: Tensor, y: Tensor, p: float, mode: int | None = None) -> Tensor:
    if half := _halves(x, y):
        return torch.cat([_cdist(part, y, p) for part in x.tensor_split(half, -2)], -2)
    return _norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


def _pdist(x: Tensor, p: float = 2) -> Tensor:
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return _norm(x[i] - x[j], p, -1)


def _slopes(differences: Tensor, p: float, distances: Tensor) -> Tensor:
    """Return the gradients of distances with respect to the differences of two rows."""
    distances = distances.unsqueeze(-1)
    if p in (0, 1):
        return differences.sign() * p
    if p == math.inf:
        return differences.sign() * (differences.abs() == distances).to(differences.dtype)
    share = differences / torch.where(distances == 0, 1.0, distances)
    return share if p == 2 else share.sign() * share.abs() ** (p - 1)


def _cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    if half := _halves(x, y):
        parts = zip(*(z.tensor_split(half, -2) for z in (grad, x, distances)), strict=True)
        return torch.cat([_cdist_backward(a, b, y, p, c) for a, b, c in parts], -2)
    slopes = _slopes(x.unsqueeze(-2) - y.unsqueeze(-3), p, distances)
    return _sum(slopes * grad.unsqueeze(-1), [-2])


def _pdist_backward(grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    slopes = _slopes(x[i] - x[j], p, distances) * grad.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, torch.cat([i, j]), torch.cat([slopes, -slopes]))


def _trilinear(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    new_x: Sequence[int],
    new_y: Sequence[int],
    new_z: Sequence[int],
    summed: Sequence[int],
    _: int = 1,
) -> Tensor:
    """Return products of three tensors with new dimensions, summed along some of all."""

    def spread(factor: Tensor, new: Sequence[int]) -> Tensor:
        return functools.reduce(torch.unsqueeze, new, factor)

    product = spread(x, new_x) * spread(y, new_y) * spread(z, new_z)
    return _sum(product, summed) if summed else product


# --------------------------------------------------------------------------------- elementwise


def _sign(x: MCFTensor) -> MCFTensor:
    leading, *tails = x._read()
    return x._like([torch.sign(leading), *map(torch.zeros_like, tails)])


def _copysign(x: MCFTensor, sign: Any) -> Tensor:
    number = sign if isinstance(sign, Tensor) else torch.tensor(float(sign), device="cpu")
    return torch.where(torch.signbit(x) == torch.signbit(number), x, -x)


def _div(x: Tensor, y: Tensor, *, rounding_mode: str | None = None) -> Tensor:
    """Return quotients; those rounded to whole numbers by the exact remainder."""
    quotient = x / y
    if rounding_mode is None:
        return quotient
    x = x if isinstance(x, Tensor) else torch.full_like(quotient, x)
    rest = torch.fmod(x, y)
    whole = ((x - rest) / y).round()
    is_special = torch.isnan(rest)  # of infinite dividends, and divisors of 0
    if rounding_mode == "floor":
        whole = torch.where((rest != 0) & torch.signbit(quotient), whole - 1, whole)
        is_special = is_special & (y == 0)
    whole = torch.where(whole == 0, torch.copysign(torch.zeros_like(whole), quotient), whole)
    return torch.where(is_special, quotient, whole)


# ------------------------------------------------------------------------------- evenly spaced


def _arange(
    format: Format, start: float, end: float | None = None, step: float = 1, **options: Any
) -> Tensor:
    start, end = (0, start) if end is None else (start, end)
    count = max(math.ceil((end - start) / step), 0)
    return value_of(torch.arange(count, **options), format) * step + start


def _linspace(format: Format, start: Any, end: Any, steps: int, **options: Any) -> Tensor:
    """Return numbers that are exact at both ends."""
    i = value_of(torch.arange(steps, **options), format)
    step = (i.new_zeros(()) + end - start) / max(steps - 1, 1)
    return torch.where(i * 2 < steps, i * step + start, (i - (steps - 1)) * step + end)


SPACED: dict[str, Callable[..., Tensor]] = {"arange": _arange, "linspace": _linspace}
"""Functions of the format of their result."""


# --------------------------------------------------------------------------------- all by name

MOMENTS: dict[str, Callable[..., Any]] = {
    "var_mean": var_mean,  # torch.var_mean
    "std_mean": std_mean,  # torch.std_mean
    "var": lambda *args, **options: var_mean(*args, **options)[0],  # x.var
    "std": lambda *args, **options: std_mean(*args, **options)[0],  # x.std
}
SPREADS = MOMENTS | decompositions.SPREADS
"""Variances, and norms of rows or channels."""

DIFFERENCES: dict[str, Callable[..., Any]] = {
    "mean": _mean,  # x.mean, gradients of x.var, torch.cov
    "logcumsumexp": functools.partial(_scan, torch.logaddexp),  # x.logcumsumexp
    "_cdist_forward": _cdist,  # torch.cdist
    "_pdist_forward": _pdist,  # F.pdist
    "_cdist_backward": _cdist_backward,  # gradients of torch.cdist
    "_pdist_backward": _pdist_backward,  # gradients of F.pdist
    "allclose": lambda *args, **kwargs: bool(torch.isclose(*args, **kwargs).all()),  # x.allclose
    **decompositions.DIFFERENCES,  # F.mse_loss
    **elementary.DIFFERENCES,  # x.log_softmax
}
"""Other functions of differences of elements."""

ALGORITHMS: dict[str, Callable[..., Any]] = {
    **elementary.ALGORITHMS,  # torch.exp
    **SPREADS,
    **DIFFERENCES,
    "sum": _sum,  # x.sum, gradients of what broadcasts
    "prod": functools.partial(_reduce, torch.mul, 1.0),  # x.prod
    "cumsum": functools.partial(_scan, torch.add),  # x.cumsum
    "cumprod": functools.partial(_scan, torch.mul),  # x.cumprod
    "linalg_vector_norm": _norm,  # x.norm, clip_grad_norm_
    "norm": lambda x, p=2, *others: _norm(x, 2 if p is None else p, *others),  # torch.norm
    "mm": products.mm,  # x @ y
    "bmm": products.multiplied,  # torch.einsum
    "mv": products.mv,  # matrix @ vector
    "dot": products.inner,  # torch.dot
    "vdot": products.inner,  # torch.linalg.vecdot
    "addmm": products.added(products.mm),  # torch.addmm, F.linear
    "baddbmm": products.added(products.multiplied),  # torch.baddbmm
    "addmv": products.added(products.mv),  # torch.addmv
    "addbmm": products.added(lambda x, y: _sum(products.multiplied(x, y), 0)),  # torch.addbmm
    "_trilinear": in_longer(_trilinear),  # F.bilinear
    "convolution": convolutions.convolution,  # F.conv1d, F.conv_transpose2d
    "convolution_backward": convolutions.convolution_backward,  # their gradients
    **convolutions.ALGORITHMS,  # F.avg_pool2d
    "eye": torch.eye,  # nn.init.eye_
    "fill": lambda x, value: torch.zeros_like(x).fill_(value),  # torch.fill
    "sign": _sign,  # x.sign, gradients of x.abs
    "sgn": _sign,  # x.sgn
    "rsqrt": lambda x: 1 / torch.sqrt(x),  # x.rsqrt
    "div": in_longer(_div),  # x.div(y, rounding_mode="floor")
    "floor_divide": in_longer(functools.partial(_div, rounding_mode="floor")),  # x // y
    "copysign": _copysign,  # torch.copysign
    "_linalg_solve_ex": linear_algebra.solve_ex,  # torch.linalg.solve
    "linalg_inv_ex": linear_algebra.inv_ex,  # torch.linalg.inv
    "linalg_solve_triangular": linear_algebra.solve_triangular,  # torch.linalg.solve_triangular
    "linalg_lu_solve": linear_algebra.lu_solve,  # gradients of torch.linalg.solve and det
    "linalg_lu_factor_ex": linear_algebra.lu_factor_ex,  # torch.linalg.lu_factor
    "linalg_lu": linear_algebra.lu,  # torch.linalg.lu
    "lu_unpack": linear_algebra.lu_unpack,  # torch.lu_unpack
    "_linalg_det": linear_algebra.det,  # torch.linalg.det
    "_linalg_slogdet": linear_algebra.slogdet,  # torch.linalg.slogdet, torch.logdet
    "linalg_cholesky_ex": linear_algebra.cholesky_ex,  # torch.linalg.cholesky
    "cholesky": lambda a, upper=False: torch.linalg.cholesky(a, upper=upper),  # torch.cholesky
    "cholesky_solve": linear_algebra.cholesky_solve,  # torch.cholesky_solve
    "cholesky_inverse": linear_algebra.cholesky_inverse,  # torch.cholesky_inverse
    "linalg_qr": linear_algebra.qr,  # torch.linalg.qr
    "linalg_lstsq": linear_algebra.lstsq,  # torch.linalg.lstsq
    "_linalg_eigh": linear_algebra.eigh,  # torch.linalg.eigh, eigvalsh
    "_linalg_svd": linear_algebra.svd,  # torch.linalg.svd, svdvals, cond
    "linalg_pinv": linear_algebra.pinv,  # torch.linalg.pinv
    "linalg_matrix_exp": linear_algebra.matrix_exp,  # torch.linalg.matrix_exp
    **scattering.ALGORITHMS,  # x.index_add, gradients of F.max_pool2d
    **decompositions.ALGORITHMS,  # activations of nn
    **random_numbers.ALGORITHMS,  # x.normal_, nn.init
}
"""Algorithms by the names of aten operators."""


def by_algorithm(func: Any, format: Format, *args: Any, **kwargs: Any) -> Any:
    """Run an operation by its algorithm; plain tensors enter as expansions.

    Raises:
        NotImplementedError: there is no algorithm.
    """
    name = func.overloadpacket.__name__
    found = expansions((args, kwargs))
    targets = written_to(func, args, kwargs)
    plain_name = name.removesuffix("_") if targets and name not in ALGORITHMS else name
    found_for = ALGORITHMS.get(plain_name)
    if plain_name in SPACED:
        found_for = functools.partial(SPACED[plain_name], format, device=found[0].device)
    if found_for is None or len(targets) > 1:
        raise refusal(func, found, f"it has no algorithm for {format.precision} bits")
    dtype, _ = kwargs.pop("dtype", None), kwargs.pop("out", None)
    device = found[0].device

    def enter(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        writes = x._count if isinstance(x, MCFTensor) else None
        return MCFTensor.of(stored_in(x, format, device), format, writes=writes)

    result = found_for(*mapped(enter, args), **mapped(enter, kwargs))
    if targets:
        assign(func, targets, [result], found)
        return targets[0]
    if dtype not in (None, format.dtype) and isinstance(result, MCFTensor):
        return result._collapsed(dtype)
    return result


def in_float32_terms(
    func: Any,
    format: Format,
    found: list[MCFTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation by its algorithm in float32 terms, and round its results once.

    Without an algorithm, formats that float32 serves are evaluated in it.

    Raises:
        NotImplementedError: there is no algorithm for a longer format.
    """
    terms = max(2, *(len(x._format.components) for x in found))
    asked = kwargs.get("dtype")
    options = {name: x for name, x in kwargs.items() if name != "dtype"}
    try:
        result = by_algorithm(func, Format(torch.float32, terms), *args, **options)
    except NotImplementedError as error:
        if format.precision <= PRECISION_OF_FLOAT32:
            return in_machine_type(func, format, found, args, kwargs)
        shapes = ", ".join(f"{x._format.name} {tuple(x.shape)}" for x in found)
        raise without(f"{func} on expansions ({shapes})") from error
    if any(result is x for x in written_to(func, args, kwargs)):
        return result

    def narrow(x: Any) -> Any:
        if not isinstance(x, MCFTensor):
            return x
        if asked not in (None, format.dtype):
            return x._collapsed(asked)
        return x if x._format is format else value_of(x, format, found)

    return tree_map(narrow, result)
