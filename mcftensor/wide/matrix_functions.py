"""Pseudo-inverses and exponentials of matrices, in formats that no machine type represents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcftensor.wide.elementary import in_longer
from mcftensor.wide.linear_algebra import batched, by_power


def pinv(
    a: Tensor,
    *,
    atol: Tensor | None = None,
    rtol: Tensor | None = None,
    hermitian: bool = False,
) -> Tensor:
    """Return pseudo-inverses; singular values up to a limit are zeros."""
    if rtol is None:
        has_atol = atol is not None and bool((atol > 0).any())
        epsilon = 2.0 ** (1 - a._format.precision)  # type: ignore[attr-defined]
        rtol = a.new_tensor(0.0 if has_atol else epsilon * max(a.shape[-2:]))
    if hermitian:
        a = a.tril() + a.tril(-1).mT
    return _pinv(a, torch.zeros_like(rtol) if atol is None else atol, rtol)


@in_longer
def _pinv(a: Tensor, atol: Tensor, rtol: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    limit = torch.maximum(atol.unsqueeze(-1), rtol.unsqueeze(-1) * s[..., :1])
    inverses = torch.where(s > limit, 1 / s, 0.0)
    return vh.mT @ (inverses.unsqueeze(-1) * u.mT)


def matrix_exp(a: Tensor) -> Tensor:
    """Return exponentials of square matrices."""
    return _exp(a)[0]


@batched("linalg.matrix_exp")
def _exp(a: Tensor, *, bits: int) -> tuple[Tensor]:
    """Sum the Taylor series of a / 2^k, whose norm is below 1/16, and square it k times."""
    norm = float(a.abs().sum(0).amax()) if len(a) else 0.0
    if not math.isfinite(norm):
        return (torch.full_like(a, math.nan),)
    k = max(math.frexp(norm)[1] + 4, 0)
    a = by_power(a, torch.tensor(-k, device=a.device))
    wanted = bits + 2 * k + 16
    count = next(i for i in range(wanted) if 4 * i + math.lgamma(i + 1) / math.log(2) > wanted)
    identity = torch.eye(len(a), dtype=a.dtype, device=a.device)
    result = identity + torch.zeros_like(a)
    for i in range(count, 0, -1):
        result = identity + a @ result / i
    for _ in range(k):
        result = result @ result
    return (result,)
