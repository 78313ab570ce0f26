"""Powers of two: exponents as 0-d int32 tensors, which no device has to wait for.

Exponents that rules know beforehand are ints; those that depend on numbers are tensors, and stay on
the device of the data. All functions here take both.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

Exponent: TypeAlias = "int | Tensor"

ANY = -(1 << 20)
"""The exponent of zeros, which go with every scale: it is below all others."""

_CPU = torch.device("cpu")


def floor_log2(x: float) -> int:
    """The exponent of the largest power of two that is not above |x|; `ANY` for zero."""
    return math.frexp(x)[1] - 1 if x else ANY


def half_log2(n: int) -> int:
    """floor(½ log2 n), which unit scaling divides a sum of n numbers by; 0 for none."""
    return (n.bit_length() - 1) // 2 if n else 0


def largest(a: Exponent, b: Exponent) -> Exponent:
    """The larger one of two exponents."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def power_of_two(k: Exponent) -> float | Tensor:
    """2^k in float32, made of its bits: 2^-149 below 2^-126, and 2^127 from there on.

    It is never zero, which would make NaN of an infinity: these go with every scale.
    """
    if isinstance(k, Tensor):
        return ((k + 127).clamp(0, 254) << 23).clamp(min=1).view(torch.float32)
    return 2.0**-149 if k < -126 else 2.0 ** min(k, 127)


def times_power(x: Tensor, k: Exponent) -> Tensor:
    """x · 2^k, of which k is usually no number of float32's own range."""
    if not isinstance(k, Tensor) and k == 0:
        return x
    return x * power_of_two(k)


def times_any_power(x: Tensor, k: Exponent) -> Tensor:
    """x · 2^k in float64, whose range is enough for every k that is met."""
    if isinstance(k, Tensor):
        bits = ((k.to(torch.int64) + 1023).clamp(0, 2046) << 52).clamp(min=1)
        factor: float | Tensor = bits.view(torch.float64)
    else:
        factor = 2.0**-1074 if k < -1022 else 2.0 ** min(k, 1023)
    return x.to(torch.float64) * factor


def exponent_of_largest(x: Tensor) -> Tensor:
    """floor(log2 max|x|) over what is finite, as a 0-d int32; `ANY` where all is zero."""
    if x.numel() == 0:
        return torch.full((), ANY, dtype=torch.int32, device=x.device)
    if x.dim():
        least, most = x.aminmax()
        magnitude = torch.maximum(-least, most)
        if not _is_known_finite(magnitude):
            magnitude = torch.where(x.isfinite(), x, 0).abs().amax()
    else:
        magnitude = torch.where(x.isfinite(), x, 0).abs()
    exponent = torch.frexp(magnitude).exponent - 1
    return torch.where(magnitude == 0, ANY, exponent).to(torch.int32)


def _is_known_finite(magnitude: Tensor) -> bool:
    """Whether a look is free, as it is on a CPU outside of graphs, and shows no infinity or NaN."""
    return (
        type(magnitude) is Tensor
        and magnitude.device == _CPU
        and not torch.compiler.is_compiling()
        and math.isfinite(magnitude.item())
    )


def exponent_of_rms(x: Tensor) -> Tensor:
    """floor(log2 rms(x)) over what is finite, as a 0-d int32; x is near 1, so squares fit."""
    norm = torch.linalg.vector_norm(x) if x.numel() else x.new_zeros(())
    if not _is_known_finite(norm):
        norm = torch.linalg.vector_norm(torch.where(x.isfinite(), x, 0))
    exponent = torch.frexp(norm * max(1, x.numel()) ** -0.5).exponent - 1
    return torch.where(norm == 0, ANY, exponent).to(torch.int32)
