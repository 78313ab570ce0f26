"""Numbers that are hard to compute with, the same on every machine and in every release.

They are made on the CPU from integer hashes and exact scaling."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.noise import shifted, signed
from mcftensor.formats import ExpansionFormat
from mcftensor.kernels.program import PATTERNS
from mcftensor.passes import expansion


def hashes(name: str, *shape: int) -> Tensor:
    """Return int64 of `shape`: SplitMix64 of a name and of the index of each element."""
    index = torch.arange(1, math.prod(shape) + 1, device="cpu") + (zlib.crc32(name.encode()) << 20)
    z = index * signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ shifted(z, shift)) * signed(factor)
    return (z ^ shifted(z, 31)).view(shape)


def any_bits(dtype: torch.dtype, name: str, *shape: int) -> Tensor:
    """Return any bit patterns: one in eight is infinite or NaN, one in eight subnormal or zero."""
    kind, z = hashes(f"{name} kind", *shape) & 7, hashes(name, *shape)
    bits = (z >> (64 - 8 * dtype.itemsize)).to(PATTERNS[dtype.itemsize])
    infinity = torch.tensor(math.inf, dtype=dtype, device="cpu").view(bits.dtype)
    bits = torch.where(kind == 0, bits | infinity, bits)
    return torch.where(kind == 1, bits & ~infinity, bits).view(dtype)


def full_bits(dtype: torch.dtype, name: str, *shape: int) -> Tensor:
    """Numbers from 2^-6 to 2^6 of either sign, whose significands have all bits of the type."""
    z, bits = hashes(name, *shape), BASES[dtype].precision
    significands = ((z >> 8) & (2 ** (bits - 1) - 1)) + 2 ** (bits - 1)
    exponents = (z & 15) % 12 - 6 - (bits - 1)
    signs = 1 - 2 * ((z >> 4) & 1)
    wide = torch.promote_types(dtype, torch.float32)
    return ((signs * significands).to(wide) * torch.exp2(exponents.to(wide))).to(dtype)


def hard_terms(format: ExpansionFormat, name: str, *shape: int) -> list[Tensor]:
    """Return components of normalized numbers with all bits; one in four has any bits."""
    own = [
        full_bits(format.base, f"{name} {i}", *shape) * format.u**i / 64
        for i in range(format.terms)
    ]
    terms = expansion.renormalize([own[0] * 64, *own[1:]])
    is_any = hashes(f"{name} any", *shape) & 3 == 0
    return [
        torch.where(is_any, any_bits(t.dtype, f"{name} bits {i}", *shape), t)
        for i, t in enumerate(terms)
    ]
