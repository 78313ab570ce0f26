"""Operands that compiled code is tried on before its first use."""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.program import PATTERNS

COUNT = 512
"""Elements of a vector."""


def vector(dtype: torch.dtype, number: int, *, shared: bool = False) -> Tensor:
    """Numbers of a dtype, others for each number of a vector; one for each element, or for the
    elements that share it.

    A half has random patterns: of all magnitudes, subnormal too, infinite and no number at all. The
    other half has sizes that meet, so that sums and products are rounded.
    """
    generator = torch.Generator().manual_seed(number)
    bits = torch.randint(-(2**63), 2**63 - 1, (COUNT,), generator=generator, device="cpu")
    if shared:
        bits = bits[: COUNT // BLOCK_SIZE]
    if dtype == torch.bool:
        return bits > 0
    x = bits.to(PATTERNS[dtype.itemsize]).view(dtype)
    if dtype.is_floating_point:
        exponents = bits[::2] % 16 - 8
        x[::2] = torch.ldexp(bits[1::2].double() * 2.0**-63, exponents)
    return x


def scalar(dtype: torch.dtype, number: int) -> Tensor | float:
    """A number of a dtype; one of float64 is one of Python's."""
    if dtype == torch.int64:
        return torch.tensor(0x9E3779B97F4A7C1 + number, device="cpu")
    value = 1 / (number + 3)
    return value if dtype == torch.float64 else torch.tensor(value, dtype=dtype, device="cpu")


def are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are the same, signs of zeros too; one NaN is as good as another."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())
