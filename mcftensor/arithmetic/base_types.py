"""The machine floats that are terms of numbers: precision, exponent range, related dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcftensor.kernels.without_float64 import widest


@dataclass(frozen=True)
class Base:
    """A machine float.

    Attributes:
        dtype: its dtype.
        name: its name in names of formats.
        precision: significand bits, including the implicit one.
        min_exponent: e of the smallest normal number 2^e.
        max_exponent: e of the largest numbers; every finite number is below 2^(e+1).
        integer: the integer dtype of the same width.
        wider: the dtype in which a product of two numbers is exact, or None for the widest dtype.
    """

    dtype: torch.dtype
    name: str
    precision: int
    min_exponent: int
    max_exponent: int
    integer: torch.dtype
    wider: torch.dtype | None


BASES = {
    base.dtype: base
    for base in (
        Base(torch.bfloat16, "bf16", 8, -126, 127, torch.int16, torch.float32),
        Base(torch.float16, "fp16", 11, -14, 15, torch.int16, torch.float32),
        Base(torch.float32, "fp32", 24, -126, 127, torch.int32, torch.float64),
        Base(torch.float64, "fp64", 53, -1022, 1023, torch.int64, None),
    )
}

NARROW = (torch.bfloat16, torch.float16)
"""The 16-bit bases."""


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponent, for integers in the exponent range of normal numbers."""
    base = BASES[dtype]
    bits = (exponent.to(base.integer) + (1 - base.min_exponent)) << (base.precision - 1)
    return bits.view(dtype)


def wider_than(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which products of numbers of x's dtype are exact, or None.

    None means that there is no such dtype, or that the device lacks it.
    """
    wider = BASES[x.dtype].wider
    return wider if wider != torch.float64 or widest(x.device) == wider else None
