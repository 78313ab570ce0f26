"""Exponents of powers of two, as ints where they are known, else as 0-d int32 tensors.

Exponents that rules know in advance are ints. Exponents that depend on numbers are ints on a CPU
outside of graphs, where reading a number is free. On other devices they are tensors, to avoid
synchronization. All functions here take both.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

Exponent: TypeAlias = "int | Tensor"

ANY = -(1 << 20)
"""The exponent of zeros, which fit every scale; below all others."""

_CPU = torch.device("cpu")


def floor_log2(x: float) -> int:
    """The exponent of the largest power of two not above |x|; `ANY` for zero."""
    return math.frexp(x)[1] - 1 if x else ANY


def half_log2(n: int) -> int:
    """floor(½ log2 n): unit scaling divides a sum of n numbers by 2 to this power; 0 for n = 0."""
    return (n.bit_length() - 1) // 2 if n else 0


def is_free(x: Tensor) -> bool:
    """Whether reading a number is free, as on a CPU outside of graphs."""
    return type(x) is Tensor and x.device == _CPU and not torch.compiler.is_compiling()


def known(s: Tensor) -> Exponent:
    """Return an exponent as an int if reading it is free."""
    return int(s.item()) if is_free(s) else s


def exponent_tensor(s: Exponent, device: torch.device) -> Tensor:
    """Return an exponent as a new tensor."""
    if isinstance(s, Tensor):
        return s.to(torch.int32, copy=True)
    return torch.full((), s, dtype=torch.int32, device=device)


def largest(a: Exponent, b: Exponent) -> Exponent:
    """The larger of two exponents."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def smallest(a: Exponent, b: Exponent) -> Exponent:
    """The smaller of two exponents."""
    return -largest(-a, -b)


def power_of_two(k: Exponent) -> float | Tensor:
    """2^k in float32, made of its bits; 2^-149 for k below -126, 2^127 for k above 127.

    The result is never zero, since zero times infinity is NaN, and infinities fit every scale.
    """
    if isinstance(k, Tensor):
        return ((k + 127).clamp(0, 254) << 23).clamp(min=1).view(torch.float32)
    return 2.0**-149 if k < -126 else 2.0 ** min(k, 127)


def times_power(x: Tensor, k: Exponent) -> Tensor:
    """Return x · 2^k; k is usually outside the range of float32."""
    if not isinstance(k, Tensor) and k == 0:
        return x
    return x * power_of_two(k)


def times_any_power(x: Tensor, k: Exponent) -> Tensor:
    """x · 2^k in float64, whose range is enough for every k in use."""
    if isinstance(k, Tensor):
        bits = ((k.to(torch.int64) + 1023).clamp(0, 2046) << 52).clamp(min=1)
        factor: float | Tensor = bits.view(torch.float64)
    else:
        factor = 2.0**-1074 if k < -1022 else 2.0 ** min(k, 1023)
    return x.to(torch.float64) * factor


def exponent_of_largest(x: Tensor) -> Exponent:
    """Return floor(log2 max|x|) over finite elements, or `ANY` if all are zero."""
    if x.numel() == 0:
        return ANY
    if x.dim():
        least, most = x.aminmax()
        magnitude = torch.maximum(-least, most)
        if not _is_known_finite(magnitude):
            magnitude = torch.where(x.isfinite(), x, 0).abs().amax()
    else:
        magnitude = torch.where(x.isfinite(), x, 0).abs()
    return _floor_log2(magnitude)


def exponent_of_rms(x: Tensor) -> Exponent:
    """Return floor(log2 rms(x)) over finite elements; x is near 1, so squares fit."""
    norm = torch.linalg.vector_norm(x) if x.numel() else x.new_zeros(())
    if not _is_known_finite(norm):
        norm = torch.linalg.vector_norm(torch.where(x.isfinite(), x, 0))
    return _floor_log2(norm * max(1, x.numel()) ** -0.5)


def _is_known_finite(magnitude: Tensor) -> bool:
    return is_free(magnitude) and math.isfinite(magnitude.item())


def _floor_log2(x: Tensor) -> Exponent:
    if is_free(x):
        return floor_log2(x.item())
    return torch.where(x == 0, ANY, torch.frexp(x).exponent - 1).to(torch.int32)
