"""Formats of half a byte an element: codes of four bits, two in a byte, and a scale for each block.

A first moment changes by a tenth in each step and is rounded in each, so its codes have the finest
numbers for the largest element of the block. A second moment hardly changes in a step. Its numbers
are the same under every scale with the same step, and among those of all smaller steps. Otherwise
it would be rounded whenever the largest element of the block changed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Sum
from mcftensor.formats.block_codes import (
    BlockFormat,
    Scales,
    SecondMoments,
    mxfp8,
    require_rows,
    round_off,
    ue5m3,
)
from mcftensor.formats.format import SUFFIXES, Component, Format, StoredFormat, named
from mcftensor.formats.moving import view_of_rows
from mcftensor.kernels.block_scales import block_max, pack, shape_of_packed, unpack

_LOST = 23  # all bits of a float32's significand
_EIGHTH = _LOST - 3  # of a binade
_REACH = 14 * 2**_EIGHTH + 2  # patterns: `least` is one too small, and a product may round up
_INFINITY = 0x7F800000
_SHARES = 28 * (1 + 2.0**-20)  # numbers of a block are not below their codes


class PackedCodes(Component):
    """Codes of four bits: bytes of two neighbours of a row, in half the second dimension."""

    @property
    def is_packed(self) -> bool:
        """True: a byte holds two codes."""
        return True

    def shape(self, shape: torch.Size) -> torch.Size:
        """Return a shape with half the second dimension.

        Raises:
            ValueError: the tensor has less than two dimensions, or an odd second one.
        """
        require_rows(shape)
        if shape[1] % 2:
            raise ValueError(
                f"formats of four bits store tensors with an even second dimension, not of shape "
                f"{tuple(shape)}; use mcf.mxfp8 or mcf.ue5m3"
            )
        return shape_of_packed(shape)


class FourBitFormat(BlockFormat):
    """Half a byte for each element, and two bytes for each block of 32 elements of a row."""

    def __init__(self, stem: str, rounding: Rounding) -> None:
        codes, scales = PackedCodes("codes", torch.uint8), Scales("scales", torch.int16)
        StoredFormat.__init__(self, stem, rounding, codes, scales)

    @property
    @abstractmethod
    def unpacked(self) -> Format:
        """The format of a byte for tensors with an odd second dimension."""

    @property
    def bytes(self) -> float:
        """Half a byte."""
        return 0.5

    def decode(self, stored: Floats) -> Floats:
        """Return one float32: the value of the code times the scale of its block."""
        codes, scales = stored
        return super().decode((unpack(codes), scales))

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Return packed codes, rounded once, and the smallest scales that fit the largest
        element.
        """
        codes, scales = super().encode(number, noise)
        return pack(codes), scales

    def move(
        self, func: Any, stored: Floats, shape: torch.Size, args: Any, kwargs: Any, *, own: bool
    ) -> list[Any] | None:
        """Apply an operator that moves elements to each component; None if it cuts a byte."""
        view = view_of_rows(func.overloadpacket.__name__, shape, args)
        if view is None:
            return super().move(func, stored, shape, args, kwargs, own=own)
        if view[1] % 2:
            return None
        codes, scales = stored
        return [func(codes, shape_of_packed(view)), scales.clone() if own else scales.detach()]


