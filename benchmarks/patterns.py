"""Floats of 16 bits by their bit patterns: their values, and rounding to them.

Written to hold the library against; it shares no code with it. Patterns are int16 tensors, exact
values are float64 ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

EVERY_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@dataclass(frozen=True)
class Numbers:
    """Numbers of 16 bits, each as significand * 2^(exponent - p + 1) with the sign of its value.

    Zeros and subnormals have the exponent of the smallest normal number.
    """

    floats: Tensor
    values: Tensor
    exponents: Tensor
    significands: Tensor

    @property
    def patterns(self) -> Tensor:
        """The bits of the numbers."""
        return self.floats.view(torch.int16)


@dataclass(frozen=True)
class Base:
    """A type of 16 bits: a sign, 16 - p bits of exponent, p - 1 of fraction."""

    name: str
    dtype: torch.dtype
    precision: int

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (15 - self.precision)

    @property
    def infinity(self) -> int:
        """The pattern of infinity: an exponent all ones, no fraction."""
        return (2 ** (16 - self.precision) - 1) << (self.precision - 1)

    def overflow(self, bits: int) -> float:
        """The least number that overflows when it is rounded to so many bits: a tie."""
        return (2 - 2.0**-bits) * 2.0 ** (1 - self.min_exponent)

    def numbers(self, patterns: Tensor) -> Numbers:
        """The numbers of these patterns, read from the fields."""
        magnitudes = patterns.long() & 0x7FFF
        fields = magnitudes >> (self.precision - 1)
        hidden = 1 << (self.precision - 1)
        significands = (magnitudes & (hidden - 1)) + (fields > 0) * hidden
        exponents = fields.clamp(min=1) - 1 + self.min_exponent
        # numpy's ldexp is exact; torch's multiplies by a power.
        scaled = np.ldexp(
            significands.cpu().numpy().astype(np.float64),
            (exponents - self.precision + 1).cpu().numpy(),
        )
        values = torch.from_numpy(scaled).to(patterns.device)
        values = torch.where(magnitudes == self.infinity, torch.inf, values)
        values = torch.where(magnitudes > self.infinity, torch.nan, values)
        values = torch.where(patterns < 0, -values, values)
        return Numbers(patterns.view(self.dtype), values, exponents.to(torch.int16), significands)

    def is_finite(self, patterns: Tensor) -> Tensor:
        """Where patterns are neither infinities nor NaN."""
        return (patterns & 0x7FFF) < self.infinity

    def is_nan(self, patterns: Tensor) -> Tensor:
        """Where patterns are NaN."""
        return (patterns & 0x7FFF) > self.infinity

    def round(self, exact: Tensor) -> Tensor:
        """Float64 numbers rounded to nearest, ties to even.

        Subnormals and overflow included; NaN becomes an infinity. No number may be a subnormal of
        float64.
        """
        bits = exact.view(torch.int64)
        # What is at least 2^(e_max + 1), NaN too, becomes that number, whose pattern is infinity's.
        magnitudes = (bits & (2**63 - 1)).clamp(max=(1023 + 2 - self.min_exponent) << 52)
        significands = (magnitudes & (2**52 - 1)) | 2**52
        above = (magnitudes >> 52) - (1023 + self.min_exponent)
        # The lower an exponent below the normal numbers, the more bits go; with p + 1 more, all
        # are gone, the tie included.
        bits_lost = (-above).clamp(0, self.precision + 1) + (53 - self.precision)
        odd = (significands >> bits_lost) & 1
        kept = (significands + odd + ((1 << (bits_lost - 1)) - 1)) >> bits_lost
        # The hidden bit, where kept has one, and a carry out of it raise the exponent by one each.
        patterns = (kept + (above.clamp(min=0) << (self.precision - 1))).to(torch.int16)
        sign = (bits >> 48).to(torch.int16) & -(2**15)
        return (patterns | sign).view(self.dtype)

    def adds_exactly(self, a: Numbers, b: Numbers) -> Tensor:
        """Where float64 holds a + b: in units of the smaller one's last place it has 53 bits."""
        return (a.exponents - b.exponents).abs() <= 52 - self.precision


BASES = {
    "bf16": Base("bf16", torch.bfloat16, 8),
    "fp16": Base("fp16", torch.float16, 11),
}


def root_to_odd(significand: int, exponent: int) -> float:
    """The root of significand * 2^exponent to some 30 bits, the last one odd unless it is exact.

    Rounding it to at most 28 bits rounds the root.
    """
    odd = exponent % 2
    n = significand << (60 + odd)
    root = math.isqrt(n)
    return math.ldexp(root | (root * root != n), (exponent - odd) // 2 - 30)
