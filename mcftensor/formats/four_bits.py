"""Formats of half a byte an element: codes of four bits, two in a byte, and a scale for each block.

All their numbers are powers of two, so a code is a part of a float32's exponent. The scale is a
power of two, too. So the numbers that a block can hold are the same under each scale, apart from
the range. Otherwise a moment would be rounded whenever its block's largest element changed.
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
from mcftensor.kernels.block_scales import pack, shape_of_packed, unpack

_LOST = 23  # all bits of a float32's significand
_INFINITY = 0x7F800000


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
    """Half a byte for each element, and a byte more for each block of 32 elements of a row."""

    def __init__(self, stem: str, rounding: Rounding) -> None:
        codes, scales = PackedCodes("codes", torch.uint8), Scales("scales", torch.uint8)
        StoredFormat.__init__(self, stem, rounding, codes, scales)

    @property
    @abstractmethod
    def unpacked(self) -> Format:
        """The format of a byte for tensors with an odd second dimension."""

    @property
    def precision(self) -> int:
        """One significant bit."""
        return 1

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


class E3M0(FourBitFormat):
    """Signed codes for first moments: a sign, and a power of two over 7 binades, or zero.

    Code c above 0 is 2^(c - 7) times the scale. The scale is the smallest power of two that no
    element of the block exceeds. Numbers below the smallest code, 2^-6 of the scale, become it or
    zero. Infinities and NaNs become NaNs, with the code of -0, and do not affect the rest of their
    block. Numbers below 2^-126 become zero, and those above 2^127 saturate.
    """

    @property
    def unpacked(self) -> Format:
        """`mxfp8`."""
        return mxfp8.with_rounding(self.rounding)

    def read(self, codes: Tensor) -> Tensor:
        """Return the magnitude as an exponent, with the sign."""
        magnitude = codes & 7
        x = torch.where(magnitude == 0, 0.0, ((magnitude + 120) << _LOST).view(torch.float32))
        return torch.where(codes == 8, torch.nan, x.copysign((codes << 28).view(torch.float32)))

    def sized(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """Return the patterns of finite numbers, and 0 for others."""
        return torch.where(magnitude < _INFINITY, magnitude, 0)

    def scale_of(self, largest: Tensor) -> Tensor:
        """Return the exponent of the smallest power of two from the largest number on."""
        return _ceiling(largest, 7)

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """Return the sign and the rounded exponent over the smallest code's."""
        bits = magnitude + ((133 - scales) << _LOST)
        is_normal = (magnitude >= 1 << _LOST) & (bits > 0)
        y = torch.where(is_normal, bits, 0).view(torch.float32)  # over the smallest code
        moved = y + 1.0
        small = moved.view(torch.int32) - (1 << _LOST)
        if noise is None:  # round the sum to odd, so that ties are ties of the number
            kept = moved - 1.0
            small = (small - (kept > y).to(torch.int32)) | (kept != y).to(torch.int32)
        codes = round_off(torch.where(y < 1, small, y.view(torch.int32)), noise, _LOST) - 126
        codes = torch.where(codes > 7, 7, codes)
        codes = torch.where(codes > 0, codes | ((x.view(torch.int32) >> 28) & 8), 0)
        return torch.where(magnitude < _INFINITY, codes, 8).to(torch.uint8)


class UE4M0(FourBitFormat, SecondMoments):
    """Unsigned codes for second moments: a power of two over 15 binades, and zero.

    Code c above 0 is 2^(c - 15) times the scale, the smallest power of two that no element of the
    block exceeds. Nonzero numbers below the smallest code, 2^-14 of the scale, are raised to it:
    only zero becomes zero, as in `ue5m3`. Noise rounds up so that roots are right in the mean.

    A block with a number above 2^126, an infinity, a NaN or a negative number has the scale 2^127.
    Its finite numbers saturate at 2^125. Code 14 is an infinity. Code 15 is a NaN, and also stands
    for a negative number. No other element becomes one of these.
    """

    infinite = 14

    @property
    def unpacked(self) -> Format:
        """`ue5m3`."""
        return ue5m3.with_rounding(self.rounding)

    @property
    def largest(self) -> float:
        """2^125, since the last two codes of the largest scale are special values."""
        return 2.0**125

    def read(self, codes: Tensor) -> Tensor:
        """Return the codes as exponents."""
        return torch.where(codes == 0, 0.0, ((codes + 112) << _LOST).view(torch.float32))

    def scale_of(self, largest: Tensor) -> Tensor:
        """Return the exponent of the smallest power of two from the largest number on."""
        return _ceiling(largest, 15)

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """Return the rounded exponents over the scale's."""
        bits = magnitude if noise is None else _by_roots(magnitude)
        codes = round_off(bits, noise, _LOST) - scales + 15
        codes = torch.where(codes > 15, 15, codes)
        return self.with_special(codes, x, magnitude, scales)


def _ceiling(largest: Tensor, least: int) -> Tensor:
    """Return the biased exponent of the power of two at or above a pattern, from `least` to 254."""
    exponent = (largest + ((1 << _LOST) - 1)) >> _LOST
    exponent = exponent.maximum(torch.full_like(exponent, least))
    return torch.where(exponent > 254, 254, exponent)


def _by_roots(bits: Tensor) -> Tensor:
    """Replace the share t of the step between two powers of two by that of the root, to 2 % of the
    step: t + 3/16 t (1 - t).
    """
    t = (bits >> 8) & 0x7FFF
    return bits + ((t * (0x8000 - t)) >> 11) * 3


for _rounding in SUFFIXES:
    E3M0("e3m0", _rounding).register()
    UE4M0("ue4m0", _rounding).register()

e3m0 = named("e3m0")
ue4m0 = named("ue4m0")
