"""Expansions of 8-bit floats: sums of E4M3 codes under the scale of a block, to store weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import mcftensor as mcf
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.formats.block_codes import MXFP8, Scales, factors_of
from mcftensor.kernels.block_scales import spread

TERMS = (2, 3, 4)
APART = 4  # A remainder is at most half a unit of four bits: it fits under a scale of 2^-4 of that.
_CODEC = MXFP8("mxfp8", "nearest")
_ONE = 127  # the exponent of a scale of 1


def _values(codes: Tensor) -> Tensor:
    """The E4M3 numbers of codes."""
    codes = codes.to(torch.int32)
    return _CODEC.read(codes, torch.full_like(codes, _ONE))


class E4M3Terms(mcf.Format):
    """Each term is the E4M3 nearest to what the terms before it leave, and the last may be rounded
    in a balanced way. The scale is that of `mxfp8`.

    Arithmetic is that of float32: what writes decodes, computes, and encodes. A model computes with
    the leading term.

    Args:
        terms: how many.
        apart: whether the scale of each term is 2^-4 of that before it, where it is the same
            otherwise. Small remainders reach E4M3's least number later, and nothing more is stored.
        rounding: of the last term, `"nearest"` or `"balanced"`.
    """

    def __init__(self, terms: int, apart: bool, rounding: Rounding) -> None:
        self.step, self.rounding = 2.0**APART if apart else 1.0, rounding
        self.name = f"e4m3x{terms}" + "s" * apart + {"nearest": "", "balanced": "br"}[rounding]
        codes = (mcf.formats.Component(f"codes{i}", torch.uint8) for i in range(terms))
        self.components = (*codes, Scales("scales", torch.uint8))
        self.numbers = mcf.formats.Machine(torch.float32)
        self.computes_as = ("mxfp8", (0, terms))

    @property
    def dtype(self) -> torch.dtype:
        """That in which a model computes, as codes by themselves are no numbers."""
        return torch.bfloat16

    @property
    def of_states(self) -> mcf.Format:
        """float32."""
        return mcf.bf16i16

    def decode(self, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sum of the codes, times the scale: a float32 holds it."""
        *codes, scales = stored
        x = _values(codes[0])
        for i, c in enumerate(codes[1:], start=1):
            x = x + _values(c) * self.step**-i
        return (x * factors_of(scales, codes[0]),)

    def encode(self, number: Sum, noise: Noise | None) -> Sequence[Tensor]:
        """One term after another of what is left, which a float32 holds."""
        rest = number.to_odd()
        first, scales = _CODEC.encode(number, None)
        shared, factors = spread(scales, first).to(torch.int32), factors_of(scales, first)
        terms = [first]
        for i in range(2, len(self.components)):
            rest = (rest - _values(terms[-1]) * factors) * self.step
            magnitude = rest.view(torch.int32) & 0x7FFFFFFF
            is_last = i == len(self.components) - 1
            terms.append(_CODEC.written(rest, magnitude, shared, noise if is_last else None))
        return (*terms, scales)


for _terms in TERMS:
    for _rounding in ("nearest", "balanced"):
        for _apart in (False, True):
            E4M3Terms(_terms, _apart, _rounding).register()
