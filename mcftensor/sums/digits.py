"""Grids: the positions of digits that sums of floats have.

The digit at position k counts multiples of 2^(31 k). The digits of a sum of floats are the sums of
their digits, position by position. These are sums of integers, so they are exact and have no order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from mcftensor.arithmetic.base_types import BASES
from mcftensor.kernels.digit_body import WIDTH


@dataclass(frozen=True)
class Grid:
    """`count` consecutive positions from `lowest` on."""

    lowest: int
    count: int


@functools.lru_cache(maxsize=64)
def least_of(dtype: torch.dtype, factors: int) -> int:
    """Return the exponent of the smallest product of `factors` floats of a dtype."""
    base = BASES[dtype]
    return factors * (base.min_exponent - base.precision + 1)


@functools.lru_cache(maxsize=64)
def grid_of(dtype: torch.dtype, factors: int) -> Grid:
    """Return the positions of sums of up to 2^60 products of `factors` floats of a dtype."""
    lowest = least_of(dtype, factors) // WIDTH
    highest = (factors * (BASES[dtype].max_exponent + 1) + 60) // WIDTH
    return Grid(lowest, highest - lowest + 1)


WIDEST = grid_of(torch.float64, 2)
"""The positions of every sum and of every sum of products."""