class Q4(FourBitFormat):
    """Signed codes for first moments, whose distances grow with the magnitude.

    A code is a sign and c from 0 to 7, and stands for c (c + 1) / 56 of the scale. The scale is the
    block's largest element, as bfloat16. So a block reaches from its largest element to a 28th of
    it, and zero. Infinities and NaNs become NaNs, with the code of -0, and do not affect the rest
    of their block. Numbers below 2^-126 become zero, and those above 3.39e38 saturate.
    """

    @property
    def precision(self) -> int:
        """Three bits: beside the largest element, numbers differ by a quarter of it."""
        return 3

    @property
    def unpacked(self) -> Format:
        """`mxfp8`."""
        return mxfp8.with_rounding(self.rounding)

    @property
    def smallest(self) -> tuple[float, float]:
        """The smallest scale, and a 28th of it."""
        return 2.0**-121, 2.0**-121 * torch.tensor(1 / 28, dtype=torch.float32, device="cpu").item()

    @property
    def largest(self) -> float:
        """The largest bfloat16."""
        return torch.finfo(torch.bfloat16).max

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the share of the scale, with the sign."""
        c = codes & 7
        share = ((c * (c + 1)) >> 1).to(torch.float32) * (1 / 28)
        share = share.copysign((codes << 28).view(torch.float32))
        return torch.where(codes == 8, torch.nan, share) * (scales << 16).view(torch.float32)

    def scale_of(self, patterns: Tensor) -> Tensor:
        """Return the largest number as bfloat16; codes of numbers below 2^-121 are subnormal."""
        scale = (block_max(patterns) + 0x8000) >> 16
        scale = scale.maximum(torch.full_like(scale, 6 << 7))
        return torch.where(scale > 0x7F7F, 0x7F7F, scale)

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """Return sign and c. It is the last i for which y, in 28ths of the scale, is at least
        i (i - 1) / 2 + (1 - n) i: beyond i - 1 by the share 1 - n of the step. So it is the whole
        part of the root of a quadratic equation. The noise n is 1/2 to nearest; d is 2 n - 1, in
        units of 2^-15.
        """
        scale = (scales.to(torch.int32) << 16).view(torch.float32)
        finite = self.sized(x, magnitude)
        y = torch.where(finite >= 1 << _LOST, finite, 0).view(torch.float32) / scale
        y = torch.where(y > 1 - 2.0**-8, 1.0, y) * (_SHARES * 2.0**33)  # the largest number stays
        d = torch.zeros_like(y)
        if noise is not None:
            d = (noise.bits(16) - (1 << 15)).to(torch.float32)
        c = (((d * d + y).sqrt() + d) * 2.0**-16).to(torch.int32)
        codes = torch.where(c > 0, c | ((x.view(torch.int32) >> 28) & 8), 0)
        return torch.where(magnitude < _INFINITY, codes, 8).to(torch.uint8)


class UE4(FourBitFormat, SecondMoments):
    """Unsigned codes for second moments: zero, and 15 numbers in steps of a binade, or of a half, a
    quarter or an eighth of one.

    Steps add to the pattern of a float32: half steps lead to 1 and 1.5 times a power of two. A
    block has the smallest step of which 14, or 14 binades, span its numbers above zero. The scale
    is the smallest multiple of the step, as a pattern, that no element exceeds. Code c above 0 is
    15 - c steps below it. Numbers below the smallest code are raised to it: only zero becomes
    zero, as in `ue5m3`. Noise rounds up so that roots are right in the mean.

    A block with a number above 2^126, an infinity, a NaN or a negative number has the scale 2^127.
    Its finite numbers saturate at 2^125. Code 14 is an infinity. Code 15 is a NaN, and also stands
    for a negative number. No other element becomes one of these.
    """

    infinite = 14
    top = (254 << 3) + (8 << 11)

    @property
    def precision(self) -> int:
        """One significant bit, and up to four in blocks of like numbers."""
        return 1

    @property
    def unpacked(self) -> Format:
        """`ue5m3`."""
        return ue5m3.with_rounding(self.rounding)

    @property
    def largest(self) -> float:
        """2^125, since the last two codes of the largest scale are special values."""
        return 2.0**125

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the pattern of the scale, less the steps."""
        step = _eighths(scales) << _EIGHTH
        bits = codes * step + (_highest(scales) - 15 * step)
        return torch.where(codes == 0, 0, bits).view(torch.float32)

    def scale_of(self, patterns: Tensor) -> Tensor:
        """Return the scale's pattern in eighths of a binade, and 2^11 times the step in eighths."""
        most = block_max(patterns)
        least = 0x7FFFFFFF - block_max(-patterns & 0x7FFFFFFF)  # the smallest above zero, less 1
        span = torch.where(most > 253 << _LOST, most, most - least).to(torch.float32)
        steps = (span * (1 / _REACH)).view(torch.int32)  # of an eighth
        exponent = (steps + ((1 << _LOST) - 1)) >> _LOST
        exponent = exponent.maximum(torch.full_like(exponent, 127))
        eighths = _power(exponent.minimum(torch.full_like(exponent, 130)))
        step = eighths << _EIGHTH
        highest = (most.maximum(15 * step) + (step - 1)) & -step
        highest = torch.where(highest > 254 << _LOST, 254 << _LOST, highest)
        return (highest >> _EIGHTH) + (eighths << 11)

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """Return the steps above the code 0, rounded."""
        eighths = _eighths(scales)
        above = magnitude - (_highest(scales) - ((15 * eighths) << _EIGHTH))
        steps = _power(257 - (eighths.to(torch.float32).view(torch.int32) >> _LOST))  # of a binade
        bits = above.maximum(torch.zeros_like(above)) * steps
        codes = round_off(bits if noise is None else _by_roots(bits, eighths), noise, _LOST)
        codes = codes.minimum(torch.full_like(codes, 15))
        return self.with_special(codes, x, magnitude, scales)


def _highest(scales: Tensor) -> Tensor:
    """Return the float32 pattern of a scale."""
    return (scales.to(torch.int32) & 0x7FF) << _EIGHTH


def _eighths(scales: Tensor) -> Tensor:
    """Return the step between the patterns of codes, in eighths of a binade."""
    return scales.to(torch.int32) >> 11


def _power(exponents: Tensor) -> Tensor:
    """Return powers of two, of biased exponents, as integers: programs shift by constants alone."""
    return (exponents << _LOST).view(torch.float32).to(torch.int32)


def _by_roots(bits: Tensor, eighths: Tensor) -> Tensor:
    """Replace the share t of the step between two numbers by that of the root, to 2 % of the
    step: t + 3/16 t (1 - t) for powers of two, and less in proportion for smaller steps.
    """
    t = (bits >> 8) & 0x7FFF
    return bits + ((t * (0x8000 - t)) >> 14) * (3 * eighths)


for _rounding in SUFFIXES:
    Q4("q4", _rounding).register()
    UE4("ue4", _rounding).register()

q4 = named("q4")
ue4 = named("ue4")
